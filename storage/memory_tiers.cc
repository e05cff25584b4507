#include "storage/memory_tiers.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

MemoryTiers::MemoryTiers(BlockIndex& index, const Clock& clock, StoreCounters& counters, Part host,
                         Part gpu, StoreObserver* observer)
    : index_(index),
      clock_(clock),
      counters_(counters),
      observer_(observer),
      pools_{gpu.pool, host.pool},
      rooms_{Room(clock), Room(clock)},
      policies_{std::move(gpu.policy), std::move(host.policy)} {}

void MemoryTiers::ReleasePages(BlockEntry& entry) {
  if (!InMemory(entry.flags)) return;
  PagePool& from = pool(TierOf(entry.flags));
  for (PagePlace& place : entry.pages()) {
    from.Release(place.slot);
    place.slot = SlotRef{};
  }
  entry.flags = static_cast<std::uint8_t>(entry.flags & ~(kInGpu | kInHost));
}

absl::Status MemoryTiers::Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                                  absl::Duration wait, std::vector<SlotRef>* slots) {
  PagePool& host = pool(Tier::kHost);
  Room::Attempt attempt(room(Tier::kHost), wait);
  for (;;) {
    attempt.Look();
    absl::Status acquired = host.Acquire(tenant, page_bytes, count, slots);
    if (acquired.ok()) attempt.Found();
    if (!absl::IsResourceExhausted(acquired)) return acquired;
    if (Evict(page_bytes * count, EvictReason::kCapacity).blocks > 0) continue;
    if (attempt.Wait()) continue;
    const PagePool::Stats stats = host.stats();
    return absl::ResourceExhaustedError(
        absl::StrCat("host tier is full: ", page_bytes * count, " bytes wanted, ", stats.used_bytes,
                     " of ", stats.capacity_bytes,
                     " in use and none of it can leave now; retry in 1s or raise --host-bytes"));
  }
}

absl::Status MemoryTiers::AcquirePages(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                                       absl::Duration wait, std::vector<SlotRef>* slots) {
  const std::size_t before = slots->size();
  for (std::size_t begin = 0; begin < page_bytes.size();) {
    std::size_t end = begin + 1;
    while (end < page_bytes.size() && page_bytes[end] == page_bytes[begin]) ++end;
    absl::Status acquired = Acquire(tenant, page_bytes[begin], end - begin, wait, slots);
    if (!acquired.ok()) {
      for (std::size_t i = before; i < slots->size(); ++i) pool(Tier::kHost).Release((*slots)[i]);
      slots->resize(before);
      return acquired;
    }
    begin = end;
  }
  return absl::OkStatus();
}

void MemoryTiers::RoomMayHaveComeFree() {
  for (Room& room : rooms_) room.MayHaveComeFree();
}

