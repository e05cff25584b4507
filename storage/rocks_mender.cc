#include "storage/rocks_mender.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "rocksdb/convenience.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/rocks_database.h"
#include "storage/rocks_io_status.h"

namespace kvmill {
namespace {

constexpr std::chrono::seconds kAskEvery(5);
constexpr std::uint64_t kFixedBytes = std::uint64_t{1} << 20;  // A manifest, and what tables add.

// Whether the disk takes so much in one file; nothing of it stays. A file system that has no files
// without names is not asked.
absl::Status Probe(const std::string& directory, std::uint64_t bytes) {
  const int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return absl::OkStatus();
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  close(fd);
  if (error == 0 || error == EOPNOTSUPP || error == EINVAL) return absl::OkStatus();
  return ToStatus(ErrnoIoStatus("reserve room in", directory, error), "flush");
}

}  // namespace

RocksMender::RocksMender(rocksdb::DB* db, rocksdb::ColumnFamilyHandle* meta, std::string directory,
                         std::shared_ptr<RocksHealth> health)
    : db_(db), meta_(meta), directory_(std::move(directory)), health_(std::move(health)) {}

absl::Status RocksMender::Mend(absl::FunctionRef<rocksdb::Status()> ask,
                               std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  if (!running_) {
    if (health_->manifest() == RocksHealth::Manifest::kGood) return absl::OkStatus();
    if (thread_.joinable()) thread_.join();  // It has ended but for its last instructions.
    running_ = true;
    thread_ = std::thread([this] {
      absl::Status result = MendNow();
      MutexLock ended(mutex_);
      result_ = std::move(result);
      running_ = false;
      ended_.NotifyAll();
    });
  }
  while (running_) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) {
      return absl::UnavailableError("flush: RocksDB is still being resumed");
    }
    if (ended_.WaitFor(mutex_, std::min<std::chrono::nanoseconds>(left, kAskEvery))) continue;
    mutex_.Unlock();
    ask().PermitUncheckedError();
    mutex_.Lock();
  }
  return result_;
}

absl::Status RocksMender::MendNow() {
  const std::uint64_t failures = health_->failures();
  if (health_->manifest() == RocksHealth::Manifest::kEdit) {
    // An option that stays as it is: the cheapest change of the manifest, and the first one after a
    // failure begins a new manifest.
    const std::string bytes = std::to_string(db_->GetOptions(meta_).write_buffer_size);
    KVMILL_RETURN_IF_ERROR(
        ToStatus(db_->SetOptions(meta_, {{"write_buffer_size", bytes}}), "manifest"));
  } else {
    // Not into a disk that is still full: a flush that fails while RocksDB resumes is what it copes
    // with worst.
    std::uint64_t bytes = 0;
    db_->GetAggregatedIntProperty(rocksdb::DB::Properties::kCurSizeAllMemTables, &bytes);
    KVMILL_RETURN_IF_ERROR(Probe(directory_, bytes + kFixedBytes));
    KVMILL_RETURN_IF_ERROR(ToStatus(db_->Resume(), "resume"));
  }
  health_->Mended(failures);
  LogInfo("disk tier: RocksDB's manifest is written again");
  return absl::OkStatus();
}

void RocksMender::Stop() {
  bool running = false;
  std::thread thread;
  {
    MutexLock lock(mutex_);
    running = running_;
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  // Ends the wait for a flush in Resume().
  if (running) rocksdb::CancelAllBackgroundWork(db_, /*wait=*/false);
  thread.join();
}

}  // namespace kvmill
