// The parts of the tiered store and how they hang together. Internal to storage/.
//
//   BeginStore -> Assembly -> Commit -> MemoryTiers (pools, policies, index), then
//                                       WriteBehind -> DiskStore, then GpuTier -> MemoryTiers
//   BeginCopy  -> BlockCopy -> Commit (verified) -> the same
//   Fetch      -> MemoryTiers: a reference; of a block on the GPU a copy by GpuTier
//              -> DiskLoader -> MemoryTiers, when it is only on disk
//
// Members are destroyed bottom-up: the write-behind queue drains into a disk that is still there.
#ifndef KVMILL_STORAGE_TIERED_STORE_IMPL_H_
#define KVMILL_STORAGE_TIERED_STORE_IMPL_H_

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/assembly.h"
#include "storage/block_hold.h"
#include "storage/block_index.h"
#include "storage/block_watcher.h"
#include "storage/core/mutex.h"
#include "storage/disk_loader.h"
#include "storage/gpu_tier.h"
#include "storage/memory_tiers.h"
#include "storage/namespace_stores.h"
#include "storage/namespace_table.h"
#include "storage/page_pool.h"
#include "storage/room_keeper.h"
#include "storage/store_counters.h"
#include "storage/tenant_accounts.h"
#include "storage/tiered_store.h"
#include "storage/write_behind.h"

namespace kvmill {

constexpr std::size_t Index(Tier tier) { return static_cast<std::size_t>(tier); }

class TieredStore::Impl : public AssemblyHost, public BlockLook {
 public:
  Impl(const Options& options, const Clock& clock, std::unique_ptr<DiskStore> disk);
  ~Impl() override;
  absl::Status Start();

  // AssemblyHost.
  PagePool& pool() override { return *pool_; }
  const Clock& clock() const override { return clock_; }
  absl::Status AcquirePages(TenantId tenant, std::size_t page_bytes, std::size_t count,
                            std::vector<SlotRef>* slots) override;
  absl::Status Charge(TenantId tenant, std::uint64_t bytes, TenantCharge* charge) override {
    return Charge(tenant, bytes, options_.room_wait, charge);
  }
  // Makes room among the tenant's own blocks if need be, and waits up to `wait` for others who are
  // at it. With none it does nothing that waits for a disk: room is made in the background then,
  // for whoever asks next. RESOURCE_EXHAUSTED: the hard quota; CountRefusal counts it, once it is
  // known that the block is refused for that.
  absl::Status Charge(TenantId tenant, std::uint64_t bytes, absl::Duration wait,
                      TenantCharge* charge);
  void CountRefusal(TenantId tenant, const absl::Status& why);
  void LayerFinished(const BlockWriter::Assembly& assembly, std::uint32_t layer) override;
  absl::Status Commit(const BlockWriter::Assembly& assembly, SealedBlock* block) override;
  void Abandoned(const BlockWriter::Assembly& assembly, const absl::Status& why) override;
  void ObserveEncode(double seconds) override {
    counters_.ObserveStage(Stage::kStoreEncode, seconds);
  }
  QuantizationErrors* errors() override { return options_.errors; }
  Algorithm algorithm() const override { return options_.algorithm; }
  void ObserveDecode(double seconds) override {
    counters_.ObserveStage(Stage::kStoreDecode, seconds);
  }

  // BlockLook (tiered_store_held.cc).
  void LookAt(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
              absl::Span<BlockState> found) const override;

  // Of the candidates behind the first `keys`, all of which are there, the longest that every layer
  // group has; null when there is none. `*key`: what it is stored under.
  const TailCandidate* FindTail(const OpenedNamespace& space, absl::Span<const BlockKey> keys,
                                absl::Span<const TailCandidate> tails, BlockKey* key) const;

  absl::StatusOr<std::shared_ptr<BlockWriter::Assembly>> BeginStore(const BlockId& id,
                                                                    const BlockOrigin& origin);
  void GiveUpStaleAssemblies();

