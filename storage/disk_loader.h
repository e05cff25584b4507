// Blocks on their way back from the disk.
//
// Concurrent loads of one block share one read. What comes back is verified (VerifyPage) before
// anyone sees it; a damaged block is dropped from the disk, counted, and is a miss.
//
// Internal to storage/. Thread-safe.
#ifndef KVMILL_STORAGE_DISK_LOADER_H_
#define KVMILL_STORAGE_DISK_LOADER_H_

#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/block_index.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/core/page_layout.h"
#include "storage/disk_store.h"
#include "storage/memory_tiers.h"
#include "storage/namespace_table.h"
#include "storage/page_pool.h"
#include "storage/store_counters.h"

namespace kvmill {

class DiskLoader {
 public:
  DiskLoader(DiskStore& disk, PagePool& pool, MemoryTiers& tiers, const Clock& clock,
             StoreCounters& counters)
      : disk_(disk), pool_(pool), tiers_(tiers), clock_(clock), counters_(counters) {}

  // Brings the block to host memory. OK: it was there a moment ago (it may have left again: look,
  // and retry). NOT_FOUND: it is not on disk, or was damaged. RESOURCE_EXHAUSTED: no room within
  // `room_wait`. Other errors: the disk's.
  absl::Status Load(const OpenedNamespace& space, const BlockId& id, absl::Duration room_wait);

  // Reads the block into `scratch` and verifies every page. DATA_LOSS: it was damaged, and is
  // dropped. NOT_FOUND: it is gone. Counts the records looked at.
  absl::Status Verify(const OpenedNamespace& space, const BlockId& id,
                      std::vector<std::byte>* scratch, std::uint64_t* records_checked);

 private:
  struct InFlight {
    bool done = false;
    absl::Status result;
  };

  // These refer to the block by its entry: what is found out about a block that was removed says
  // nothing of one that was stored anew meanwhile.
  absl::Status LoadOnce(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                        absl::Duration room_wait);
  absl::Status LoadAlone(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                         absl::Duration room_wait);
  absl::Status VerifyEntry(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                           std::vector<std::byte>* scratch, std::uint64_t* records_checked);
  absl::StatusOr<DiskBlockMeta> Find(const OpenedNamespace& space, const BlockId& id,
                                     EntryId entry);
  // DATA_LOSS after dropping a damaged copy.
  absl::Status ReadVerified(const OpenedNamespace& space, const DiskBlockMeta& meta, EntryId entry,
                            absl::Span<const absl::Span<std::byte>> pages);
  // Forgets the copy on disk, there and in the index.
  void Drop(const DiskBlockId& disk_id, EntryId entry);

  DiskStore& disk_;
  PagePool& pool_;
  MemoryTiers& tiers_;
  const Clock& clock_;
  StoreCounters& counters_;

  Mutex mu_;
  CondVar ended_;
  // Shared: the reader and everyone who waits for it.
  absl::flat_hash_map<EntryId, std::shared_ptr<InFlight>> in_flight_ ABSL_GUARDED_BY(mu_);
};

// Identity that page `layer_index` of a block must have.
PageIdentity IdentityOfPage(const OpenedNamespace& space, const BlockId& id,
                            std::size_t layer_index, std::uint32_t token_count);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_LOADER_H_
