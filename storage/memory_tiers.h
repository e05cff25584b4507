// The memory tiers: which blocks are in host memory, and in a GPU's where there is one, in which
// order they leave, and making room.
//
// A block's pages are in one pool at a time, so that the capacities of the tiers add up; the flags
// of its entry (kInGpu, kInHost) say in which. Every block enters in host memory. Moving bytes is
// the mover's (storage/mover.h): it takes a block that may move from here, copies, and says here
// where the pages are now.
//
// Internal to storage/. Owns the eviction policies; pools and index are shared with the rest of the
// tiered store. Thread-safe. Lock order: the policies' mutex, then a shard of the index. One mutex
// for all policies: a block that moves changes two of them at once.
#ifndef KVMILL_STORAGE_MEMORY_TIERS_H_
#define KVMILL_STORAGE_MEMORY_TIERS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/block_index.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/core/run_link.h"
#include "storage/core/tier.h"
#include "storage/eviction/policy.h"
#include "storage/page_pool.h"
#include "storage/room.h"
#include "storage/store_counters.h"
#include "storage/store_observer.h"

namespace kvmill {

// The fastest tier that a block with these flags is in.
constexpr Tier TierOf(std::uint8_t flags) {
  return (flags & kInGpu) != 0 ? Tier::kGpu : (flags & kInHost) != 0 ? Tier::kHost : Tier::kDisk;
}
constexpr bool InMemory(std::uint8_t flags) { return (flags & (kInGpu | kInHost)) != 0; }

class MemoryTiers {
 public:
  // A tier's pool, and the order of the blocks in it.
  struct Part {
    PagePool* pool = nullptr;  // Null: the daemon has no such tier.
    std::unique_ptr<EvictionPolicy> policy;
  };
  // `observer` may be null.
  MemoryTiers(BlockIndex& index, const Clock& clock, StoreCounters& counters, Part host, Part gpu,
              StoreObserver* observer);

  bool has_gpu() const { return pools_[Index(Tier::kGpu)] != nullptr; }
  PagePool& pool(Tier tier) const { return *pools_[Index(tier)]; }
  // Where callers wait for room in the tier.
  Room& room(Tier tier) { return rooms_[Index(tier)]; }

  // Slots of the host pool, evicting as needed; waits up to `wait` for blocks that are being
  // written or read. RESOURCE_EXHAUSTED after that (see Room).
  absl::Status Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                       absl::Duration wait, std::vector<SlotRef>* slots);
  // The same for pages of given lengths, one after the other: those of one length together, so that
  // a block stays one run where it can. All or none.
  absl::Status AcquirePages(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
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
    RunLink link;
    absl::Span<const PagePlace> places;
    EntryId* referenced = nullptr;  // If given: the entry, which the caller refers to (Release).
  };
  absl::Status AddNew(const NewBlock& block);
  // A reference to a block that is on disk, wherever else it is; kNoEntry when it is not there. A
  // block that is stored anew under the same id meanwhile is another entry.
  EntryId ReferenceOnDisk(const BlockId& id);
  // A block that the caller refers to came back to host memory. False, and nothing taken over, when
  // it was removed or is in memory already.
  bool AddLoaded(EntryId entry, const BlockId& id, const BlockKey& parent,
                 absl::Span<const PagePlace> places);

  // The block was used; the caller holds a reference.
  void Touch(EntryId entry);

  // Takes the block out of the index and the order, now; its pages are freed with its last
  // reference. The flags it had, 0 when it was not there. What is on disk is the caller's.
  std::uint8_t Remove(const BlockId& id);
  // Drops only the copy in this tier, and the block with it when it is nowhere else. False when it
  // is not in that tier or referenced.
  bool DropCopy(const BlockId& id, Tier tier);
  // The disk evicted it, which is counted: clears kOnDisk, and removes the block when memory has no
  // copy either.
  void EvictedFromDisk(const BlockId& id);
  // The disk no longer has a block that the caller refers to; nothing when it was removed. Not
  // counted.
  void DiskCopyIsGone(EntryId entry);