  absl::Status CheckOrigin(const BlockId& id, const BlockOrigin& origin) const;
  // A sealed block becomes visible, and is on its way to disk or GPU. Its pages are published;
  // takes them over, and what was charged for them, unless it fails, as MemoryTiers::AddNew does.
  absl::Status Enter(const BlockId& id, const BlockOrigin& origin,
                     absl::Span<const PagePlace> places, EntryId* referenced = nullptr);
  // Blocks of the tenant leave the store until `bytes` are free'd, or a batch has; how many did.
  std::uint64_t EvictForQuota(TenantId tenant, std::uint64_t bytes);
  std::uint64_t EvictBatch(TenantId tenant, std::uint64_t bytes);
  // How often EvictForQuota made room for the tenant. A caller that found nothing waits for those
  // that are at it, and have taken what there was: false when nobody has since `seen`, by then.
  std::uint64_t QuotaEvictions(TenantId tenant);
  bool WaitForQuotaEviction(TenantId tenant, std::uint64_t seen, std::int64_t end_nanos);
  // A batch of each tenant that is above its hard quota, or wants room there. True: that was not
  // enough for all.
  bool TrimTenants();
  void TrimSoon();
  // Beside what is above the hard quota, the background makes so much room for the tenant.
  void TrimSoonFor(TenantId tenant, std::uint64_t bytes, std::uint64_t hard_bytes);
  // The block was sealed by a copy: nobody assembles it any more.
  void EndAssembly(const BlockId& id);
  // --- Holds (block_hold.cc). Listeners hear of it once no lock is held. ---
  using Holds = std::vector<std::shared_ptr<BlockHold>>;  // Shared with those who hold.
  // Those that follow this assembly of the block; null: that wait for one.
  Holds HoldsOf(const BlockId& id, const BlockWriter::Assembly* assembly) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(assemblies_mu_);
  // Those that wait follow it, but for `strange` ones, which expected another origin.
  void Follow(const std::shared_ptr<BlockWriter::Assembly>& assembly, Holds* strange)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(assemblies_mu_);
  // `entry`: of the block, referenced by the caller; kNoEntry: the one that the index has.
  void SealHolds(const BlockId& id, const Holds& holds, EntryId entry = kNoEntry);
  void FailHolds(const Holds& holds, const absl::Status& why);
  void Unhold(const BlockId& id);  // One of them is being destroyed.

  // Another number when the block was removed meanwhile (or, seldom, another one was).
  std::uint32_t RemovalsOf(const BlockId& id) const {
    return removals_[HashOf(id) % removals_.size()].load(std::memory_order_acquire);
  }
  void NoteRemoval(const BlockId& id) {
    removals_[HashOf(id) % removals_.size()].fetch_add(1, std::memory_order_acq_rel);
  }

  // Takes a reference when the block is in memory (of `only`, if given) and fills `ref`.
  bool TryReference(TieredStore* store, const BlockId& id, BlockRef* ref,
                    std::optional<Tier> only = std::nullopt);
  // One more reference to what is referenced already, whether or not the index still knows it.
  void ReferenceAgain(TieredStore* store, EntryId entry, BlockRef* ref);
  // Counts a reference to the entry and fills what `ref` says of its memory. Returns its bytes.
  std::uint64_t TakeReference(BlockEntry& e, BlockRef* ref);
  // What `ref` says of its entry, slots and memory becomes a reference, counted and released as
  // one.
  void Adopt(TieredStore* store, absl::Span<const std::uint32_t> page_bytes, BlockRef* ref);
  void ReleaseReference(BlockRef& ref);
  // `ref`, which is on the GPU, becomes one to a copy in host memory. On an error it is empty; a
  // copy on the GPU that cannot be read, or is damaged, is dropped.
  absl::Status CopyToHost(TieredStore* store, const OpenedNamespace& space, const BlockId& id,
                          BlockRef* ref);
  // Drops a copy in memory that is damaged and counts it. When someone may be reading it the whole
  // block is hidden, its copy on disk with it.
  absl::Status DropDamaged(const BlockId& id, Tier tier, const absl::Status& why);
  // Checks every page of a pinned block, where it is.
  absl::Status VerifyInMemory(const OpenedNamespace& space, const BlockId& id, const BlockRef& ref,
                              std::vector<std::byte>* scratch);
  // INVALID_ARGUMENT when it is not open.
  absl::StatusOr<const OpenedNamespace*> SpaceOf(const BlockId& id) const;
  std::uint8_t FlagsOf(const BlockId& id);
  // Puts on disk what is not there yet: a block on disk is lost without its namespace. Names that
  // could not be saved when they were opened are tried again by whoever wants something durable.
  absl::Status SaveNamespaces();
  absl::StatusOr<std::uint64_t> RemoveBlocks(absl::Span<const BlockId> ids);
  // The part of it that is not the disk's: which of them the disk must remove.
  std::vector<DiskBlockId> HideBlocks(absl::Span<const BlockId> ids, std::uint64_t* removed);

