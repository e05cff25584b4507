// The thread that keeps the disk tier under its cap: drops doomed epochs whole, carrying over what
// was read lately, or is to be kept for another reason (DiskStore::KeepAdvice).
#ifndef KVMILL_STORAGE_ROCKS_EVICTOR_H_
#define KVMILL_STORAGE_ROCKS_EVICTOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/disk_id_locks.h"
#include "storage/disk_store.h"
#include "storage/rocks_blocks.h"
#include "storage/rocks_database.h"
#include "storage/rocks_epochs.h"

namespace kvmill {

// Counts of a store, for stats(); a stale value is a count of a moment ago.
struct RocksCounters {
  std::atomic<std::uint64_t> block_count{0};
  std::atomic<std::uint64_t> evicted_blocks{0};
  std::atomic<std::uint64_t> reinserted_blocks{0};
};

class RocksEvictor {
 public:
  struct Options {
    std::uint64_t reinsert_bytes = 0;  // Per dropped epoch.
    std::function<absl::Status()> flush;
    std::function<void(absl::Span<const DiskBlockId> ids)> evicted;
    DiskStore::KeepAdviceCallback advice;
  };

  // Borrows all of them until it is destroyed.
  RocksEvictor(RocksDatabase& database, RocksEpochs& epochs, DiskIdLocks& locks,
               RocksCounters& counters, Options options);
  // Stops `epochs` and joins; a drop that is under way is given up between two blocks, which is
  // safe: the next start finds the epoch and drops it again.
  ~RocksEvictor();

 private:
  struct Candidate {
    std::string meta_key;
    std::uint64_t block_number = 0;
    std::uint32_t epochs_since_read = 0;  // kNotRead: only to be kept.
  };

  void Run();
  absl::Status Drop(const RocksEpochs::Doomed& doomed);
  // Removes the meta entries that still lie in epoch `epoch` and reports them.
  absl::Status Evict(std::uint64_t epoch, std::vector<std::string> meta_keys);
  // False when there was no room for it or it cannot be read any more.
  absl::StatusOr<bool> Reinsert(const RocksEpochs::Doomed& doomed, const Candidate& candidate);

  RocksDatabase& database_;
  RocksEpochs& epochs_;
  DiskIdLocks& locks_;
  RocksCounters& counters_;
  const Options options_;
  std::thread thread_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_EVICTOR_H_