  // Drops a reference that was taken under the entry's lock (references + 1).
  void Release(EntryId entry);

  struct Evicted {
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // Evicts from host memory until `bytes` are free'd or no block may leave. Blocks that are not on
  // disk are gone.
  Evicted Evict(std::uint64_t bytes, EvictReason reason);

  // --- Moves, for the GPU tier (storage/gpu_tier.h) ---
  // A block that is being moved: its pages as they were, kept in place by a reference that the
  // mover gives back with Release.
  struct MovingBlock {
    EntryId entry = kNoEntry;
    BlockId id;
    std::uint16_t token_count = 0;
    std::vector<PagePlace> places;
  };
  // A block in host memory. With `only_if_free`, not one that must stay or that others refer to.
  bool TakeFromHost(const BlockId& id, bool only_if_free, MovingBlock* block);
  // The block that should leave the GPU next; it is out of the order until one of the next three.
  bool TakeGpuVictim(MovingBlock* block);
  // The block's pages are at `places` in tier `to` from now on, which takes them over; its old ones
  // are free. False, and nothing taken over, when it was removed, must stay, or others refer to it.
  // A move away from the GPU counts as evicted, with `reason`.
  bool Move(const MovingBlock& block, Tier to, const BlockKey& parent,
            absl::Span<const PagePlace> places, EvictReason reason);
  // The victim leaves memory. False when it was removed, others refer to it, or (unless `may_lose`)
  // it is not on disk.
  bool Leave(const MovingBlock& block, bool may_lose, EvictReason reason);
  // The victim stays.
  void PutBack(const MovingBlock& block);

  // Something that callers of Acquire may be waiting for happened: a block was written or released.
  void RoomMayHaveComeFree();

 private:
  static constexpr std::size_t kMemoryTiers = 2;  // kGpu and kHost, which come first.
  static constexpr std::size_t Index(Tier tier) { return static_cast<std::size_t>(tier); }

  EvictionPolicy& policy(Tier tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_) {
    return *policies_[Index(tier)];
  }
  EntryTraits TraitsOf(const BlockId& id, const BlockKey& parent, std::uint32_t block_index,
                       Tier tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  std::uint32_t NowSeconds() const;
  // The gauges of a block that came to (sign +1) or left (-1) memory.
  void CountBlock(Tier tier, std::size_t page_count, int sign);
  void CountEvicted(Tier tier, EvictReason reason, std::uint32_t age_s);
  // Gives the pages of a block that is in memory back to their pool and empties the places; its
  // flags say that it is in no memory then. Under the entry's lock.
  void ReleasePages(BlockEntry& entry);
  // Tells the observer of a block that came or is gone, when it ends. Made before the policies'
  // mutex is locked, and so ends after it.
  class Telling {
   public:
    explicit Telling(StoreObserver* observer) : observer_(observer) {}
    ~Telling() {
      if (changed_) observer_->Changed(id_);
    }
    Telling(const Telling&) = delete;
    Telling& operator=(const Telling&) = delete;
    bool wanted() const { return observer_ != nullptr; }
    void Note(const BlockId& id) {
      id_ = id;
      changed_ = wanted();
    }

   private:
    StoreObserver* const observer_;
    bool changed_ = false;
    BlockId id_;
  };
  void DiskCopyIsGoneLocked(EntryId entry, Telling* telling)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  // Detach and, when nobody refers to it, free. Every detach happens under policy_mu_, so no two
  // meet.
  std::uint8_t RemoveLocked(EntryId entry, Telling* telling)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);

  BlockIndex& index_;
  const Clock& clock_;
  StoreCounters& counters_;
  StoreObserver* const observer_;

  const std::array<PagePool*, kMemoryTiers> pools_;
  std::array<Room, kMemoryTiers> rooms_;

  Mutex policy_mu_;
  std::array<std::unique_ptr<EvictionPolicy>, kMemoryTiers> policies_ ABSL_GUARDED_BY(policy_mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_MEMORY_TIERS_H_
