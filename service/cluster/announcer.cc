#include "service/cluster/announcer.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace kvmill {

namespace {

constexpr std::int64_t kAgainNanos = 1'000'000'000;  // After a withdrawal that failed.

}  // namespace

Announcer::Announcer(Loop& loop, Peers& peers, PeerHealth& health, Options options)
    : loop_(loop),
      peers_(peers),
      health_(health),
      options_(std::move(options)),
      ranks_(options_.copies + 1),
      homes_(1) {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
}

Announcer::~Announcer() {
  loop_.Cancel(timer_);
  for (const Home& home : homes_) {
    if (home.call != 0) peers_.Cancel(home.call);
  }
}

Announcer::HomeNumber Announcer::NumberOf(const Member& home) {
  const auto [found, added] =
      numbers_.try_emplace(Name{home.id, home.incarnation}, static_cast<HomeNumber>(homes_.size()));
  if (added) homes_.push_back({.name = found->first});
  return found->second;
}

void Announcer::SetView(std::shared_ptr<const ClusterView> view) {
  view_ = std::move(view);
  view_homes_.clear();
  members_.clear();
  for (const Member& member : view_->members()) {
    const HomeNumber number = NumberOf(member);
    members_[number] = static_cast<MemberIndex>(view_homes_.size());
    view_homes_.push_back(number);
    if (homes_[number].sums != nullptr) continue;
    homes_[number].sums = std::make_unique<Sums>();
    homes_[number].sums->forgotten.fill(loop_.clock().MonotonicNanos() - 1);
  }
  for (HomeNumber number = 1; number < homes_.size(); ++number) {
    if (!members_.contains(number)) homes_[number].sums.reset();
  }
}

void Announcer::Set(const Announcement& run) {
  const bool nothing = run.sketch.count == 0;
  const auto [place, added] = places_.try_emplace(run.anchor_hash, entries_.size());
  if (added) {
    if (nothing) {
      places_.erase(place);
      return;
    }
    entries_.push_back({.anchor_hash = run.anchor_hash, .sketch = {}});
    told_.resize(told_.size() + ranks_);
  }
  const std::size_t at = place->second;
  entries_[at].sketch = run.sketch;
  if (nothing && view_ == nullptr) Remove(at);  // Nobody has heard of it.
}

void Announcer::Remove(std::size_t at) {
  const std::uint64_t hash = entries_[at].anchor_hash;
  for (std::size_t slot = 0; slot < ranks_; ++slot) Leave(hash, Slots(at)[slot]);
  places_.erase(hash);
  if (at + 1 != entries_.size()) {
    entries_[at] = entries_.back();
    std::copy_n(Slots(entries_.size() - 1), ranks_, Slots(at));
    places_[entries_[at].anchor_hash] = at;
  }
  entries_.pop_back();
  told_.resize(entries_.size() * ranks_);
}

bool Announcer::Knows(std::uint64_t anchor_hash, HomeNumber home, std::int64_t told_at) const {
  const Sums* sums = homes_[home].sums.get();
  return sums != nullptr && told_at > sums->forgotten[DigestOf(anchor_hash)];
}

void Announcer::Sum(std::uint64_t anchor_hash, const Told& told) {
  if (!Knows(anchor_hash, told.home, told.at)) return;
  homes_[told.home].sums->digests[DigestOf(anchor_hash)] ^=
      DigestWord(anchor_hash, told.count, told.sum);
}

void Announcer::Leave(std::uint64_t anchor_hash, const Told& told) {
  if (told.count == 0) return;
  if (former_.size() == kFormerMax) return Sum(anchor_hash, told);
  former_.push_back({loop_.clock().MonotonicNanos() + options_.withdraw_nanos, anchor_hash, told});
}

Announcer::Told& Announcer::SlotOf(std::size_t at, std::size_t rank, HomeNumber home) {
  Told* const slots = Slots(at);
  for (std::size_t other = 0; other < ranks_ && slots[rank].home != home; ++other) {
    if (slots[other].home == home) std::swap(slots[rank], slots[other]);
  }
  return slots[rank];
}

