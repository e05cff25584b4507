#include "service/cluster/roster.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

constexpr std::int64_t kBackOffNanos = 50'000'000;

}  // namespace

Roster::Roster(Loop& loop, Registry& registry, Options options, Calls calls)
    : loop_(loop),
      registry_(registry),
      options_(std::move(options)),
      calls_(std::move(calls)),
      back_off_(kBackOffNanos, options_.back_off_nanos_max, options_.seed) {}

Roster::~Roster() { Stop(); }

void Roster::Stop() {
  if (timer_ != 0) loop_.Cancel(std::exchange(timer_, 0));
  if (call_ != 0) registry_.Cancel(std::exchange(call_, 0));
  listing_ = false;
}

void Roster::Later(void (Roster::*next)()) {
  Stop();
  timer_ = loop_.After(back_off_.Next(), [this, next] {
    timer_ = 0;
    (this->*next)();
  });
}

void Roster::Saw(const Registry::Header& header, bool exact) {
  if (cluster_id_ == 0) return;
  if (header.cluster_id != cluster_id_ || (exact && header.revision < revision_)) ListAgain();
}

void Roster::ListAgain() {
  if (listing_) return;
  Stop();
  List();
}

void Roster::List() {
  listing_ = true;
  call_ = registry_.List(options_.prefix, loop_.clock().MonotonicNanos() + options_.call_nanos,
                         [this](absl::StatusOr<Registry::Listing> listing) {
                           call_ = 0;
                           listing_ = false;
                           if (listing.ok()) return Listed(*listing);
                           calls_.following(false, listing.status());
                           Later(&Roster::List);
                         });
}

void Roster::Listed(const Registry::Listing& listing) {
  const bool other_history = cluster_id_ != 0 && (listing.header.cluster_id != cluster_id_ ||
                                                  listing.header.revision < revision_);
  cluster_id_ = listing.header.cluster_id;
  revision_ = listing.header.revision;
  if (other_history) {
    // Revisions of the two histories have nothing to do with each other.
    for (auto& [key, known] : entries_) known.revision = 0;
    calls_.other_history();
  }
  std::set<std::string> keys;
  for (const Registry::Entry& entry : listing.entries) {
    keys.insert(entry.key);
    const auto known = entries_.find(entry.key);
    if (known == entries_.end() || known->second.revision != entry.mod_revision) Tell(entry);
  }
  std::vector<std::string> gone;
  for (const auto& [key, known] : entries_) {
    if (!keys.contains(key)) gone.push_back(key);
  }
  for (const std::string& key : gone) TellGone(key, revision_);
  calls_.told(true, revision_);
  if (call_ == 0 && timer_ == 0) Watch();
}

void Roster::Watch() {
  Registry::WatchCalls watch;
  watch.started = [this](const Registry::Header& header) {
    if (header.cluster_id != cluster_id_ || header.revision < revision_) return ListAgain();
    back_off_.Reset();
    calls_.following(true, absl::OkStatus());
  };
  watch.events = [this](const std::vector<Registry::Event>& events) {
    revision_ = events.back().entry.mod_revision;
    for (const Registry::Event& event : events) {
      if (event.deleted) {
        TellGone(event.entry.key, event.entry.mod_revision);
      } else {
        Tell(event.entry);
      }
    }
    calls_.told(false, revision_);
  };
  watch.compacted = [this](Registry::Revision revision) {
    call_ = 0;
    calls_.following(false, absl::OutOfRangeError(absl::StrCat("history up to revision ", revision,
                                                               " is compacted")));
    Later(&Roster::List);
  };
  watch.broken = [this](const absl::Status& why) {
    call_ = 0;
    calls_.following(false, why);
    Later(&Roster::Watch);
  };
  call_ = registry_.Watch(options_.prefix, revision_ + 1, options_.silence_nanos, std::move(watch));
}

void Roster::Tell(const Registry::Entry& entry) {
  const absl::StatusOr<Registration> registration = DecodeRegistration(entry.value);
  // An entry of a later version, or of nobody we know, is not a member: nobody could talk to it.
  if (!registration.ok() || entry.key != options_.prefix + registration->member.id) {
    return TellGone(entry.key, entry.mod_revision);
  }
  entries_[entry.key] = {registration->member.id, entry.mod_revision};
  calls_.present(entry, *registration);
}

void Roster::TellGone(const std::string& key, Registry::Revision revision) {
  const auto known = entries_.extract(key);
  if (!known.empty()) calls_.gone(known.mapped().id, revision);
}

}  // namespace kvmill