std::uint32_t MemoryTiers::NowSeconds() const {
  return static_cast<std::uint32_t>(clock_.MonotonicNanos() / 1'000'000'000);
}

void MemoryTiers::CountBlock(Tier tier, std::size_t page_count, int sign) {
  if (sign > 0) {
    counters_.tier_blocks[Index(tier)].Add();
    counters_.memory_pages.Add(page_count);
  } else {
    counters_.tier_blocks[Index(tier)].Subtract();
    counters_.memory_pages.Subtract(page_count);
  }
}

void MemoryTiers::CountEvicted(Tier tier, EvictReason reason, std::uint32_t age_s) {
  counters_.evicted(tier, reason).Add();
  counters_.eviction_age_seconds[Index(tier)].Observe(age_s);
}

EntryTraits MemoryTiers::TraitsOf(const BlockId& id, const BlockKey& parent,
                                  std::uint32_t block_index, Tier tier) {
  EntryTraits traits;
  traits.key_hash = HashOf(id);
  traits.depth = block_index;
  if (!parent.empty()) {
    index_.Find({id.namespace_id, id.group, parent}, [&](EntryId found, BlockEntry& e) {
      if (TierOf(e.flags) == tier) traits.parent = found;
    });
  }
  return traits;
}

absl::Status MemoryTiers::AddNew(const NewBlock& block) {
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(block.id, block.parent, block.block_index, Tier::kHost);
  KVMILL_ASSIGN_OR_RETURN(const EntryId entry,
                          index_.Insert(
                              block.id, block.places.size(),
                              [&](BlockEntry& e) {
                                e.token_count = block.token_count;
                                e.flags = block.flags;
                                e.references = block.referenced != nullptr ? 1 : 0;
                                e.inserted_at_s = NowSeconds();
                                std::copy(block.places.begin(), block.places.end(),
                                          e.pages().begin());
                              },
                              block.link));
  if (telling.wanted()) telling.Note(block.id);
  policy(Tier::kHost).Insert(entry, traits);
  CountBlock(Tier::kHost, block.places.size(), +1);
  if (block.referenced != nullptr) *block.referenced = entry;
  return absl::OkStatus();
}

EntryId MemoryTiers::ReferenceOnDisk(const BlockId& id) {
  EntryId entry = kNoEntry;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kOnDisk) == 0) return;
    entry = found;
    ++e.references;
  });
  return entry;
}

bool MemoryTiers::AddLoaded(EntryId entry, const BlockId& id, const BlockKey& parent,
                            absl::Span<const PagePlace> places) {
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(id, parent, 0, Tier::kHost);
  bool added = false;
  index_.With(entry, [&](BlockEntry& e) {
    if ((e.flags & kDetached) != 0 || InMemory(e.flags)) return;
    if (e.pages().size() != places.size()) return;
    std::copy(places.begin(), places.end(), e.pages().begin());
    e.flags |= kInHost;
    e.inserted_at_s = NowSeconds();
    added = true;
  });
  if (!added) return false;
  policy(Tier::kHost).Insert(entry, traits);
  CountBlock(Tier::kHost, places.size(), +1);
  return true;
}

void MemoryTiers::Touch(EntryId entry) {
  MutexLock lock(policy_mu_);
  std::uint8_t flags = 0;
  index_.With(entry, [&](BlockEntry& e) {
    flags = e.flags;
    if (e.uses < std::numeric_limits<std::uint8_t>::max()) ++e.uses;
  });
  if (InMemory(flags) && (flags & (kDetached | kLeaving)) == 0) policy(TierOf(flags)).Touch(entry);
}

std::uint8_t MemoryTiers::RemoveLocked(EntryId entry, Telling* telling) {
  std::uint8_t flags = 0;
  bool referenced = false;
  std::size_t page_count = 0;
  const bool detached = index_.Detach(entry, [&](BlockEntry& e) {
    flags = e.flags;
    page_count = e.pages().size();
    referenced = e.references != 0;
    if (telling->wanted()) telling->Note(e.id());
    if (!referenced) ReleasePages(e);
  });
  KVMILL_CHECK(detached);
  if (InMemory(flags)) {
    if ((flags & kLeaving) == 0) policy(TierOf(flags)).Remove(entry);
    CountBlock(TierOf(flags), page_count, -1);
  }
  if ((flags & kOnDisk) != 0) counters_.tier_blocks[Index(Tier::kDisk)].Subtract();
  if (!referenced) index_.Free(entry);
  return flags;
}

std::uint8_t MemoryTiers::Remove(const BlockId& id) {
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  if (!index_.Find(id, [&](EntryId found, BlockEntry&) { entry = found; })) return 0;
  return RemoveLocked(entry, &telling);
}

bool MemoryTiers::DropCopy(const BlockId& id, Tier tier) {
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  bool gone = false;
  std::size_t page_count = 0;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if (TierOf(e.flags) != tier || e.references != 0) return;
    entry = found;
    page_count = e.pages().size();
    gone = (e.flags & kOnDisk) == 0;
    if (gone) return;
    ReleasePages(e);
    e.flags = static_cast<std::uint8_t>(e.flags & ~kUnwritten);
  });
  if (entry == kNoEntry) return false;
  if (gone) {
    RemoveLocked(entry, &telling);
  } else {
    policy(tier).Remove(entry);
    CountBlock(tier, page_count, -1);
  }
  return true;
}

