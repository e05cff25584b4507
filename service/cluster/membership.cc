#include "service/cluster/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kSecond = 1'000 * kMs;
constexpr std::int64_t kSettleNanos = 10 * kMs;
constexpr std::int64_t kCallNanosMax = 5 * kSecond;

// All of these follow from the lease: what takes longer than it is too late anyway.
std::int64_t ThirdOf(const Membership::Options& options) {
  return options.lease_seconds * kSecond / 3;
}
std::int64_t SilenceOf(const Membership::Options& options) {
  return std::max(kSecond, ThirdOf(options));
}

Roster::Options RosterOptions(const Membership::Options& options) {
  return {.prefix = MembersPrefix(options.prefix),
          .call_nanos = std::min(kCallNanosMax, ThirdOf(options)),
          .silence_nanos = SilenceOf(options),
          .back_off_nanos_max = ThirdOf(options),
          .seed = options.seed};
}

Registrar::Options RegistrarOptions(const Membership::Options& options) {
  return {.key = MemberKey(options.prefix, options.self.member.id),
          .registration = options.self,
          .lease_seconds = options.lease_seconds,
          .call_nanos = std::min(kCallNanosMax, ThirdOf(options)),
          .back_off_nanos_max = ThirdOf(options),
          .seed = options.seed + 1};
}

}  // namespace

absl::Status Membership::Check(const Options& options) {
  KVMILL_RETURN_IF_ERROR(EncodeRegistration(options.self).status());
  const std::string key = MemberKey(options.prefix, options.self.member.id);
  if (options.prefix.empty() || key.size() > Registry::kKeyBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefix of ", options.prefix.size(), " bytes: keys have 1 to ", Registry::kKeyBytesMax));
  }
  if (options.lease_seconds < kLeaseSecondsMin || options.lease_seconds > kLeaseSecondsMax) {
    return absl::InvalidArgumentError(absl::StrCat("lease of ", options.lease_seconds, " s: want ",
                                                   kLeaseSecondsMin, " to ", kLeaseSecondsMax));
  }
  if (options.grace_seconds < 0 || options.grace_seconds > kGraceSecondsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("grace of ", options.grace_seconds, " s: want 0 to ", kGraceSecondsMax));
  }
  return absl::OkStatus();
}

Membership::Membership(Loop& loop, Registry& registry, Options options, Publish publish)
    : loop_(loop),
      options_(std::move(options)),
      publish_(std::move(publish)),
      members_(options_.lease_seconds * kSecond, options_.grace_seconds * kSecond),
      roster_(loop, registry, RosterOptions(options_),
              {.present =
                   [this](const Registry::Entry& entry, const Registration& registration) {
                     members_.Present(registration.member);
                     members_changed_ = true;
                     if (registration.member.id == options_.self.member.id) {
                       registrar_.Seen(entry, registration);
                     }
                   },
               .gone =
                   [this](const std::string& id, Registry::Revision revision) {
                     members_.Gone(id, Now());
                     members_changed_ = true;
                     if (id == options_.self.member.id) registrar_.SeenGone(revision);
                   },
               .other_history = [this] { registrar_.Forget(); },
               .told = [this](bool listed, Registry::Revision revision) { Told(listed, revision); },
               .following = [this](bool following,
                                   const absl::Status& why) { Following(following, why); }}),
      registrar_(loop, registry, RegistrarOptions(options_),
                 {.changed = [this] { Changed(); },
                  .saw = [this](const Registry::Header& header,
                                bool exact) { roster_.Saw(header, exact); },
                  // It may have ended because the registry has lost more than that.
                  .lost_lease = [this] { roster_.ListAgain(); }}),
      snapshot_(std::make_shared<const MembershipSnapshot>()) {}

Membership::~Membership() {
  for (const Loop::TimerId timer : {publish_timer_, stale_timer_, grace_timer_}) {
    if (timer != 0) loop_.Cancel(timer);
  }
}

void Membership::Start() {
  roster_.Start();
  registrar_.Start();
}

void Membership::Following(bool following, const absl::Status& why) {
  following_problem_ = why;
  if (following) {
    if (stale_timer_ != 0) loop_.Cancel(std::exchange(stale_timer_, 0));
    stale_ = false;
  } else if (following_) {
    // The break may have been noticed only after the silence.
    const std::int64_t lease = options_.lease_seconds * kSecond;
    stale_timer_ = loop_.After(std::max<std::int64_t>(0, lease - SilenceOf(options_)), [this] {
      stale_timer_ = 0;
      stale_ = true;
      Changed();
    });
  }
  following_ = following;
  Changed();
}

void Membership::Told(bool listed, Registry::Revision revision) {
  const std::string& id = options_.self.member.id;
  if (listed && !roster_.Has(id)) registrar_.SeenGone(revision);
  Changed();
}

void Membership::Changed() {
  if (publish_timer_ != 0) return;
  publish_timer_ = loop_.After(kSettleNanos, [this] {
    publish_timer_ = 0;
    PublishNow();
  });
}

void Membership::PublishNow() {
  members_changed_ |= members_.Advance(Now());
  if (grace_timer_ != 0) loop_.Cancel(std::exchange(grace_timer_, 0));
  if (const std::optional<std::int64_t> deadline = members_.deadline_nanos()) {
    grace_timer_ = loop_.At(*deadline, [this] {
      grace_timer_ = 0;
      PublishNow();
    });
  }
  const MembershipSnapshot& last = *snapshot_;
  auto next = std::make_shared<MembershipSnapshot>();
  next->version = last.version;
  if (std::exchange(members_changed_, false)) {
    next->members = members_.Believed();
  } else {
    next->members = last.members;
  }
  // An empty list that was heard is news, too.
  const bool heard = last.registry_id == 0 && roster_.cluster_id() != 0;
  if (next->members != last.members || heard) ++next->version;
  next->stale = stale_;
  next->keeping = members_.keeping();
  next->registration = registrar_.state();
  next->problem = registrar_.problem().ok() ? following_problem_ : registrar_.problem();
  next->registry_id = roster_.cluster_id();
  if (next->version == last.version && next->stale == last.stale && next->keeping == last.keeping &&
      next->registration == last.registration && next->problem == last.problem &&
      next->registry_id == last.registry_id) {
    return;
  }
  snapshot_ = std::move(next);
  publish_(snapshot_);
}

}  // namespace kvmill
