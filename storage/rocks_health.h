// What RocksDB says about its background work, and what it makes of errors there. Private to
// storage/rocks_*.cc.
//
// RocksDB 7.8 has states for errors, stops, and is resumed by a flush that must not fail again: one
// that does may leave memtables that are never flushed, and who waits for them waits for ever
// (docs/decisions/0058-a-disk-that-fails-while-it-resumes.md). So it does not hear of a flush or a
// merge that failed: what was to be written stays in memory, and the next flush that somebody asks
// for tries it again. Only when its list of files, the manifest, could not be written does it stop,
// because it would otherwise build on what is not there.
#ifndef KVMILL_STORAGE_ROCKS_HEALTH_H_
#define KVMILL_STORAGE_ROCKS_HEALTH_H_

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "rocksdb/listener.h"
#include "rocksdb/types.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. Shared with RocksDB, which notifies it without any lock held.
class RocksHealth : public rocksdb::EventListener {
 public:
  // kEdit: a change of column families failed; the next flush would be lost in RocksDB. kStopped:
  // RocksDB writes nothing until it is resumed.
  enum class Manifest { kGood, kEdit, kStopped };
  enum class Outcome { kDurable, kFailed, kTimeout };

  void OnBackgroundError(rocksdb::BackgroundErrorReason reason, rocksdb::Status* error) override;
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status,
                            bool* auto_recovery) override;
  void OnFlushBegin(rocksdb::DB*, const rocksdb::FlushJobInfo& info) override;
  void OnFlushCompleted(rocksdb::DB*, const rocksdb::FlushJobInfo& info) override;

  // All column families are flushed at one point of the sequence: what any of them has in files,
  // all have.
  void SetDurable(rocksdb::SequenceNumber sequence);
  bool IsDurable(rocksdb::SequenceNumber sequence) const;

  // Why the last flush failed; OK once one did not.
  absl::Status failure() const;
  // Flushes that failed, and writes of the manifest.
  std::uint64_t failures() const;

  // Flushes that began.
  std::uint64_t begun() const;
  // Until everything up to `sequence` is durable, or a flush failed that began after `begun`
  // others, or RocksDB stopped, or the time is up. What began earlier may have met a disk that was
  // still full.
  Outcome Wait(rocksdb::SequenceNumber sequence, std::uint64_t begun,
               std::chrono::nanoseconds timeout);
  // Flushes that ended, either way.
  std::uint64_t ended() const;
  // Until more than `ended` have, or the time is up.
  void WaitForEnd(std::uint64_t ended, std::chrono::nanoseconds timeout);

  Manifest manifest() const;
  void EditFailed(const absl::Status& status);
  // Unless something failed since failures() was `failures`.
  void Mended(std::uint64_t failures);

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  rocksdb::SequenceNumber durable_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t failures_ ABSL_GUARDED_BY(mutex_) = 0;
  int job_ ABSL_GUARDED_BY(mutex_) = 0;  // RocksDB's number of the last flush that began.
  std::uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t failed_ ABSL_GUARDED_BY(mutex_) = 0;  // begun_ when the last one failed.
  std::uint64_t flushes_ ABSL_GUARDED_BY(mutex_) = 0;
  Manifest manifest_ ABSL_GUARDED_BY(mutex_) = Manifest::kGood;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_HEALTH_H_
