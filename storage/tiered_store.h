// One node's store of sealed blocks over its tiers: a GPU's memory where there is one, host memory
// and disk.
//
// Life of a block here: BeginStore reserves pages; any number of threads write heads through the
// BlockWriter (first writer of a record wins); when every layer and head of the layer group is
// covered the block is sealed, enters the index and is written to disk in the background. A block
// that another node sealed enters the same way, once its copy is verified (BeginCopy). Lookup
// finds the longest available prefix. Fetch pins a block and gives its pages; a block that is only
// on disk is loaded (and verified) first. When host memory is full, unpinned blocks that are on
// disk leave it; without a disk they are gone. With a GPU, sealed (and written) blocks move on to
// its memory in the background, and back to host memory when that is full; readers of host memory
// get a copy.
//
// Sealed bytes never change. A block that cannot be read whole and verified is a miss, never an
// error of the engine.
//
// Thread-safe. Create and Close excepted, every call may block on disk I/O or wait for room up to
// Options::room_wait; Lookup and stats never do.
#ifndef KVMILL_STORAGE_TIERED_STORE_H_
#define KVMILL_STORAGE_TIERED_STORE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/algorithm.h"
#include "storage/block_copy.h"
#include "storage/block_writer.h"
#include "storage/core/block_key.h"
#include "storage/core/clock.h"
#include "storage/core/namespace.h"
#include "storage/core/page_layout.h"
#include "storage/core/run_link.h"
#include "storage/core/tier.h"
#include "storage/device/device.h"
#include "storage/disk_store.h"
#include "storage/eviction/policy.h"
#include "storage/page_pool.h"
#include "storage/store_observer.h"
#include "storage/store_stats.h"
#include "storage/tenant_quotas.h"
#include "storage/watermarks.h"

namespace kvmill {

class BlockHold;           // storage/block_hold.h
class ErrorGuard;          // storage/error_guard.h
class QuantizationErrors;  // storage/quantization_errors.h
struct BlockHoldListener;

// A pinned block: its pages stay where they are, and unchanged, until the last reference is gone.
// Movable. May not outlive the store.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(BlockRef&& other) noexcept;
  BlockRef& operator=(BlockRef&& other) noexcept;
  ~BlockRef();

  bool valid() const { return store_ != nullptr; }
  Tier tier() const { return tier_; }      // Where Fetch found it.
  Tier memory() const { return memory_; }  // Where its pages are: kHost or kGpu.
  std::uint32_t token_count() const { return token_count_; }
  // One a layer of the group, in the group's order. On the GPU: addresses for the device's streams.
  absl::Span<const absl::Span<const std::byte>> pages() const { return pages_; }

 private:
  friend class TieredStore;
  void Reset();
  class TieredStore* store_ = nullptr;
  EntryId entry_ = kNoEntry;  // kNoEntry: the slots are this object's own, a copy.
  std::uint32_t token_count_ = 0;
  Tier tier_ = Tier::kHost;
  Tier memory_ = Tier::kHost;
  // Of the pool of memory_. Empty for a block that is in host memory: its entry has them.
  std::vector<SlotRef> slots_;
  std::vector<absl::Span<const std::byte>> pages_;
};

class TieredStore {
 public:
  struct Options {
    std::uint64_t host_bytes = std::uint64_t{4} << 30;
    std::uint64_t arena_bytes = std::uint64_t{256} << 20;
    std::uint32_t blocks_max = 1u << 20;  // Entries of the index, over all tiers.
    std::string eviction_policy;          // Empty: the default (storage/eviction/policy.h).
    absl::Duration room_wait =
        absl::Seconds(5);  // How long a store may wait for room (blocks not yet on disk).
    absl::Duration assembly_timeout =
        absl::Seconds(30);  // An unfinished block without progress is given up after this.
    bool prefault = true;
    HugePages huge_pages = HugePages::kAuto;  // Of host memory.
    std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> prefault_progress;
    // What holds the tier above host memory, with so much of its memory; null: there is none.
    // Outlives the store.
    Device* gpu = nullptr;
    std::uint64_t gpu_bytes = 0;
    std::uint64_t gpu_arena_bytes = std::uint64_t{256} << 20;
    // Told of blocks that come and go, but not of those found on disk before Create returns; null:
    // nobody is, and links are not kept in memory. Outlives the store.
    StoreObserver* observer = nullptr;
    // Takes samples of what encoding loses; null: nobody does. Outlives the store.
    QuantizationErrors* errors = nullptr;
    // What encodes heads in host memory; those in a device's memory are encoded as kKvarn. Whoever
    // decodes them need not know.
    Algorithm algorithm = Algorithm::kKvarn;
    // Says into which namespaces nothing is stored; null: into all. Outlives the store.
    const ErrorGuard* guard = nullptr;
  };

