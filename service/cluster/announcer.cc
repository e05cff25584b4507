#include "service/cluster/announcer.h"

#include <algorithm>
#include <utility>

namespace kvmill {

Announcer::Announcer(Loop& loop, Peers& peers, PeerHealth& health, Options options)
    : loop_(loop), peers_(peers), health_(health), options_(std::move(options)), homes_(1) {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
}

Announcer::~Announcer() {
  loop_.Cancel(timer_);
  for (const Home& home : homes_) {
    if (home.call != 0) peers_.Cancel(home.call);
  }
}

void Announcer::Set(std::uint64_t anchor_hash, std::uint8_t count) {
  const auto [place, added] = places_.try_emplace(anchor_hash, entries_.size());
  if (added) {
    if (count == 0) {
      places_.erase(place);
      return;
    }
    entries_.push_back({.hash = anchor_hash});
  }
  Entry& entry = entries_[place->second];
  if (entry.count == count) return;
  entry.count = count;
  // Nobody heard of it: nobody needs to hear that it is gone.
  if (count == 0 && entry.told == 0 && entry.told_at == 0) return Remove(place->second);
  entry.told = 0;
}

void Announcer::Remove(std::size_t at) {
  places_.erase(entries_[at].hash);
  if (at + 1 != entries_.size()) {
    entries_[at] = entries_.back();
    places_[entries_[at].hash] = at;
  }
  entries_.pop_back();
}

std::uint32_t Announcer::NumberOf(const Member& home) {
  const auto [found, added] = numbers_.try_emplace(Name{home.id, home.incarnation},
                                                   static_cast<std::uint32_t>(homes_.size()));
  if (added) homes_.push_back({found->first, 0});
  return found->second;
}

void Announcer::Tick() {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
  if (view_ == nullptr || view_->serving_count() == 0 || entries_.empty()) return;
  const std::int64_t now = loop_.clock().MonotonicNanos();
  std::map<MemberIndex, std::vector<Announcement>> batches;
  const std::size_t slice = std::min(entries_.size(), kSliceMax);
  for (std::size_t i = 0; i < slice; ++i) {
    if (next_ >= entries_.size()) next_ = 0;
    const Entry& entry = entries_[next_++];
    const MemberIndex home = view_->table().Ranking(view_->table().ShardOf(entry.hash))[0];
    const std::uint32_t number = NumberOf(view_->members()[home]);
    if (entry.told == number && now - entry.told_at < options_.repeat_nanos) continue;
    if (homes_[number].call != 0) continue;
    std::vector<Announcement>& batch = batches[home];
    if (batch.size() < kAnnouncementsMax) batch.push_back({entry.hash, entry.count});
  }
  for (auto& [home, batch] : batches) Tell(home, std::move(batch));
}

void Announcer::Tell(MemberIndex index, std::vector<Announcement> batch) {
  const Member& home = view_->members()[index];
  const std::uint32_t number = NumberOf(home);
  if (home.id == options_.self_id) {
    options_.to_self(batch);
    return Told(number, batch);
  }
  if (!health_.Admit(home)) return;
  homes_[number].call =
      peers_.Announce(home, batch, loop_.clock().MonotonicNanos() + options_.call_nanos,
                      [this, number, batch, home](const absl::Status& status) {
                        homes_[number].call = 0;
                        if (!status.ok()) return health_.Failed(home, PeerHealth::Fault::kFailed);
                        health_.Succeeded(home);
                        Told(number, batch);
                      });
}

void Announcer::Told(std::uint32_t number, const std::vector<Announcement>& batch) {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  for (const Announcement& said : batch) {
    const auto found = places_.find(said.anchor_hash);
    // It changed meanwhile: said again with the next tick.
    if (found == places_.end() || entries_[found->second].count != said.count) continue;
    if (said.count == 0) {
      Remove(found->second);
      continue;
    }
    entries_[found->second].told = number;
    entries_[found->second].told_at = now;
  }
}

std::size_t Announcer::untold() const {
  return static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.told == 0; }));
}

}  // namespace kvmill
