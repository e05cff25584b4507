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
//
// Every change of where a block is passes here (but that it was written to disk), and so does its
// tenant's account (storage/tenant_accounts.h). Of tenants with quotas the blocks have orders of
// their own beside the policies (storage/tenant_orders.h). Making room is in memory_tiers_room.cc.
#ifndef KVMILL_STORAGE_MEMORY_TIERS_H_
#define KVMILL_STORAGE_MEMORY_TIERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/block_index.h"
#include "storage/block_watcher.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/core/run_link.h"
#include "storage/core/tier.h"
#include "storage/eviction/policy.h"
#include "storage/namespace_table.h"
#include "storage/page_pool.h"
#include "storage/room.h"
#include "storage/store_counters.h"
#include "storage/store_observer.h"
#include "storage/tenant_accounts.h"
#include "storage/tenant_orders.h"
#include "storage/unwritten_blocks.h"

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
  // `observer` may be null. A BlockWatcher is told as one.
  MemoryTiers(BlockIndex& index, const Clock& clock, StoreCounters& counters, Part host, Part gpu,
              StoreObserver* observer, const NamespaceTable& namespaces, TenantAccounts& accounts,
              TenantOrders::Options orders);

  bool has_gpu() const { return pools_[Index(Tier::kGpu)] != nullptr; }
  PagePool& pool(Tier tier) const { return *pools_[Index(tier)]; }
  // Where callers wait for room in the tier.
  Room& room(Tier tier) { return rooms_[Index(tier)]; }

  // Slots of the host pool, evicting as needed (see MakeRoom); waits up to `wait` for blocks that
  // are being written or read. RESOURCE_EXHAUSTED after that (see Room).
  absl::Status Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                       absl::Duration wait, std::vector<SlotRef>* slots);
  // The same for pages of given lengths, one after the other: those of one length together, so that
  // a block stays one run where it can. All or none.
  absl::Status AcquirePages(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                            absl::Duration wait, std::vector<SlotRef>* slots);

  // A sealed block enters the index and the order at once, with these flags (kInHost among them).
  // Takes over the slots in `places`, and their bytes that the caller charged to the tenant, unless
  // it fails: ALREADY_EXISTS, or RESOURCE_EXHAUSTED when the index is full.
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

  // The disk has the block now. Under the entry's lock.
  void Written(BlockEntry& entry);
  // Of a tenant, or of all: blocks that the disk does not have, and nobody removed.
  std::vector<BlockId> Unwritten(std::optional<TenantId> tenant) const {
    return unwritten_.Of(tenant);
  }

  // Drops a reference that was taken under the entry's lock (references + 1).
  void Release(EntryId entry);

  struct Evicted {
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // Evicts from host memory until `bytes` are free'd or no block may leave, those of tenants over
  // their soft quota first. Blocks that are not on disk are gone; without `may_lose` they stay.
  Evicted Evict(std::uint64_t bytes, EvictReason reason, bool may_lose = true);
  // Slots of the host pool for pages of these lengths, if they are free: nothing is evicted. All or
  // none: RESOURCE_EXHAUSTED.
  absl::Status AcquireFree(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                           std::vector<SlotRef>* slots);

  // --- Quotas ---
  // Those of all tenants, instead of what they were. Blocks that are there get their orders, while
  // nobody else gets the policies' mutex: about 0.2 us a block of tenants that had no quota.
  void SetQuotas(const std::vector<std::pair<TenantId, TenantQuota>>& quotas);
  std::uint64_t order_bytes();  // What the orders of tenants with quotas take.
  // Whether blocks on disk of this tenant should go before those of others: 1 when it is over its
  // soft quota there, -1 when it is not and another one is, 0 when nobody is.
  int OverSoftOnDisk(TenantId tenant);
  // A block of the tenant that should leave the store next to make room under its hard quota; it is
  // in none of the tenant's orders, and referred to, until FinishQuotaVictim. False: none may
  // leave.
  struct QuotaVictim {
    EntryId entry = kNoEntry;
    BlockId id;
    std::uint64_t bytes = 0;
  };
  bool TakeQuotaVictim(TenantId tenant, QuotaVictim* victim);
  // It leaves the index; the flags it had. 0: it stays, somebody uses it, or it was removed.
  std::uint8_t FinishQuotaVictim(TenantId tenant, const QuotaVictim& victim);

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
  // For a tenant, if given, that is over its soft quota there: of such tenants only. With
  // `on_disk_only` others than those on disk are refused.
  bool TakeGpuVictim(std::optional<TenantId> for_tenant, MovingBlock* block,
                     bool on_disk_only = false);
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

  // Who makes room ahead of need (storage/room_keeper.h) is told by `pressed` that memory was taken
  // or that a block may leave from now on. Before anybody else is here; it must not block.
  void SetPressed(std::function<void()> pressed) { pressed_ = std::move(pressed); }
  void Pressed() const {
    if (pressed_ != nullptr) pressed_();
  }

 private:
  // Slots for pages, those of one length together. All or none.
  absl::Status AcquireRuns(
      absl::Span<const std::uint32_t> page_bytes, std::vector<SlotRef>* slots,
      absl::FunctionRef<absl::Status(std::size_t bytes, std::size_t count)> acquire);
  static constexpr std::size_t kMemoryTiers = 2;  // kGpu and kHost, which come first.
  static constexpr std::size_t Index(Tier tier) { return static_cast<std::size_t>(tier); }

  EvictionPolicy& policy(Tier tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_) {
    return *policies_[Index(tier)];
  }
  // Tells the observer what became of a block, when it ends. Made before the policies' mutex is
  // locked, and so ends after it.
  class Telling {
   public:
    explicit Telling(const MemoryTiers& tiers)
        : observer_(tiers.observer_), watcher_(tiers.watcher_) {}
    ~Telling() {
      switch (news_) {
        case News::kNone:
          break;
        case News::kStored:
          watcher_ != nullptr ? watcher_->Stored(id_, *parent_) : observer_->Changed(id_);
          break;
        case News::kMoved:
          if (watcher_ != nullptr) watcher_->Moved(id_);
          break;
        case News::kRemoved:
          watcher_ != nullptr ? watcher_->Removed(id_) : observer_->Changed(id_);
          break;
      }
    }
    Telling(const Telling&) = delete;
    Telling& operator=(const Telling&) = delete;
    bool wanted() const { return observer_ != nullptr; }
    // `parent` stays until this ends.
    void Stored(const BlockId& id, const BlockKey& parent) {
      parent_ = &parent;
      Note(News::kStored, id);
    }
    void Moved(const BlockId& id) { Note(News::kMoved, id); }
    void Removed(const BlockId& id) { Note(News::kRemoved, id); }

   private:
    enum class News { kNone, kStored, kMoved, kRemoved };
    void Note(News news, const BlockId& id) {
      if (!wanted()) return;
      news_ = news;
      id_ = id;
    }

    StoreObserver* const observer_;
    BlockWatcher* const watcher_;
    News news_ = News::kNone;
    BlockId id_;
    const BlockKey* parent_ = nullptr;
  };
  // A block's bytes, and whose they are.
  struct Weight {
    TenantId tenant = 0;
    std::uint64_t bytes = 0;
  };
  Weight WeightOf(const BlockEntry& entry) const {
    return {namespaces_.TenantOf(entry.namespace_id()), entry.bytes()};
  }
  // In the tier's order and in the tenant's.
  void OrderInsert(Tier tier, EntryId entry, const EntryTraits& traits, TenantId tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  void OrderRemove(Tier tier, EntryId entry, TenantId tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  // The next block of the tier, or of a tenant in the tier, out of both orders; kNoEntry when there
  // is none that may leave. With `only` in the order of the tier blocks of others are refused;
  // without `may_lose` those that are not on disk.
  EntryId OrderEvict(Tier tier, std::optional<TenantId> of,
                     std::optional<TenantId> only = std::nullopt, bool may_lose = true)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  // Those over their soft quota in the tier, the furthest first.
  std::vector<TenantId> OverSoft(Tier tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);

  // A block leaves host memory: the next one, or the next one of a tenant, and whose it was. None:
  // none may.
  struct Left {
    Weight weight;
    bool evicted = false;
  };
  Left EvictOne(std::optional<TenantId> of, EvictReason reason, bool may_lose = true);
  // The next one of a tenant by the order of all.
  Left EvictOwn(TenantId tenant);
  // `victim`, which is in no order, leaves host memory. False: it is referred to, and back in
  // order.
  bool LeaveHost(EntryId victim, EvictReason reason, Telling* telling, Weight* weight)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);

  // Of one caller of Acquire.
  struct Search {
    // An arena that is being emptied for it, or was and is not taken yet; without a ticket none.
    std::uint32_t arena = 0;
    std::uint64_t ticket = 0;
    bool emptied = false;
    std::vector<EntryId> left;       // Blocks in it that could not leave so far.
    std::uint32_t looks = 0;         // At what is left.
    std::uint64_t arenas_seen = 0;   // arenas_emptied_ before it last looked at the pool.
    std::uint64_t others_bytes = 0;  // Of other tenants' blocks that left in vain so far.
    bool own_only = false;           // More of other tenants would leave in vain, too.
  };
  // Host room for `bytes` of the tenant: what leaves is of those over their soft quota, the
  // furthest over first. When none of theirs can leave, or nobody is over, it is what the policy
  // says; unless the tenant is itself over, or (with `may_wait`) the disk lets some of theirs leave
  // soon. Memory of other tenants comes by whole arenas, as tenants share none: when those of which
  // blocks left for nothing cannot be emptied, the rest is of the tenant's own.
  struct MadeRoom {
    bool some = false;
    bool withheld = false;  // Something may yet leave, if need be without `may_wait`.
  };
  MadeRoom MakeRoom(TenantId tenant, std::uint64_t bytes, bool may_wait, Search* search);
  // Empties one arena of other tenants, those named first first: that which loses least of those of
  // which all may leave. Without such a one, `may_wait` begins with the nearest to it: false, with
  // a ticket, and EmptyFurther goes on. For leases that only if the heir has no arena. Walks the
  // index once.
  bool EvictArena(absl::Span<const TenantId> from, TenantId heir, bool may_wait, Search* search);
  struct ArenaBlocks;
  bool EvictOneOf(std::vector<ArenaBlocks>& arenas, TenantId heir, bool may_wait, Search* search)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(arena_mu_);
  bool EmptyFurther(Search* search);
  void StopEmptying(Search* search);
  // A block leaves that arena, if it may. True when it is not there any more.
  bool EvictFromArena(EntryId entry, std::uint32_t arena);
  // Of all arenas of tenants that are not being emptied, or of one. Walks the index.
  std::vector<ArenaBlocks> LookAtArenas(absl::Span<const TenantId> of,
                                        std::optional<std::uint32_t> only) const;
  std::vector<TenantId> OverSoftNow(Tier tier);

  EntryTraits TraitsOf(const BlockId& id, const BlockKey& parent, std::uint32_t block_index,
                       Tier tier) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
  std::uint32_t NowSeconds() const;
  // The gauges and the account of a block that came to (sign +1) or left (-1) memory.
  void CountBlock(Tier tier, std::size_t page_count, const Weight& weight, int sign);
  void CountEvicted(Tier tier, EvictReason reason, std::uint32_t age_s);
  // Gives the pages of a block that is in memory back to their pool and empties the places; its
  // flags say that it is in no memory then. Under the entry's lock.
  void ReleasePages(BlockEntry& entry);
  // It is on disk only from now on.
  void Cooled(EntryId entry, TenantId tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(policy_mu_);
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
  BlockWatcher* const watcher_;  // The same, if it is one.
  const NamespaceTable& namespaces_;
  TenantAccounts& accounts_;
  UnwrittenBlocks unwritten_;  // None without a disk.

  const std::array<PagePool*, kMemoryTiers> pools_;
  std::array<Room, kMemoryTiers> rooms_;
  std::function<void()> pressed_;

  Mutex arena_mu_;  // One arena is emptied at a time. Before policy_mu_.
  std::atomic<std::uint64_t> arenas_emptied_{0};

  Mutex policy_mu_;
  TenantOrders orders_ ABSL_GUARDED_BY(policy_mu_);
  std::vector<TenantId> limited_ ABSL_GUARDED_BY(policy_mu_);  // With any quota.
  std::vector<TenantId> with_soft_ ABSL_GUARDED_BY(policy_mu_);
  std::atomic<bool> any_soft_{false};  // with_soft_ has some; a stale one is of a moment ago.
  std::array<std::unique_ptr<EvictionPolicy>, kMemoryTiers> policies_ ABSL_GUARDED_BY(policy_mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_MEMORY_TIERS_H_