  // `disk` may be null: no disk tier. Reads the namespaces and the index of `disk` before it
  // returns.
  static absl::StatusOr<std::unique_ptr<TieredStore>> Create(const Options& options,
                                                             const Clock& clock,
                                                             std::unique_ptr<DiskStore> disk);
  // Waits for background writes, flushes, stops. Every BlockRef, BlockWriter and BlockCopy must be
  // gone.
  ~TieredStore();

  Algorithm algorithm() const;  // Of Options.

  // --- Namespaces ---
  struct NamespaceInfo {
    NamespaceId id = 0;
    std::string name;
    NamespaceSpec spec;
    Fingerprint fingerprint{};
  };
  // Binds `name` (local to spec.tenant) to this identity at first use; the same identity again
  // gives the same id. INVALID_ARGUMENT for a bad spec or name; FAILED_PRECONDITION naming the
  // first different field when `name` is bound to another identity, or for 3-bit keys when the GPU
  // tier is a CUDA device's, which has no kernels for them.
  absl::StatusOr<NamespaceInfo> OpenNamespace(absl::string_view name, const NamespaceSpec& spec);
  // NOT_FOUND when unknown to this tenant.
  absl::StatusOr<NamespaceInfo> FindNamespace(absl::string_view tenant,
                                              absl::string_view name) const;
  absl::StatusOr<NamespaceInfo> FindNamespace(absl::string_view tenant,
                                              const Fingerprint& fingerprint) const;
  absl::StatusOr<NamespaceInfo> FindNamespace(NamespaceId id) const;
  // Of whichever tenant it is: for those who know for whom they ask. NOT_FOUND when it is not open.
  absl::StatusOr<NamespaceInfo> FindAnyNamespace(const Fingerprint& fingerprint) const;
  std::vector<NamespaceInfo> Namespaces() const;
  // Those that `wanted` picks by tenant and name, which is called under no lock.
  std::vector<NamespaceInfo> NamespacesWhere(
      absl::FunctionRef<bool(absl::string_view tenant, absl::string_view name)> wanted) const;
  // What a namespace stored since the start, also of what is gone again.
  struct NamespaceStored {
    std::string tenant, name;
    std::uint64_t blocks = 0;  // Layer groups of blocks.
    std::uint64_t bytes = 0;
  };
  // Those that stored something, the most bytes first.
  std::vector<NamespaceStored> Stored() const;

  // --- Store ---
  // Starts or joins the assembly of a block. ALREADY_EXISTS: it is sealed here (its first bytes
  // stay; counted as existing). INVALID_ARGUMENT: token_count, parent, a tail's key or group do not
  // fit the namespace, or another writer assembles this key with another origin.
  // RESOURCE_EXHAUSTED: no room even after evicting and waiting, or, at once, under the tenant's
  // hard quota; retry later. FAILED_PRECONDITION: Options::guard takes no new ones.
  absl::StatusOr<BlockWriter> BeginStore(const BlockId& id, const BlockOrigin& origin);

  // Starts the copy of a sealed block from another node: memory for its pages, which have these
  // bytes (one a layer of the group). `origin` is what the caller knows of the block it wants, not
  // what the other node says of it: a copy with another token_count is refused at its commit. The
  // parent of a whole block may be empty, when it is not known. Copies of one block, and its
  // assembly, may run at once: what is sealed first stays. ALREADY_EXISTS: the block is sealed
  // here. INVALID_ARGUMENT as BeginStore, or no page of such a block has so many bytes.
  // RESOURCE_EXHAUSTED: no room within `room_wait`, or under the tenant's hard quota; with 0 it
  // evicts if need be and waits for nothing: room under the quota that a disk is needed for is made
  // in the background, for a later call.
  absl::StatusOr<BlockCopy> BeginCopy(const BlockId& id, const BlockOrigin& origin,
                                      absl::Span<const std::uint32_t> page_bytes,
                                      absl::Duration room_wait);

  // Bytes of each page of such a block when a tile holds every head of it.
  absl::StatusOr<std::uint32_t> PlainPageBytes(const BlockId& id, const BlockOrigin& origin) const;

  // Holds the block, sealed or not, or what will be stored under this id next: what there is of it
  // stays, and its finished layers can be read (storage/block_hold.h). Pages are in host memory; of
  // a block that is on the GPU, a copy. Held pages cannot be evicted, so whoever holds bounds them.
  // INVALID_ARGUMENT as BeginStore, or the block is there with another origin. RESOURCE_EXHAUSTED:
  // it is on disk, and there is no host room to load it into. `path` as for Fetch.
  absl::StatusOr<std::shared_ptr<BlockHold>> Hold(const BlockId& id, const BlockOrigin& origin,
                                                  FetchPath path, BlockHoldListener listener);