std::size_t Announcer::HomeCount(std::uint64_t anchor_hash) const {
  return std::min(ranks_, view_->table().Ranking(view_->table().ShardOf(anchor_hash)).size());
}

void Announcer::Tick() {
  timer_ = loop_.After(options_.tick_nanos, [this] { Tick(); });
  if (view_ == nullptr || view_->serving_count() == 0) return;
  const std::int64_t now = loop_.clock().MonotonicNanos();
  std::map<MemberIndex, Batch> batches;
  const std::size_t slice = std::min(entries_.size(), kSliceMax);
  for (std::size_t i = 0; i < slice; ++i) {
    if (next_ >= entries_.size()) next_ = 0;
    if (Collect(next_, now, &batches)) {
      ++next_;
    } else {
      Remove(next_);
    }
  }
  CollectFormer(now, &batches);
  for (auto& [home, batch] : batches) Tell(home, std::move(batch));
  Compare(now);
}

bool Announcer::Collect(std::size_t at, std::int64_t now, std::map<MemberIndex, Batch>* batches) {
  const Announcement& entry = entries_[at];
  const auto ranking = view_->table().Ranking(view_->table().ShardOf(entry.anchor_hash));
  bool open = entry.sketch.count > 0;
  for (std::size_t rank = 0; rank < std::min(ranks_, ranking.size()); ++rank) {
    const HomeNumber number = view_homes_[ranking[rank]];
    const Told& told = SlotOf(at, rank, number);
    const bool known = told.home == number && Knows(entry.anchor_hash, number, told.at);
    if (homes_[number].call != 0) {
      open = true;
      continue;
    }
    if (entry.sketch.count == 0
            ? !known || told.count == 0
            : known && told.Is(entry.sketch) && now - told.at < options_.repeat_nanos) {
      continue;
    }
    open = true;
    Batch& batch = (*batches)[ranking[rank]];
    if (batch.size() >= kAnnouncementsMax) continue;
    batch.said.push_back(entry);
    batch.ranks.push_back(static_cast<std::uint8_t>(rank));
  }
  return open;
}

void Announcer::CollectFormer(std::int64_t now, std::map<MemberIndex, Batch>* batches) {
  for (std::size_t i = 0; i < kAnnouncementsMax && !former_.empty(); ++i) {
    Former former = former_.front();
    if (former.due > now) return;
    former_.pop_front();
    const auto member = members_.find(former.told.home);
    const auto ranking = view_->table().Ranking(view_->table().ShardOf(former.anchor_hash));
    const auto homes = ranking.subspan(0, HomeCount(former.anchor_hash));
    // Gone; or a home again, which is told as one.
    if (member == members_.end() ||
        std::find(homes.begin(), homes.end(), member->second) != homes.end()) {
      Sum(former.anchor_hash, former.told);
      continue;
    }
    Batch& batch = (*batches)[member->second];
    if (homes_[former.told.home].call != 0 || batch.size() >= kAnnouncementsMax) {
      Again({former});
    } else {
      batch.withdrawn.push_back(former);
    }
  }
}

void Announcer::Again(std::vector<Former> withdrawn) {
  for (Former& former : withdrawn) {
    former.due = loop_.clock().MonotonicNanos() + kAgainNanos;
    former_.push_back(former);
  }
}

void Announcer::Tell(MemberIndex index, Batch batch) {
  if (batch.size() == 0) return;
  const Member& home = view_->members()[index];
  const HomeNumber number = view_homes_[index];
  std::vector<Announcement> list = batch.said;
  for (const Former& former : batch.withdrawn) list.push_back({former.anchor_hash, {}});
  if (home.id == options_.self_id) {
    options_.to_self(list);
    return Heard(number, batch);
  }
  if (!health_.Admit(home)) return Again(std::move(batch.withdrawn));
  homes_[number].call =
      peers_.Announce(home, std::move(list), loop_.clock().MonotonicNanos() + options_.call_nanos,
                      [this, number, batch = std::move(batch), home](const absl::Status& status) {
                        homes_[number].call = 0;
                        if (!status.ok()) {
                          Again(batch.withdrawn);
                          return health_.Failed(home, PeerHealth::Fault::kFailed);
                        }
                        health_.Succeeded(home);
                        Heard(number, batch);
                      });
}