void MemoryTiers::EvictedFromDisk(const BlockId& id) {
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  const std::uint32_t now_s = NowSeconds();
  std::uint32_t age_s = 0;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    entry = found;
    age_s = now_s - std::min(now_s, e.inserted_at_s);
  });
  CountEvicted(Tier::kDisk, EvictReason::kCapacity, age_s);
  if (entry != kNoEntry) DiskCopyIsGoneLocked(entry, &telling);
}

void MemoryTiers::DiskCopyIsGone(EntryId entry) {
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  DiskCopyIsGoneLocked(entry, &telling);
}

void MemoryTiers::DiskCopyIsGoneLocked(EntryId entry, Telling* telling) {
  bool known = false;
  bool gone = false;
  index_.With(entry, [&](BlockEntry& e) {
    if ((e.flags & kOnDisk) == 0 || (e.flags & kDetached) != 0) return;
    known = true;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kOnDisk);
    gone = !InMemory(e.flags);
  });
  if (!known) return;
  counters_.tier_blocks[Index(Tier::kDisk)].Subtract();
  if (gone) RemoveLocked(entry, telling);
}

void MemoryTiers::Release(EntryId entry) {
  bool last = false;
  index_.With(entry, [&](BlockEntry& e) {
    KVMILL_DCHECK(e.references > 0);
    --e.references;
    last = e.references == 0 && (e.flags & kDetached) != 0;
    if (last) ReleasePages(e);
  });
  if (last) index_.Free(entry);
  RoomMayHaveComeFree();
}

MemoryTiers::Evicted MemoryTiers::Evict(std::uint64_t bytes, EvictReason reason) {
  Evicted evicted;
  const std::uint32_t now_s = NowSeconds();
  while (evicted.bytes < bytes) {
    Telling telling(observer_);
    MutexLock lock(policy_mu_);
    const EntryId victim = policy(Tier::kHost).Evict([this](EntryId entry) {
      bool may_leave = false;
      index_.With(entry, [&](BlockEntry& e) {
        may_leave = e.references == 0 && (e.flags & kUnwritten) == 0;
      });
      return may_leave;
    });
    if (victim == kNoEntry) break;

    // Between the policy's question and now a fetch may have taken a reference: references are
    // taken without the policy's lock.
    bool referenced = false;
    bool gone = false;
    std::uint64_t victim_bytes = 0;
    std::size_t page_count = 0;
    std::uint32_t age_s = 0;
    EntryTraits traits;
    index_.With(victim, [&](BlockEntry& e) {
      referenced = e.references != 0;
      traits.key_hash = HashOf(e.id());
      if (referenced) return;
      page_count = e.pages().size();
      for (const PagePlace& place : e.pages()) victim_bytes += place.page_bytes;
      age_s = now_s - std::min(now_s, e.inserted_at_s);
      gone = (e.flags & kOnDisk) == 0;
      ReleasePages(e);
    });
    if (referenced) {
      policy(Tier::kHost).Insert(victim, traits);
      continue;
    }
    CountBlock(Tier::kHost, page_count, -1);
    // A block that is in no memory cannot be referenced, and one that is nowhere else either is of
    // no use in the table.
    if (gone) RemoveLocked(victim, &telling);
    ++evicted.blocks;
    evicted.bytes += victim_bytes;
    CountEvicted(Tier::kHost, reason, age_s);
  }
  return evicted;
}

bool MemoryTiers::TakeFromHost(const BlockId& id, bool only_if_free, MovingBlock* block) {
  block->entry = kNoEntry;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kInHost) == 0) return;
    if (only_if_free && (e.references != 0 || (e.flags & kUnwritten) != 0)) return;
    ++e.references;
    *block = {found, id, e.token_count, {e.pages().begin(), e.pages().end()}};
  });
  return block->entry != kNoEntry;
}