  // Waits until these blocks are durable; `results[i]` (same size) is OK when ids[i] is, NOT_FOUND
  // when it is not in the store any more, else why not. FAILED_PRECONDITION when there is no disk
  // tier; for no `ids`, what the disk's flush said.
  absl::Status MakeDurable(absl::Span<const BlockId> ids, absl::Span<absl::Status> results);
  // The same for every sealed block, of one tenant if given; the number of those that were on no
  // disk before. An error when any could not be made so. Costs what is unwritten, not what is here.
  absl::StatusOr<std::uint64_t> Flush(std::optional<absl::string_view> tenant = std::nullopt);

  // --- Lookup and fetch ---
  struct LookupResult {
    std::uint32_t hit_blocks =
        0;  // Longest prefix of `keys` that every layer group of the namespace can serve.
    std::uint64_t hit_tokens = 0;   // Of those blocks (the tail not counted).
    std::vector<Tier> tiers;        // Per hit block, the slowest over its groups; kPeer: elsewhere.
    std::uint32_t tail_tokens = 0;  // Of the longest of the tails asked for that is there after the
                                    // last hit block; 0: none.
    BlockKey tail_key;              // What it is stored under.
  };
  struct LookupOptions {
    // One for each key, or none: true where another node has the block, in all groups. Such a block
    // counts as there, in tier kPeer where this store lacks it, as far as the tenant's hard quota
    // has room for the prefix. May be null.
    const std::vector<bool>* elsewhere = nullptr;
    // False: the caller asks again, unless all keys are hits; so only these are counted.
    bool is_last_word = true;
  };
  // Never blocks, never pins, changes no order of eviction.
  // CheckTailCandidates(tails) was OK; those that are not after exactly the hit blocks are passed
  // over.
  LookupResult Lookup(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
                      absl::Span<const TailCandidate> tails, const LookupOptions& options);
  LookupResult Lookup(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
                      absl::Span<const TailCandidate> tails = {}) {
    return Lookup(namespace_id, keys, tails, LookupOptions());
  }

  // Which of the blocks are here, in every layer group. Never blocks; counts and changes nothing.
  std::vector<bool> Present(NamespaceId namespace_id, absl::Span<const BlockKey> keys) const;

  // Pages in host memory; of a block that is on the GPU, a copy of its own. NOT_FOUND: a miss, also
  // when every copy was damaged (counted, dropped). RESOURCE_EXHAUSTED: no host room to load it
  // into. `path` is what it is counted under.
  absl::StatusOr<BlockRef> Fetch(const BlockId& id, FetchPath path = FetchPath::kInline);
  // The same for a block that is in that memory now. Not valid, and nothing counted, when it is
  // not; never blocks.
  BlockRef FetchFromMemory(const BlockId& id, FetchPath path,
                           PageMemory memory = PageMemory::kHost);
  // Many of these will be fetched from memory now: their entries to the cache, so that their misses
  // overlap. Changes nothing.
  void Prefetch(absl::Span<const BlockId> ids) const;
  // Pages on the GPU: the block is promoted first if need be. FAILED_PRECONDITION when there is no
  // GPU; RESOURCE_EXHAUSTED also when everything there stays in use for Options::room_wait;
  // NOT_FOUND as above; else what the device said.
  absl::StatusOr<BlockRef> FetchOnGpu(const BlockId& id, FetchPath path = FetchPath::kMap);
  // The blocks were used, as if fetched; the number of those that are in memory. Never blocks.
  std::uint64_t Touch(absl::Span<const BlockId> ids);

  // Where pages of a block lie, for readers in other processes that map the arena. Page i of a run
  // is `page_bytes` at offset_bytes + i * stride_bytes; its generation, which stays as long as the
  // block is held, is a word of kGenerationBytes: the i-th from generation_offset_bytes on.
  struct PageRun {
    Tier tier = Tier::kHost;
    std::uint32_t arena = 0;        // Number within the tier.
    std::uint64_t arena_epoch = 0;  // Another one when the arena got other memory.
    std::uint64_t offset_bytes = 0;
    std::uint64_t generation_offset_bytes = 0;
    std::uint32_t page_count = 0;
    std::uint32_t page_bytes = 0;
    std::uint32_t stride_bytes = 0;  // 0 of a single page.
  };
  // Appends the runs of a valid `block`, in the order of its pages().
  void Locate(const BlockRef& block, std::vector<PageRun>* runs) const;
  // Appends the generation of each page of a valid `block`.
  void LoadGenerations(const BlockRef& block, std::vector<std::uint64_t>* generations) const;
  // The memory of an arena that Locate named: can only be mapped to read. The descriptor is
  // borrowed, good while the reference is held. On the GPU: for Device::Import.
  struct Arena {
    int fd = -1;
    std::uint64_t bytes = 0;
  };
  Arena ArenaOf(const PageRun& run) const;
  // The memory of its generations: in host memory the same, on the GPU host memory beside it.
  Arena GenerationsOf(const PageRun& run) const;

