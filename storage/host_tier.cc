#include "storage/host_tier.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

void HostTier::ReleasePages(absl::Span<PagePlace> places) {
  for (PagePlace& place : places) {
    pool_.Release(place.slot);
    place.slot = SlotRef{};
  }
}

absl::Status HostTier::Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                               absl::Duration wait, std::vector<SlotRef>* slots) {
  const std::int64_t wait_nanos = absl::ToInt64Nanoseconds(wait);
  const std::int64_t start_nanos = clock_.MonotonicNanos();
  for (;;) {
    std::uint64_t epoch = 0;
    {
      MutexLock lock(room_mu_);
      epoch = room_epoch_;
    }
    absl::Status acquired = pool_.Acquire(tenant, page_bytes, count, slots);
    if (!absl::IsResourceExhausted(acquired)) {
      if (acquired.ok()) full_since_nanos_.store(kHasRoom, std::memory_order_relaxed);
      return acquired;
    }
    if (Evict(page_bytes * count, EvictReason::kCapacity).blocks > 0) continue;
    const std::int64_t now_nanos = clock_.MonotonicNanos();
    std::int64_t full_since_nanos = kHasRoom;
    if (full_since_nanos_.compare_exchange_strong(full_since_nanos, start_nanos,
                                                  std::memory_order_relaxed)) {
      full_since_nanos = start_nanos;
    }
    if (now_nanos - std::min(start_nanos, full_since_nanos) >= wait_nanos) {
      const PagePool::Stats stats = pool_.stats();
      return absl::ResourceExhaustedError(
          absl::StrCat("host tier is full: ", page_bytes * count, " bytes wanted, ",
                       stats.used_bytes, " of ", stats.capacity_bytes,
                       " in use and none of it can leave now; retry in 1s or raise --host-bytes"));
    }
    // Everything is referenced or on its way to the disk. The time slice bounds what a missed
    // notice can cost.
    waiters_.fetch_add(1, std::memory_order_relaxed);
    {
      MutexLock lock(room_mu_);
      if (room_epoch_ == epoch) room_changed_.WaitFor(room_mu_, std::chrono::milliseconds(20));
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void HostTier::RoomMayHaveComeFree() {
  if (waiters_.load(std::memory_order_relaxed) == 0) return;
  {
    MutexLock lock(room_mu_);
    ++room_epoch_;
  }
  room_changed_.NotifyAll();
}

std::uint32_t HostTier::NowSeconds() const {
  return static_cast<std::uint32_t>(clock_.MonotonicNanos() / 1'000'000'000);
}

void HostTier::CountHostBlock(std::size_t page_count, int sign) {
  if (sign > 0) {
    counters_.host_blocks.Add();
    counters_.host_pages.Add(page_count);
  } else {
    counters_.host_blocks.Subtract();
    counters_.host_pages.Subtract(page_count);
  }
}

EntryTraits HostTier::TraitsOf(const BlockId& id, const BlockKey& parent,
                               std::uint32_t block_index) {
  EntryTraits traits;
  traits.key_hash = HashOf(id);
  traits.depth = block_index;
  if (!parent.empty()) {
    index_.Find({id.namespace_id, id.group, parent}, [&](EntryId found, BlockEntry& e) {
      if ((e.flags & kInHost) != 0) traits.parent = found;
    });
  }
  return traits;
}

absl::Status HostTier::AddNew(const NewBlock& block) {
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(block.id, block.parent, block.block_index);
  KVMILL_ASSIGN_OR_RETURN(const EntryId entry,
                          index_.Insert(block.id, block.places.size(), [&](BlockEntry& e) {
                            e.token_count = block.token_count;
                            e.flags = block.flags;
                            e.inserted_at_s = NowSeconds();
                            std::copy(block.places.begin(), block.places.end(), e.pages().begin());
                          }));
  policy_->Insert(entry, traits);
  CountHostBlock(block.places.size(), +1);
  return absl::OkStatus();
}

bool HostTier::AddLoaded(const BlockId& id, const BlockKey& parent,
                         absl::Span<const PagePlace> places) {
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(id, parent, 0);
  EntryId entry = kNoEntry;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kInHost) != 0 || e.pages().size() != places.size()) return;
    entry = found;
    std::copy(places.begin(), places.end(), e.pages().begin());
    e.flags |= kInHost;
    e.inserted_at_s = NowSeconds();
  });
  if (entry == kNoEntry) return false;
  policy_->Insert(entry, traits);
  CountHostBlock(places.size(), +1);
  return true;
}