bool MemoryTiers::TakeGpuVictim(MovingBlock* block) {
  MutexLock lock(policy_mu_);
  for (;;) {
    const EntryId victim = policy(Tier::kGpu).Evict([this](EntryId entry) {
      bool may_leave = false;
      index_.With(entry, [&](BlockEntry& e) {
        may_leave = e.references == 0 && (e.flags & kUnwritten) == 0;
      });
      return may_leave;
    });
    if (victim == kNoEntry) return false;
    bool referenced = false;
    EntryTraits traits;
    index_.With(victim, [&](BlockEntry& e) {
      referenced = e.references != 0;
      traits.key_hash = HashOf(e.id());
      if (referenced) return;
      ++e.references;
      e.flags |= kLeaving;
      *block = {victim, e.id(), e.token_count, {e.pages().begin(), e.pages().end()}};
    });
    if (!referenced) return true;
    policy(Tier::kGpu).Insert(victim, traits);
  }
}

bool MemoryTiers::Move(const MovingBlock& block, Tier to, const BlockKey& parent,
                       absl::Span<const PagePlace> places, EvictReason reason) {
  const Tier from = to == Tier::kGpu ? Tier::kHost : Tier::kGpu;
  const std::uint32_t now_s = NowSeconds();
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(block.id, parent, 0, to);
  bool moved = false;
  std::uint32_t age_s = 0;
  index_.With(block.entry, [&](BlockEntry& e) {
    if (e.references != 1 || (e.flags & (kDetached | kUnwritten)) != 0) return;
    ReleasePages(e);
    std::copy(places.begin(), places.end(), e.pages().begin());
    e.flags =
        static_cast<std::uint8_t>((e.flags & ~kLeaving) | (to == Tier::kGpu ? kInGpu : kInHost));
    age_s = now_s - std::min(now_s, e.inserted_at_s);
    moved = true;
  });
  if (!moved) return false;
  // A victim has left its order already.
  if (from == Tier::kHost) policy(from).Remove(block.entry);
  policy(to).Insert(block.entry, traits);
  CountBlock(from, places.size(), -1);
  CountBlock(to, places.size(), +1);
  if (from == Tier::kGpu) CountEvicted(from, reason, age_s);
  counters_.moved_blocks[Index(to)].Add();
  return true;
}

bool MemoryTiers::Leave(const MovingBlock& block, bool may_lose, EvictReason reason) {
  const std::uint32_t now_s = NowSeconds();
  Telling telling(observer_);
  MutexLock lock(policy_mu_);
  bool left = false;
  bool gone = false;
  std::uint32_t age_s = 0;
  index_.With(block.entry, [&](BlockEntry& e) {
    gone = (e.flags & kOnDisk) == 0;
    if (e.references != 1 || (e.flags & (kDetached | kUnwritten)) != 0 || (gone && !may_lose)) {
      return;
    }
    ReleasePages(e);
    e.flags = static_cast<std::uint8_t>(e.flags & ~kLeaving);
    age_s = now_s - std::min(now_s, e.inserted_at_s);
    left = true;
  });
  if (!left) return false;
  CountBlock(Tier::kGpu, block.places.size(), -1);
  CountEvicted(Tier::kGpu, reason, age_s);
  if (gone) RemoveLocked(block.entry, &telling);
  return true;
}

void MemoryTiers::PutBack(const MovingBlock& block) {
  MutexLock lock(policy_mu_);
  EntryTraits traits;
  traits.key_hash = HashOf(block.id);
  bool detached = false;
  index_.With(block.entry, [&](BlockEntry& e) {
    detached = (e.flags & kDetached) != 0;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kLeaving);
  });
  if (!detached) policy(Tier::kGpu).Insert(block.entry, traits);
}

}  // namespace kvmill
