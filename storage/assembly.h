// A block between BeginStore and its seal: pages in the pool, a coverage bitmap over (layer, head),
// and who finishes it.
//
// Internal to storage/ (block_writer.h is the public side).
#ifndef KVMILL_STORAGE_ASSEMBLY_H_
#define KVMILL_STORAGE_ASSEMBLY_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/algorithm.h"
#include "kernels/encode.h"
#include "storage/block_writer.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/core/page_layout.h"
#include "storage/namespace_table.h"
#include "storage/page_pool.h"
#include "storage/tenant_accounts.h"

namespace kvmill {

// A sealed block on its way into the index: its pages are complete, checksummed and published.
struct SealedBlock {
  BlockId id;
  BlockOrigin origin;
  OpenedNamespace* space = nullptr;
  std::vector<SlotRef> slots;  // One a layer; owned by whoever holds this.
  std::vector<std::uint32_t> page_bytes;
  std::uint64_t raw_bytes = 0;     // 16-bit bytes that came in.
  std::uint64_t stored_bytes = 0;  // Sum of page_bytes.
  std::uint32_t raw_heads = 0;
};

class QuantizationErrors;  // storage/quantization_errors.h

// What an assembly needs from the store around it.
class AssemblyHost {
 public:
  virtual ~AssemblyHost() = default;
  virtual PagePool& pool() = 0;
  virtual const Clock& clock() const = 0;
  // Pages for a layer with raw heads where tiles were expected; evicts and waits like BeginStore.
  virtual absl::Status AcquirePages(TenantId tenant, std::size_t page_bytes, std::size_t count,
                                    std::vector<SlotRef>* slots) = 0;
  // Bytes of such pages under the tenant's hard quota: before they are acquired.
  // RESOURCE_EXHAUSTED.
  virtual absl::Status Charge(TenantId tenant, std::uint64_t bytes, TenantCharge* charge) = 0;
  // Every head of the layer is written, and its page final. Called once a layer, by the writer of
  // its last head; all calls have returned before Commit.
  virtual void LayerFinished(const BlockWriter::Assembly& assembly, std::uint32_t layer) = 0;
  // Takes over the pages, and what is charged for them, and makes the block visible, unless it
  // fails: then they stay the assembly's, whoever reads them. ALREADY_EXISTS when a copy of it was
  // sealed first. Called once, by the writer that covered the last head.
  virtual absl::Status Commit(const BlockWriter::Assembly& assembly, SealedBlock* block) = 0;
  // Forgets an assembly that was given up.
  virtual void Abandoned(const BlockWriter::Assembly& assembly, const absl::Status& why) = 0;
  virtual void ObserveEncode(double seconds) = 0;
  // Who samples what encoding loses; may be null.
  virtual QuantizationErrors* errors() = 0;
  virtual Algorithm algorithm() const = 0;  // Of heads in host memory.
  virtual void ObserveDecode(double seconds) = 0;
};

// What every head of the block is stored as: raw in sink blocks and tails, else a tile (but for
// heads that none holds).
SlotKind SlotKindOf(const NamespaceSpec& spec, const BlockOrigin& origin);

class HeadSource;  // storage/head_source.h

// Thread-safe. Kept alive by shared_ptr: writers on any thread, and the store's table. Pages that
// were not committed go back to the pool when the last holder lets go, so a time-out never frees
// memory under a running encode.
struct BlockWriter::Assembly : std::enable_shared_from_this<BlockWriter::Assembly> {
  Assembly(AssemblyHost& host, OpenedNamespace& space, const BlockId& id,
           const BlockOrigin& origin);
  ~Assembly();

  // Acquires and initializes the pages. Once, before any writer sees the assembly.
  absl::Status Prepare();

  absl::StatusOr<WriteResult> WriteHeads(std::uint32_t layer, std::uint32_t head_begin,
                                         absl::Span<const HeadInput> heads, HeadSource& source);
  absl::StatusOr<WriteResult> WriteRecord(std::uint32_t layer, std::uint32_t head,
                                          absl::Span<const std::byte> record);