void HostTier::Touch(EntryId entry) {
  MutexLock lock(policy_mu_);
  bool known = false;
  index_.With(entry, [&](BlockEntry& e) {
    known = (e.flags & kInHost) != 0 && (e.flags & kDetached) == 0;
  });
  if (known) policy_->Touch(entry);
}

std::uint8_t HostTier::RemoveLocked(EntryId entry) {
  std::uint8_t flags = 0;
  bool referenced = false;
  std::size_t page_count = 0;
  const bool detached = index_.Detach(entry, [&](BlockEntry& e) {
    flags = e.flags;
    page_count = e.pages().size();
    referenced = e.references != 0;
    if (!referenced && (e.flags & kInHost) != 0) ReleasePages(e.pages());
  });
  KVMILL_CHECK(detached);
  if ((flags & kInHost) != 0) {
    policy_->Remove(entry);
    CountHostBlock(page_count, -1);
  }
  if ((flags & kOnDisk) != 0) counters_.disk_blocks.Subtract();
  if (!referenced) index_.Free(entry);
  return flags;
}

std::uint8_t HostTier::Remove(const BlockId& id) {
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  if (!index_.Find(id, [&](EntryId found, BlockEntry&) { entry = found; })) return 0;
  return RemoveLocked(entry);
}

bool HostTier::DropHostCopy(const BlockId& id) {
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  bool dropped = false;
  bool gone = false;
  std::size_t page_count = 0;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kInHost) == 0 || e.references != 0) return;
    entry = found;
    dropped = true;
    page_count = e.pages().size();
    gone = (e.flags & kOnDisk) == 0;
    if (gone) return;
    e.flags = static_cast<std::uint8_t>(e.flags & ~(kInHost | kUnwritten));
    ReleasePages(e.pages());
  });
  if (!dropped) return false;
  if (gone) {
    RemoveLocked(entry);
  } else {
    policy_->Remove(entry);
    CountHostBlock(page_count, -1);
  }
  return true;
}

void HostTier::DiskCopyIsGone(const BlockId& id) {
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  bool gone = false;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kOnDisk) == 0) return;
    entry = found;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kOnDisk);
    gone = (e.flags & kInHost) == 0;
  });
  if (entry == kNoEntry) return;
  counters_.disk_blocks.Subtract();
  if (gone) RemoveLocked(entry);
}

void HostTier::Release(EntryId entry) {
  bool last = false;
  index_.With(entry, [&](BlockEntry& e) {
    KVMILL_DCHECK(e.references > 0);
    --e.references;
    last = e.references == 0 && (e.flags & kDetached) != 0;
    if (last) ReleasePages(e.pages());
  });
  if (last) index_.Free(entry);
  RoomMayHaveComeFree();
}

HostTier::Evicted HostTier::Evict(std::uint64_t bytes, EvictReason reason) {
  Evicted evicted;
  const std::uint32_t now_s = NowSeconds();
  while (evicted.bytes < bytes) {
    MutexLock lock(policy_mu_);
    const EntryId victim = policy_->Evict([this](EntryId entry) {
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
      e.flags = static_cast<std::uint8_t>(e.flags & ~kInHost);
      gone = (e.flags & kOnDisk) == 0;
      ReleasePages(e.pages());
    });
    if (referenced) {
      policy_->Insert(victim, traits);
      continue;
    }
    CountHostBlock(page_count, -1);
    // Without kInHost nobody can take a reference, and a block that is nowhere else is of no use in
    // the table.
    if (gone) RemoveLocked(victim);
    ++evicted.blocks;
    evicted.bytes += victim_bytes;
    counters_.evicted(Tier::kHost, reason).Add();
    counters_.eviction_age_seconds[static_cast<std::size_t>(Tier::kHost)].Observe(age_s);
  }
  return evicted;
}

}  // namespace kvmill