  // --- Removal ---
  // Hides the blocks now (all layer groups of each key); pinned pages are freed when unpinned. The
  // number of blocks that were there. Durable.
  absl::StatusOr<std::uint64_t> Remove(NamespaceId namespace_id, absl::Span<const BlockKey> keys);
  // All blocks of the namespace.
  absl::StatusOr<std::uint64_t> Clear(NamespaceId namespace_id);
  // Moves blocks out of host memory, or from the GPU to host memory, until `bytes` are freed or
  // nothing can leave; the number of blocks moved. With a disk tier they are written first.
  // INVALID_ARGUMENT for another tier, FAILED_PRECONDITION for kGpu when there is no GPU.
  absl::StatusOr<std::uint64_t> Evict(Tier tier, std::uint64_t bytes);

  // --- Quotas (storage/tenant_quotas.h) ---
  // All of them, instead of those before; tenants may be unknown so far. Any time, from any thread.
  // Holds from now on for what comes; what is above a hard quota already leaves in the background,
  // soon, as far as it may. Without quotas nothing is limited. INVALID_ARGUMENT, and nothing
  // changed: more than kQuotasMax, or a soft quota above the hard one.
  absl::Status SetQuotas(const TenantQuotas& quotas);
  // Of every tenant that has a namespace or a quota, by name.
  std::vector<TenantUsage> Usage() const;
  // Of one tenant, which may be unknown. Looks at no block.
  TenantHolding Holding(absl::string_view tenant) const;

  // --- Room ahead of need (storage/watermarks.h) ---
  // Any time, from any thread; none without this. Blocks that leave so are on disk, or move from
  // the GPU to free host memory: nothing is lost. INVALID_ARGUMENT: no memory tier, or a high mark
  // of 0 or above 100, or a low mark that is not below it. A tier that this store lacks is fine.
  absl::Status SetWatermarks(Tier tier, Watermarks marks);

  // --- For people ---
  struct BlockInfo {
    NamespaceId namespace_id = 0;
    std::uint8_t group = 0;
    BlockKey key;
    Tier tier = Tier::kHost;  // The fastest tier that holds it.
    std::uint64_t bytes = 0;
    double age_s = 0;          // Since it was sealed here, or found on disk at start.
    std::uint32_t leases = 0;  // References now held.
  };
  // Visits every block, without a lock held during `visit`, which returns false to stop. Blocks
  // that come or go meanwhile may be missed.
  void List(absl::FunctionRef<bool(const BlockInfo&)> visit) const;

  // --- For who keeps account of what is here (service/held_runs.h) ---
  struct HeldBlock {
    bool whole = false;        // Every layer group of the namespace is here, in some tier.
    RunLink link;              // Of the first group; none without Options::observer.
    EntryId entry = kNoEntry;  // Of the first group; a name for BlockAt, as long as it is there.
  };
  // One answer a key (same size). Like Lookup, it never blocks and changes nothing; nothing is
  // counted.
  void Inspect(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
               absl::Span<HeldBlock> found) const;
  // Some of all blocks, each with its first group's id; without a lock held during `visit`. False,
  // and nothing visited, at the end. Blocks that are there from the first call to the last are
  // visited.
  struct WalkCursor {
    std::uint32_t shard = 0;
    std::uint32_t local = 0;
  };
  bool Walk(WalkCursor* cursor,
            absl::FunctionRef<void(const BlockId&, const HeldBlock&)> visit) const;
  // What the entry stands for now, with the bytes of all its groups; false when it is gone.
  bool BlockAt(EntryId entry, BlockId* id, std::uint64_t* bytes) const;
  // How often the entry's block was used since it came, up to 255; 0 when it is gone.
  std::uint8_t UsesAt(EntryId entry) const;

  struct VerifyResult {
    std::uint64_t records_checked = 0;
    std::uint64_t failures = 0;
  };
  // Checks every record on the GPU, in host memory and on disk; damaged copies are dropped and
  // counted.
  absl::StatusOr<VerifyResult> Verify();

  StoreStats stats() const;

 private:
  friend class BlockCopy;
  friend class BlockHold;
  friend class BlockRef;
  friend class BlockWriter;
  class Impl;
  explicit TieredStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_TIERED_STORE_H_
