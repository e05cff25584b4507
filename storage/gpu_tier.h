// The tier in a GPU's memory: brings blocks there, back, and to readers in host memory.
//
// Blocks are made, checked and written to disk in host memory. Sealed ones (with a disk tier:
// written ones) are then *promoted*: copied to the GPU, read back and compared, and swapped in the
// index, if nobody else refers to them at that moment. When the GPU's pool is full, the block that
// its policy names is *demoted*: copied to host memory, verified there, and swapped; host memory
// evicts to disk to make room, and when it cannot, a block that is on disk just leaves.
//
// One thread does all that moves blocks, one block after the other, and never waits for room: so
// two full tiers cannot wait for each other. Promotion is best effort. It is skipped when the queue
// is full, the block is in use or gone, room could only be had by losing another block, or a copy
// fails; the block then stays in host memory until a reader asks for it on the GPU (Hold).
//
// A copy on the GPU that fails, or that its checksums refute, is dropped and counted; whoever
// wanted it looks for the next copy.
//
// `Device` is what plays the GPU; its memory need not be accessible to the CPU.
//
// Internal to storage/. Thread-safe.
#ifndef KVMILL_STORAGE_GPU_TIER_H_
#define KVMILL_STORAGE_GPU_TIER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/block_index.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"
#include "storage/device/device_copier.h"
#include "storage/memory_tiers.h"
#include "storage/namespace_table.h"
#include "storage/store_counters.h"

namespace kvmill {

class GpuTier {
 public:
  // Everything outlives it; `tiers` has a GPU pool in the memory of `device`.
  static absl::StatusOr<std::unique_ptr<GpuTier>> Create(Device& device, MemoryTiers& tiers,
                                                         NamespaceTable& namespaces,
                                                         const Clock& clock,
                                                         StoreCounters& counters);
  // Forgets what is queued. No other call may be running.
  ~GpuTier();

  // A block that may be promoted is in host memory.
  void Enqueue(const BlockId& id, const BlockKey& parent);

  // Pages on the GPU that a caller holds: those of a block that lives there, by a reference, or a
  // copy of a block that had to stay in host memory (others refer to it, or it is not yet written).
  struct Held {
    EntryId entry = kNoEntry;  // Referenced. kNoEntry: `slots` of the GPU's pool are the caller's.
    std::uint16_t token_count = 0;
    std::vector<SlotRef> slots;
    std::vector<std::uint32_t> page_bytes;
  };
  // Promotes a block that is in host memory, or copies it, making room at the cost of other blocks.
  // NOT_FOUND: it is not in host memory (any more); look again. RESOURCE_EXHAUSTED: everything on
  // the GPU is in use. Other errors: the device's.
  absl::Status Hold(const BlockId& id, Held* held);

  // Copies pages from the GPU and verifies them; the caller keeps them in place. DATA_LOSS: they
  // are damaged. Other errors: the device's.
  absl::Status Read(const OpenedNamespace& space, const BlockId& id, std::uint32_t token_count,
                    absl::Span<const SlotRef> from, absl::Span<const absl::Span<std::byte>> to);
  // The same into host slots, which are the caller's then, published. RESOURCE_EXHAUSTED: no room
  // for them within `room_wait`; with kOnlyFree, none that is free.
  absl::Status ReadToHost(const OpenedNamespace& space, const BlockId& id,
                          std::uint32_t token_count, absl::Span<const SlotRef> from,
                          absl::Span<const std::uint32_t> page_bytes, absl::Duration room_wait,
                          std::vector<SlotRef>* slots);
  static constexpr absl::Duration kOnlyFree = absl::Nanoseconds(-1);

  // Demotes until `bytes` are free'd or nothing can leave without being lost. With `host_wait`
  // kOnlyFree nothing leaves host memory for it.
  MemoryTiers::Evicted Demote(std::uint64_t bytes, EvictReason reason,
                              absl::Duration host_wait = absl::ZeroDuration());

  // Blocks that wait to be promoted, and the one that is.
  std::uint64_t pending() const;

 private:
  struct Promotion {
    BlockId id;
    BlockKey parent;
  };
  // Work that a caller waits for.
  struct Task {
    absl::FunctionRef<void()> work;
    bool done = false;
  };
  struct AlignedFree {
    void operator()(std::byte* memory) const;
  };

  GpuTier(Device& device, MemoryTiers& tiers, NamespaceTable& namespaces, const Clock& clock,
          StoreCounters& counters);
  void Run();
  // Has the thread do `work`, and waits for it.
  void OnThread(absl::FunctionRef<void()> work);

  // The rest: on the thread only.
  void Promote(const Promotion& promotion);
  // Slots on the GPU that hold what the block holds. With `may_lose`, room is made even by losing
  // blocks.
  absl::Status CopyToGpu(const MemoryTiers::MovingBlock& block, bool may_lose,
                         std::vector<SlotRef>* slots);
  absl::Status AcquireOnGpu(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                            bool may_lose, std::vector<SlotRef>* slots);
  // DATA_LOSS when the device does not hold what it was given.
  absl::Status Compare(absl::Span<const DeviceCopier::Copy> copies);
  // Makes room by one block. The bytes that came free; 0 when there is no block that may leave.
  // For a tenant: see MemoryTiers::TakeGpuVictim.
  std::uint64_t DemoteOne(std::optional<TenantId> for_tenant, bool may_lose, EvictReason reason,
                          absl::Duration host_wait = absl::ZeroDuration());
  void ReleaseAll(Tier tier, absl::Span<const SlotRef> slots);

  Device& device_;
  MemoryTiers& tiers_;
  NamespaceTable& namespaces_;
  const Clock& clock_;
  StoreCounters& counters_;
  std::unique_ptr<DeviceCopier> copier_;
  std::unique_ptr<std::byte, AlignedFree> staging_;  // Pinned; for Compare.

  mutable Mutex mu_;
  CondVar work_;   // There is some, or stopping_.
  CondVar ended_;  // A task did.
  std::deque<Task*> tasks_ ABSL_GUARDED_BY(mu_);
  std::deque<Promotion> promotions_ ABSL_GUARDED_BY(mu_);  // Bounded.
  bool promoting_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::int64_t last_warning_nanos_ = 0;  // Of the thread only.
  std::thread thread_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_GPU_TIER_H_
