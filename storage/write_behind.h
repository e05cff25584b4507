// Sealed blocks on their way to the disk.
//
// A queue and one thread. A block in the queue keeps kUnwritten, so it cannot leave memory; the
// queue is therefore bounded by the memory tiers. A written block may go on to the GPU. A block
// that could not be written loses the flag (the cache goes on without a disk copy) and is
// remembered, so that MakeDurable tries again.
//
// Internal to storage/. Thread-safe.
#ifndef KVMILL_STORAGE_WRITE_BEHIND_H_
#define KVMILL_STORAGE_WRITE_BEHIND_H_

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/block_index.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/disk_store.h"
#include "storage/gpu_tier.h"
#include "storage/memory_tiers.h"
#include "storage/namespace_table.h"
#include "storage/page_pool.h"
#include "storage/store_counters.h"

namespace kvmill {

class WriteBehind {
 public:
  // `gpu` may be null.
  WriteBehind(DiskStore& disk, PagePool& pool, BlockIndex& index, MemoryTiers& tiers, GpuTier* gpu,
              NamespaceTable& namespaces, const Clock& clock, StoreCounters& counters);
  // Writes what is queued, flushes, and joins the thread.
  ~WriteBehind();

  // The block is in the index with kInHost | kUnwritten.
  void Enqueue(const BlockId& id, const BlockKey& parent, const RunLink& link);

  // See TieredStore::MakeDurable. What the disk's last flush said, which is in the results, too.
  absl::Status MakeDurable(absl::Span<const BlockId> ids, absl::Span<absl::Status> results);

  // Waits until everything that is queued or being written now was tried; not for what comes after.
  void WaitWritten();

  // While it lives, no block of these ids is written: who removes a block from the index first and
  // from the disk second must not take what was stored anew in between. `writer` may be null.
  class Removal {
   public:
    Removal(WriteBehind* writer, absl::Span<const BlockId> ids);
    ~Removal();
    Removal(const Removal&) = delete;
    Removal& operator=(const Removal&) = delete;

   private:
    WriteBehind* const writer_;
    const absl::Span<const BlockId> ids_;
  };

  std::uint64_t pending() const;

  DiskBlockId DiskIdOf(const BlockId& id) const;

 private:
  struct Job {
    BlockId id;
    BlockKey parent;
    RunLink link;
    std::int64_t enqueued_nanos = 0;
  };
  struct Pending {
    std::uint32_t jobs =
        0;  // Queued or being written; a block that was removed and stored again can have two.
  };

  void Run();
  // What the disk still has under this id is of a block that was removed: it gives way.
  absl::Status WriteToDisk(const DiskBlockMeta& meta,
                           absl::Span<const absl::Span<const std::byte>> pages);
  void Write(const Job& job);
  // Pages of a block that is referenced, in memory of `tier`; of the GPU's by way of a copy.
  absl::Status WritePages(const DiskBlockMeta& meta, const BlockId& id, Tier tier,
                          absl::Span<const SlotRef> slots);
  // Queues blocks that are in memory and on no disk and not on their way.
  void RequeueUnwritten(absl::Span<const BlockId> ids);

  DiskStore& disk_;
  PagePool& pool_;
  BlockIndex& index_;
  MemoryTiers& tiers_;
  GpuTier* const gpu_;
  NamespaceTable& namespaces_;
  const Clock& clock_;
  StoreCounters& counters_;

  mutable Mutex mu_;
  CondVar work_;     // The queue has a job, or stopping_.
  CondVar written_;  // A job ended.
  CondVar removed_;  // A removal ended.
  std::deque<Job> queue_ ABSL_GUARDED_BY(mu_);
  std::uint64_t jobs_enqueued_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t jobs_ended_ ABSL_GUARDED_BY(mu_) = 0;
  // How many removals of the id are under way.
  absl::flat_hash_map<BlockId, std::uint32_t> removing_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<BlockId, Pending> pending_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<BlockId, absl::Status> failed_
      ABSL_GUARDED_BY(mu_);  // Why the last write failed; bounded, see Write.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::int64_t last_warning_nanos_ = 0;  // Of the writing thread only.
  std::thread thread_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_WRITE_BEHIND_H_
