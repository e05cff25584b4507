#include "storage/rocks_health.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/rocks_database.h"

namespace kvmill {

using rocksdb::BackgroundErrorReason;

void RocksHealth::OnBackgroundError(BackgroundErrorReason reason, rocksdb::Status* error) {
  const bool is_merge = reason == BackgroundErrorReason::kCompaction;
  const bool is_flush =
      reason == BackgroundErrorReason::kFlush || reason == BackgroundErrorReason::kFlushNoWAL;
  const bool is_io = error->IsIOError();
  const bool stops = !is_io || (!is_merge && !is_flush);
  const absl::Status status = ToStatus(*error, is_flush ? "flush" : "manifest");
  bool is_new = false;
  // A merge that failed keeps nobody from writing; RocksDB tries it again by itself.
  if (stops || is_flush) {
    MutexLock lock(mutex_);
    is_new = stops && manifest_ != Manifest::kStopped;
    failure_ = status;
    ++failures_;
    failed_ = begun_;
    if (stops) manifest_ = Manifest::kStopped;
    changed_.NotifyAll();
  }
  if (is_new) {
    LogWarning(absl::StrCat("disk tier: nothing is written until RocksDB resumed",
                            is_io ? "" : ", which needs a restart", ": ", status.message()));
  }
  if (!stops) {
    *error = rocksdb::Status::OK();
  } else if (is_io && error->severity() > rocksdb::Status::Severity::kHardError) {
    // Else it could not be resumed. The memtables are as they were, and the manifest is written
    // anew.
    *error = rocksdb::Status(*error, rocksdb::Status::Severity::kHardError);
  }
}

// Its own recovery polls for space every few seconds, and Resume() is refused meanwhile.
void RocksHealth::OnErrorRecoveryBegin(BackgroundErrorReason, rocksdb::Status,
                                       bool* auto_recovery) {
  *auto_recovery = false;
}

// Once for each column family of a flush. There is one flush at a time.
void RocksHealth::OnFlushBegin(rocksdb::DB*, const rocksdb::FlushJobInfo& info) {
  MutexLock lock(mutex_);
  if (info.job_id != job_) ++begun_;
  job_ = info.job_id;
}

void RocksHealth::OnFlushCompleted(rocksdb::DB*, const rocksdb::FlushJobInfo& info) {
  MutexLock lock(mutex_);
  durable_ = std::max(durable_, info.largest_seqno);
  ++flushes_;
  if (manifest_ == Manifest::kGood) failure_ = absl::OkStatus();
  changed_.NotifyAll();
}

void RocksHealth::SetDurable(rocksdb::SequenceNumber sequence) {
  MutexLock lock(mutex_);
  durable_ = std::max(durable_, sequence);
  changed_.NotifyAll();
}

bool RocksHealth::IsDurable(rocksdb::SequenceNumber sequence) const {
  MutexLock lock(mutex_);
  return durable_ >= sequence;
}

absl::Status RocksHealth::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

std::uint64_t RocksHealth::failures() const {
  MutexLock lock(mutex_);
  return failures_;
}

std::uint64_t RocksHealth::begun() const {
  MutexLock lock(mutex_);
  return begun_;
}

RocksHealth::Outcome RocksHealth::Wait(rocksdb::SequenceNumber sequence, std::uint64_t begun,
                                       std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(mutex_);
  while (durable_ < sequence) {
    if (!failure_.ok() && (failed_ > begun || manifest_ != Manifest::kGood)) {
      return Outcome::kFailed;
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return Outcome::kTimeout;
    changed_.WaitFor(mutex_, left);
  }
  return Outcome::kDurable;
}

std::uint64_t RocksHealth::ended() const {
  MutexLock lock(mutex_);
  return flushes_ + failures_;
}

void RocksHealth::WaitForEnd(std::uint64_t ended, std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(mutex_);
  while (flushes_ + failures_ <= ended) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return;
    changed_.WaitFor(mutex_, left);
  }
}

RocksHealth::Manifest RocksHealth::manifest() const {
  MutexLock lock(mutex_);
  return manifest_;
}

void RocksHealth::EditFailed(const absl::Status& status) {
  MutexLock lock(mutex_);
  failure_ = status;
  ++failures_;
  if (manifest_ == Manifest::kGood) manifest_ = Manifest::kEdit;
  changed_.NotifyAll();
}

void RocksHealth::Mended(std::uint64_t failures) {
  MutexLock lock(mutex_);
  if (failures_ != failures) return;
  failure_ = absl::OkStatus();
  manifest_ = Manifest::kGood;
  changed_.NotifyAll();
}

}  // namespace kvmill
