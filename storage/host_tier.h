// The host tier: pages in the pool, the policy's order over the blocks that live there, and making
// room.
//
// Internal to storage/. Owns the eviction policy; pool and index are shared with the rest of the
// tiered store. Thread-safe. Lock order: the policy's mutex, then a shard of the index.
#ifndef KVMILL_STORAGE_HOST_TIER_H_
#define KVMILL_STORAGE_HOST_TIER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/block_index.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/eviction/policy.h"
#include "storage/page_pool.h"
#include "storage/store_counters.h"

namespace kvmill {

class HostTier {
 public:
  HostTier(PagePool& pool, BlockIndex& index, std::unique_ptr<EvictionPolicy> policy,
           const Clock& clock, StoreCounters& counters)
      : pool_(pool),
        index_(index),
        clock_(clock),
        counters_(counters),
        policy_(std::move(policy)) {}

  // Slots from the pool, evicting as needed; waits up to `wait` for blocks that are being written
  // or read. RESOURCE_EXHAUSTED after that.
  absl::Status Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                       absl::Duration wait, std::vector<SlotRef>* slots);

  // The block of `entry` came to host memory (its flag is set, its places are valid) and may be
  // evicted from now on.
  void Add(EntryId entry, const EntryTraits& traits);
  void Touch(EntryId entry);
  // The block leaves host memory for another reason than eviction; before its entry is erased.
  void Forget(EntryId entry);

  struct Evicted {
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // Evicts until `bytes` are free'd or no block may leave. Blocks that are not on disk are gone.
  Evicted Evict(std::uint64_t bytes, EvictReason reason);

  // Something that Acquire may be waiting for happened: a block was written or released.
  void RoomMayHaveComeFree();

  // Gives the pages back to the pool and empties the places. Under no lock of the index but the
  // entry's.
  void ReleasePages(absl::Span<PagePlace> places);

 private:
  PagePool& pool_;
  BlockIndex& index_;
  const Clock& clock_;
  StoreCounters& counters_;

  Mutex policy_mu_;
  std::unique_ptr<EvictionPolicy> policy_ ABSL_GUARDED_BY(policy_mu_);

  Mutex room_mu_;
  CondVar room_changed_;
  std::uint64_t room_epoch_ ABSL_GUARDED_BY(room_mu_) = 0;
  std::atomic<std::uint32_t> waiters_{0};  // A stale 0 costs a waiter one time slice.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_HOST_TIER_H_