  // The block is sealed with other bytes: later writes answer ALREADY_EXISTS. No effect once this
  // one's sealing has begun; then that finds out.
  void SealedElsewhere();
  // Gives the block up: later writes answer ABORTED with `why`. No effect once sealing has begun.
  void Abandon(const absl::Status& why);

  // The final page of a layer of which every head is written; empty before. Where it is it stays as
  // long as this object, and when it is sealed as long as the block is referred to.
  absl::Span<const std::byte> FinishedPage(std::uint32_t layer) const;

  // Whether its seal has begun, here or elsewhere. Sequentially consistent, as is the beginning.
  bool sealing() const { return state_.load() == State::kSealed; }

  Algorithm algorithm() const { return host_.algorithm(); }
  const BlockId& id() const { return id_; }
  const BlockOrigin& origin() const { return origin_; }
  std::int64_t last_progress_nanos() const {
    return last_progress_nanos_.load(std::memory_order_relaxed);
  }

 private:
  using RawHeads = absl::flat_hash_map<std::uint32_t, std::vector<std::byte>>;  // By head.

  absl::Status CheckWritable() const;
  absl::Status CheckRange(std::uint32_t layer, std::size_t head_begin,
                          std::size_t head_count) const;
  // True for exactly one caller per (layer, head).
  bool Claim(std::uint32_t layer, std::uint32_t head);
  absl::Status WriteRaw(std::uint32_t layer, std::uint32_t head, const HeadInput& input,
                        std::byte* to) const;
  // One head that a tile cannot hold: its 16-bit bytes wait beside the page for the others.
  absl::Status KeepRaw(std::uint32_t layer, std::uint32_t head, const HeadInput& input);
  // Compares those of the tiles just written that are its samples with what came in.
  void SampleErrors(QuantizationErrors& errors, std::uint32_t layer, std::uint32_t head_begin,
                    absl::Span<const HeadInput> heads, absl::Span<const std::uint32_t> tile_heads,
                    absl::Span<const EncodeResult> outcomes, HeadSource& source);
  absl::Status NonFiniteError(std::uint32_t layer, std::uint32_t head,
                              const HeadInput& input) const;
  // So many heads of the layer are complete, and maybe with them the layer, and the block.
  absl::Status Finish(std::uint32_t layer, std::uint32_t written, WriteResult* result);
  absl::Status FinishLayer(std::uint32_t layer);
  absl::Status Seal(WriteResult* result);
  // The page of `layer` again, with its raw heads in it; needs a larger slot.
  absl::Status RebuildPage(std::uint32_t layer, const RawHeads& raw_heads);
  PageIdentity IdentityOf(std::uint32_t layer) const;

  AssemblyHost& host_;
  OpenedNamespace& space_;
  const BlockId id_;
  const BlockOrigin origin_;
  const LayerGroup& group_;
  const TileFormat format_;
  const bool raw_;  // Sink block or tail: every head is raw.
  const std::uint32_t layer_count_;
  const std::uint32_t head_count_;

  // Of each layer: changed once after Prepare, by who finishes it, before it says so.
  std::vector<SlotRef> slots_;  // Empty once committed.
  std::vector<absl::Span<std::byte>> pages_;
  struct Layer {
    std::atomic<std::uint32_t> done{0};  // Heads whose bytes are complete.
    std::atomic<bool> finished{false};   // Its page is final.
  };
  std::vector<Layer> layers_;
  std::vector<std::atomic<std::uint64_t>> claimed_;  // Bit layer * head_count_ + head.
  std::atomic<std::uint32_t> done_{0};               // Heads of which the layers know.
  std::atomic<std::uint32_t> raw_head_count_{0};     // Heads that tiles could not hold.
  std::atomic<std::int64_t> last_progress_nanos_;    // A stale value only delays a time-out.

  enum class State { kOpen, kSealed, kAbandoned };
  std::atomic<State> state_{State::kOpen};
  mutable Mutex mu_;
  absl::Status why_ ABSL_GUARDED_BY(mu_);
  TenantCharge charge_ ABSL_GUARDED_BY(mu_);  // For its pages, until they are committed.
  // By layer; those of finished ones are in their pages.
  absl::flat_hash_map<std::uint32_t, RawHeads> raw_heads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ASSEMBLY_H_