  const Options options_;
  const Clock& clock_;
  BlockWatcher* const watcher_;  // Of options_; null: there is no observer, or it is no watcher.
  StoreCounters counters_;
  NamespaceTable namespaces_;
  NamespaceStores stored_;
  TenantAccounts accounts_{kTenantsMax};
  Mutex quotas_mu_;  // Of SetQuotas: one at a time.
  struct QuotaEvictionsOf {
    std::uint32_t running = 0;
    std::uint64_t ended = 0;         // That made room.
    std::uint64_t wanted_bytes = 0;  // By those who did not wait for it.
  };
  Mutex evictions_mu_;
  CondVar eviction_ended_;
  absl::flat_hash_map<TenantId, QuotaEvictionsOf> evictions_ ABSL_GUARDED_BY(evictions_mu_);
  std::atomic<bool> quota_removal_failed_{false};  // The last one; it was logged.
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PagePool> gpu_pool_;  // Null: no GPU; then so is gpu_.
  std::unique_ptr<BlockIndex> index_;
  std::unique_ptr<MemoryTiers> tiers_;
  std::unique_ptr<RoomKeeper> keeper_;  // Stopped before gpu_ goes, and told of nothing after it.
  std::unique_ptr<GpuTier> gpu_;
  std::unique_ptr<DiskStore> disk_;  // Null: no disk tier; then so are the next two.
  std::unique_ptr<DiskLoader> loader_;
  std::unique_ptr<WriteBehind> write_behind_;

  Mutex assemblies_mu_;
  // Shared: the table, every writer, and a time-out that gives up while writers are inside.
  absl::flat_hash_map<BlockId, std::shared_ptr<BlockWriter::Assembly>> assemblies_
      ABSL_GUARDED_BY(assemblies_mu_);
  // Weak: the last of those who hold lets go.
  absl::flat_hash_map<BlockId, std::vector<std::weak_ptr<BlockHold>>> holds_
      ABSL_GUARDED_BY(assemblies_mu_);
  std::atomic<std::size_t> hold_count_{0};  // In holds_; read without the lock.
  // Removals so far, by hash of what was removed: copies that run know by them.
  std::array<std::atomic<std::uint32_t>, 1024> removals_{};

 private:
  absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakePolicy(std::uint64_t tier_bytes) const;
  std::uint32_t CapacityBlocks(std::uint64_t tier_bytes) const;
  absl::Status RecoverFromDisk();
  // The assembly to join, null when there is none; ALREADY_EXISTS when the block is sealed.
  absl::StatusOr<std::shared_ptr<BlockWriter::Assembly>> Join(const BlockId& id,
                                                              const BlockOrigin& origin)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(assemblies_mu_);
  void RunMaintenance();
  bool stopping() {
    MutexLock lock(maintenance_mu_);
    return stopping_;
  }

  Mutex maintenance_mu_;
  CondVar stop_changed_;
  bool stopping_ ABSL_GUARDED_BY(maintenance_mu_) = false;
  bool trim_ ABSL_GUARDED_BY(maintenance_mu_) = false;
  std::thread maintenance_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_TIERED_STORE_IMPL_H_
