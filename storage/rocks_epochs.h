// The epochs of the disk tier: how full each is, what was read of it, which one is written, and
// when the oldest has to go.
//
// Invariant: the files of all sealed epochs, plus one epoch for the newest, plus what is not pages
// (`other_bytes`) fit the cap before a new epoch begins. So files never exceed cap + one epoch: the
// newest fills while the epoch that its beginning pushed over the cap is being dropped.
//
// Thread-safe; calls `begin` and `other_bytes` without a lock.
#ifndef KVMILL_STORAGE_ROCKS_EPOCHS_H_
#define KVMILL_STORAGE_ROCKS_EPOCHS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/core/mutex.h"
#include "storage/rocks_database.h"

namespace kvmill {

class RocksEpochs {
 public:
  struct Options {
    std::uint64_t capacity_bytes = 0;
    std::uint64_t epoch_bytes = 0;
    std::uint64_t reinsert_bytes = 0;  // In each, for what is carried over.
    std::uint32_t reinsert_window_epochs = 0;
    std::uint32_t wait_ms = 0;
    std::function<absl::StatusOr<ColumnFamily>(std::uint64_t epoch)> begin;
    std::function<std::uint64_t()> other_bytes;  // Of files that are no epoch's.
  };

  // Room for one block. `family` is where its pages go.
  struct Place {
    std::uint64_t epoch = 0;
    std::uint64_t block_number = 0;
    std::uint64_t bytes = 0;
    ColumnFamily family;
  };

  // An epoch that has to be dropped.
  struct Doomed {
    std::uint64_t epoch = 0;
    ColumnFamily family;
  };

  explicit RocksEpochs(Options options);

  // What `meta` knows of an epoch.
  struct Census {
    std::uint64_t block_count = 0;
    std::uint64_t first_block_number = 0;
    std::uint64_t last_block_number = 0;

    void Add(std::uint64_t block_number);
  };

  // Only while opening, in ascending order: an epoch that was there.
  void AddEpoch(std::uint64_t epoch, ColumnFamily family, std::uint64_t file_bytes,
                const Census& census);
  // Ends opening: begins the first epoch when there is none.
  absl::Status Start();

  // Reserves room in the newest epoch, beginning a new one when it is full. A Place must be given
  // to Complete(). RESOURCE_EXHAUSTED when the oldest epoch was not dropped within wait_ms, and for
  // a reinsertion as soon as the newest epoch has no room for it or reinsert_bytes came to it so.
  absl::StatusOr<Place> Acquire(std::uint64_t bytes, bool reinsert);
  // `written`: the block is there. Otherwise its room is free again.
  void Complete(const Place& place, bool written);

  // Null when the epoch is gone.
  ColumnFamily Family(std::uint64_t epoch) const;
  std::vector<ColumnFamily> Families() const;
  absl::flat_hash_set<std::uint64_t> Numbers() const;

  // A block was read, or removed.
  void Touch(std::uint64_t epoch, std::uint64_t block_number);
  void Removed(std::uint64_t epoch);

  // How many epochs have begun since the block was last read; empty when never or longer ago than
  // the window.
  std::optional<std::uint32_t> EpochsSinceRead(std::uint64_t epoch,
                                               std::uint64_t block_number) const;

  // Waits until an epoch has to be dropped and nobody writes to it any more: a sealed one without
  // blocks, or the oldest when the cap asks for it. Empty after Stop().
  std::optional<Doomed> WaitForDoomed();
  void Dropped(std::uint64_t epoch);
  // Waits for Stop(), at most so long.
  void Pause(std::uint32_t milliseconds);
  bool stopped() const;
  // Waiting calls return; further Acquire() answer UNAVAILABLE.
  void Stop();

 private:
  struct Epoch {
    ColumnFamily family;
    std::uint64_t bytes = 0;
    std::uint64_t block_count = 0;
    std::uint32_t writers = 0;
    // [block number - first_block_number]: 0 never read, else 1 + epochs begun after this one when
    // it was last read, at most 255.
    std::uint64_t first_block_number = 0;
    std::vector<std::uint8_t> last_read{};
  };

  bool MustDropLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::map<std::uint64_t, Epoch>::iterator DoomedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status BeginEpoch(std::uint64_t epoch);

  const Options options_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::map<std::uint64_t, Epoch> epochs_ ABSL_GUARDED_BY(mutex_);  // The last one is the newest.
  std::uint64_t next_block_number_ ABSL_GUARDED_BY(mutex_) = 1;
  std::uint64_t sealed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // Of all but the newest.
  std::uint64_t other_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t reinsert_left_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool beginning_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_EPOCHS_H_
