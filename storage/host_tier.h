// The host tier: pages in the pool, the policy's order over the blocks that live there, and making
// room.
//
// Internal to storage/. Owns the eviction policy; pool and index are shared with the rest of the
// tiered store. Thread-safe. Lock order: the policy's mutex, then a shard of the index.
#ifndef KVMILL_STORAGE_HOST_TIER_H_
#define KVMILL_STORAGE_HOST_TIER_H_

#include <atomic>
#include <cstdint>
#include <limits>
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
  // or read. RESOURCE_EXHAUSTED after that, and at once when others have waited that long and
  // nobody got room since: callers queue for few threads, and one wait after the other never ends.
  absl::Status Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                       absl::Duration wait, std::vector<SlotRef>* slots);

  // A sealed block enters the index and the order at once, with these flags (kInHost among them).
  // Takes over the slots in `places` unless it fails: ALREADY_EXISTS, or RESOURCE_EXHAUSTED when
  // the index is full.
  struct NewBlock {
    BlockId id;
    BlockKey parent;  // Empty when there is none or it is not known.
    std::uint32_t block_index = 0;
    std::uint16_t token_count = 0;
    std::uint8_t flags = 0;
    absl::Span<const PagePlace> places;
  };
  absl::Status AddNew(const NewBlock& block);
  // A block that the index knows came back to host memory. False, and nothing taken over, when it
  // is not known any more or is there already.
  bool AddLoaded(const BlockId& id, const BlockKey& parent, absl::Span<const PagePlace> places);

  // The block was used; the caller holds a reference.
  void Touch(EntryId entry);

  // Takes the block out of the index and the order, now; its pages are freed with its last
  // reference. The flags it had, 0 when it was not there. What is on disk is the caller's.
  std::uint8_t Remove(const BlockId& id);
  // Drops only the host copy, and the block with it when it is nowhere else. False when it is not
  // in host memory or referenced.
  bool DropHostCopy(const BlockId& id);
  // The disk no longer has it: clears kOnDisk, and removes the block when host memory has no copy
  // either.
  void DiskCopyIsGone(const BlockId& id);

  // Drops a reference that was taken under the entry's lock (references + 1) from a block in host
  // memory.
  void Release(EntryId entry);

  struct Evicted {
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // Evicts until `bytes` are free'd or no block may leave. Blocks that are not on disk are gone.
  Evicted Evict(std::uint64_t bytes, EvictReason reason);

  // Something that Acquire may be waiting for happened: a block was written or released.
  void RoomMayHaveComeFree();

  // Gives the pages back to the pool and empties the places; under the entry's lock.
  void ReleasePages(absl::Span<PagePlace> places);

 private:
  EntryTraits TraitsOf(const BlockId& id, const BlockKey& parent, std::uint32_t block_index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  std::uint32_t NowSeconds() const;
  // The gauges of a block that came to (sign +1) or left (-1) host memory.
  void CountHostBlock(std::size_t page_count, int sign);
  // Detach and, when nobody refers to it, free. Every detach happens under policy_mu_, so no two
  // meet.
  std::uint8_t RemoveLocked(EntryId entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);

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
  // When the first of the calls that found no room came; kHasRoom after one that did.
  static constexpr std::int64_t kHasRoom = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> full_since_nanos_{kHasRoom};
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_HOST_TIER_H_