void Announcer::Heard(HomeNumber number, const Batch& batch) {
  const std::int64_t now = loop_.clock().MonotonicNanos();
  for (std::size_t i = 0; i < batch.said.size(); ++i) {
    Hear(number, batch.said[i], batch.ranks[i], now);
  }
  for (const Former& former : batch.withdrawn) Sum(former.anchor_hash, former.told);
}

void Announcer::Hear(HomeNumber number, const Announcement& said, std::size_t rank,
                     std::int64_t now) {
  const auto found = places_.find(said.anchor_hash);
  if (found == places_.end()) return;
  Told& slot = SlotOf(found->second, rank, number);
  if (slot.home == number) {
    Sum(said.anchor_hash, slot);
  } else {
    Leave(said.anchor_hash, slot);
  }
  slot = {number, said.sketch.count, said.sketch.sum, now};
  Sum(said.anchor_hash, slot);
}

void Announcer::Compare(std::int64_t now) {
  for (MemberIndex index = 0; index < view_->serving_count(); ++index) {
    const Member& member = view_->members()[index];
    const HomeNumber number = view_homes_[index];
    Home& home = homes_[number];
    if (member.id == options_.self_id || home.call != 0 || now < home.compare_at) continue;
    if (home.compare_at == 0) {
      // Not all at once.
      home.compare_wait = options_.compare_nanos;
      home.compare_at = now + options_.compare_nanos * (8 + number % 8) / 16;
      continue;
    }
    home.compare_at = now + home.compare_wait;
    if (home.sums->digests == Digests{} || !health_.Admit(member)) continue;
    home.call = peers_.Compare(member, home.sums->digests, now + options_.call_nanos,
                               [this, number, member](const absl::StatusOr<std::uint64_t>& differ) {
                                 homes_[number].call = 0;
                                 if (!differ.ok()) {
                                   return health_.Failed(member, PeerHealth::Fault::kFailed);
                                 }
                                 health_.Succeeded(member);
                                 Compared(number, *differ);
                               });
  }
}

void Announcer::Compared(HomeNumber number, std::uint64_t differ) {
  Home& home = homes_[number];
  const std::int64_t now = loop_.clock().MonotonicNanos();
  differed_ += static_cast<std::uint64_t>(std::popcount(differ));
  home.compare_wait =
      differ == 0 ? options_.compare_nanos : std::min(2 * home.compare_wait, options_.repeat_nanos);
  home.compare_at = now + home.compare_wait;
  if (home.sums == nullptr) return;
  for (std::size_t i = 0; i < kDigests; ++i) {
    if ((differ >> i & 1) == 0) continue;
    home.sums->digests[i] = 0;
    home.sums->forgotten[i] = now;
  }
}

std::size_t Announcer::untold() const {
  if (view_ == nullptr || view_->serving_count() == 0) return entries_.size();
  std::size_t untold = 0;
  for (std::size_t at = 0; at < entries_.size(); ++at) {
    const Announcement& entry = entries_[at];
    const auto ranking = view_->table().Ranking(view_->table().ShardOf(entry.anchor_hash));
    const Told* const slots = told_.data() + at * ranks_;
    std::size_t told = 0;
    for (std::size_t rank = 0; rank < HomeCount(entry.anchor_hash); ++rank) {
      told += std::any_of(slots, slots + ranks_, [&](const Told& slot) {
        return slot.home == view_homes_[ranking[rank]] && slot.Is(entry.sketch);
      });
    }
    untold += told < HomeCount(entry.anchor_hash);
  }
  return untold;
}

RunSketch Announcer::SketchOf(std::uint64_t anchor_hash) const {
  const auto found = places_.find(anchor_hash);
  return found == places_.end() ? RunSketch() : entries_[found->second].sketch;
}

std::vector<Announcement> Announcer::Held() const {
  std::vector<Announcement> held;
  std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(held),
               [](const Announcement& entry) { return entry.sketch.count > 0; });
  return held;
}

}  // namespace kvmill
