#include "storage/rocks_file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/io_buffers.h"

namespace kvmill {
namespace {

using rocksdb::FileOptions;
using rocksdb::FSRandomAccessFile;
using rocksdb::FSReadRequest;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

constexpr std::size_t kBuffersKept = 8;
constexpr std::size_t kWriteBytes = std::size_t{4} << 20;  // Per request.
// Two pages closer than this are read together: what lies between costs less than a request.
constexpr std::uint64_t kGapBytesMax = 32 * 1024;

constexpr std::uint64_t RoundDown(std::uint64_t value) {
  return value / kIoAlignment * kIoAlignment;
}
constexpr std::uint64_t RoundUp(std::uint64_t value) { return RoundDown(value + kIoAlignment - 1); }

IOStatus ErrnoStatus(absl::string_view call, const std::string& path, int error) {
  const std::string message =
      absl::StrCat(call, " ", path, ": ", std::generic_category().message(error));
  // Retryable errors leave the memtables in place and are tried again.
  IOStatus status =
      error == ENOSPC || error == EDQUOT || error == EFBIG
          ? IOStatus::NoSpace(message)
          : (error == ENOENT ? IOStatus::PathNotFound(message) : IOStatus::IOError(message));
  if (error != ENOENT) status.SetRetryable(true);
  return status;
}

int Open(const std::string& path, int flags, bool direct_io) {
  int fd = -1;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC | (direct_io ? O_DIRECT : 0), 0600);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Writes pieces on a thread of its own, which the first one starts, one at a time. One thread uses
// it; a piece's memory belongs to it from Start() until Wait() returned.
class BackgroundWrite {
 public:
  ~BackgroundWrite() {
    if (!thread_.joinable()) return;
    {
      MutexLock lock(mu_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }

  // Only after Wait().
  void Start(std::function<IOStatus()> piece) {
    MutexLock lock(mu_);
    KVMILL_CHECK(piece_ == nullptr);
    piece_ = std::move(piece);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { Run(); });
    }
    changed_.NotifyAll();
  }

  // The result of the last piece, when it is written.
  IOStatus Wait() {
    MutexLock lock(mu_);
    while (piece_ != nullptr) changed_.Wait(mu_);
    return status_;
  }

 private:
  void Run() {
    MutexLock lock(mu_);
    for (;;) {
      while (piece_ == nullptr && !stopping_) changed_.Wait(mu_);
      if (piece_ == nullptr) return;
      const std::function<IOStatus()> piece = piece_;  // The original says that it is not done.
      mu_.Unlock();
      IOStatus status = piece();
      mu_.Lock();
      status_ = std::move(status);
      piece_ = nullptr;
      changed_.NotifyAll();
    }
  }

  Mutex mu_;
  CondVar changed_;
  std::function<IOStatus()> piece_ ABSL_GUARDED_BY(mu_);  // Being written; null: none.
  IOStatus status_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Collects what is appended and writes it in aligned pieces; one is filled, and checksummed by
// RocksDB, while the one before is written. A piece's error is returned by the next call, and by
// all after it: at the latest by Sync, before which nothing counts as durable. The last piece is
// padded, and the file cut to its length, by Sync and Close; what is appended later rewrites it.
class BlobWriter : public FSWritableFile {
 public:
  BlobWriter(std::string path, int fd, IoBuffers& buffers, IoBuffers::Buffer buffer,
             const FileOptions& options)
      : FSWritableFile(options),
        path_(std::move(path)),
        fd_(fd),
        buffers_(buffers),
        buffer_(std::move(buffer)) {}
  ~BlobWriter() override {
    static_cast<void>(write_.Wait());
    if (fd_ >= 0) close(fd_);
  }

  using FSWritableFile::Append;
  IOStatus Append(const Slice& data, const IOOptions&, IODebugContext*) override {
    const char* from = data.data();
    std::size_t left = data.size();
    while (left > 0) {
      const std::size_t bytes = std::min(left, kWriteBytes - buffered_bytes_);
      std::memcpy(buffer_.data() + buffered_bytes_, from, bytes);
      buffered_bytes_ += bytes;
      from += bytes;
      left -= bytes;
      if (buffered_bytes_ == kWriteBytes) {
        IOStatus status = WritePiece();
        if (!status.ok()) return status;
      }
    }
    return IOStatus::OK();
  }

  IOStatus Close(const IOOptions&, IODebugContext*) override {
    IOStatus status = WriteTail();
    if (close(std::exchange(fd_, -1)) != 0 && status.ok()) {
      status = ErrnoStatus("close", path_, errno);
    }
    return status;
  }

  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

  IOStatus Sync(const IOOptions&, IODebugContext*) override {
    IOStatus status = WriteTail();
    if (status.ok() && fdatasync(fd_) != 0) status = ErrnoStatus("fdatasync", path_, errno);
    return status;
  }

  // Only ever called with the current size.
  IOStatus Truncate(std::uint64_t, const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();
  }

  std::uint64_t GetFileSize(const IOOptions&, IODebugContext*) override {
    return written_bytes_ + buffered_bytes_;
  }

 private:
  IOStatus Write(const char* data, std::size_t bytes, std::uint64_t offset) const {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t wrote =
          pwrite(fd_, data + done, bytes - done, static_cast<off_t>(offset + done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return ErrnoStatus("write", path_, errno);
      // A disk that fills up writes what still fits; the next call says why. Direct I/O goes on
      // only from whole blocks.
      const auto step = RoundDown(static_cast<std::uint64_t>(wrote));
      if (step == 0) return ErrnoStatus("write", path_, ENOSPC);
      done += step;
    }
    return IOStatus::OK();
  }

  // The full buffer goes to the background when the other one is written and can be filled.
  IOStatus WritePiece() {
    IOStatus status = write_.Wait();
    if (!status.ok()) return status;
    if (other_.empty()) other_ = buffers_.Acquire();
    if (other_.empty()) {  // Memory is short: one buffer has to do.
      status = Write(buffer_.data(), kWriteBytes, written_bytes_);
      if (!status.ok()) return status;
    } else {
      std::swap(buffer_, other_);
      write_.Start([this, data = other_.data(), offset = written_bytes_] {
        return Write(data, kWriteBytes, offset);
      });
    }
    written_bytes_ += kWriteBytes;
    buffered_bytes_ = tail_bytes_ = 0;
    return IOStatus::OK();
  }

  IOStatus WriteTail() {
    IOStatus status = write_.Wait();
    if (!status.ok() || buffered_bytes_ == tail_bytes_) return status;
    const std::size_t padded = RoundUp(buffered_bytes_);
    std::memset(buffer_.data() + buffered_bytes_, 0, padded - buffered_bytes_);
    status = Write(buffer_.data(), padded, written_bytes_);
    if (!status.ok()) return status;
    if (padded != buffered_bytes_ &&
        ftruncate(fd_, static_cast<off_t>(written_bytes_ + buffered_bytes_)) != 0) {
      return ErrnoStatus("ftruncate", path_, errno);
    }
    tail_bytes_ = buffered_bytes_;
    return IOStatus::OK();
  }

  const std::string path_;
  int fd_;
  IoBuffers& buffers_;
  IoBuffers::Buffer buffer_;         // Being filled.
  IoBuffers::Buffer other_;          // Being written, or empty.
  std::uint64_t written_bytes_ = 0;  // In the file or on the way, a multiple of kWriteBytes.
  std::size_t buffered_bytes_ = 0;   // In the buffer, behind written_bytes_.
  std::size_t tail_bytes_ = 0;       // Of these, in the file already.
  BackgroundWrite write_;            // Last: it uses the others until it is gone.
};

class BlobReader : public FSRandomAccessFile {
 public:
  BlobReader(std::string path, int fd, IoBuffers& buffers)
      : path_(std::move(path)), fd_(fd), buffers_(buffers) {}
  ~BlobReader() override { close(fd_); }

  IOStatus Read(std::uint64_t offset, std::size_t bytes, const IOOptions&, Slice* result,
                char* scratch, IODebugContext*) const override {
    FSReadRequest request;
    request.offset = offset;
    request.len = bytes;
    request.scratch = scratch;
    ReadRun({&request});
    *result = request.result;
    return request.status;
  }

  IOStatus MultiRead(FSReadRequest* requests, std::size_t count, const IOOptions&,
                     IODebugContext*) override {
    std::vector<FSReadRequest*> sorted;
    sorted.reserve(count);
    for (std::size_t i = 0; i < count; ++i) sorted.push_back(&requests[i]);
    std::sort(sorted.begin(), sorted.end(),
              [](const auto* a, const auto* b) { return a->offset < b->offset; });
    std::vector<FSReadRequest*> run;
    for (FSReadRequest* request : sorted) {
      if (!run.empty() && !Joins(run, *request)) {
        ReadRun(run);
        run.clear();
      }
      run.push_back(request);
    }
    if (!run.empty()) ReadRun(run);
    return IOStatus::OK();  // Each request has its own status.
  }

 private:
  static bool Joins(const std::vector<FSReadRequest*>& run, const FSReadRequest& next) {
    const FSReadRequest& last = *run.back();
    return next.offset <= last.offset + last.len + kGapBytesMax &&
           RoundUp(next.offset + next.len) - RoundDown(run.front()->offset) <= kIoBufferBytes;
  }

  // One aligned read over all of them when it fits the buffer, else (a single large one) piece by
  // piece. A result is shorter than asked only at the end of the file.
  void ReadRun(const std::vector<FSReadRequest*>& run) const {
    const IoBuffers::Buffer buffer = buffers_.Acquire();
    if (buffer.empty()) {
      for (FSReadRequest* request : run) request->status = ErrnoStatus("read", path_, ENOMEM);
      return;
    }
    for (FSReadRequest* request : run) request->result = Slice(request->scratch, 0);
    std::uint64_t at = RoundDown(run.front()->offset);
    std::uint64_t end = 0;
    for (const FSReadRequest* request : run) end = std::max(end, request->offset + request->len);
    while (at < end) {
      const std::size_t want = std::min<std::uint64_t>(RoundUp(end) - at, kIoBufferBytes);
      const ssize_t got = pread(fd_, buffer.data(), want, static_cast<off_t>(at));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        const IOStatus status = ErrnoStatus("read", path_, errno);
        for (FSReadRequest* request : run) request->status = status;
        return;
      }
      for (FSReadRequest* request : run)
        CopyOut(at, {buffer.data(), static_cast<std::size_t>(got)}, request);
      if (RoundDown(static_cast<std::uint64_t>(got)) == 0) return;  // The end of the file.
      at += RoundDown(static_cast<std::uint64_t>(got));
    }
  }

  // The part of `bytes`, which lie at `at` in the file, that continues the request's result.
  static void CopyOut(std::uint64_t at, absl::string_view bytes, FSReadRequest* request) {
    const std::size_t done = request->result.size();
    const std::uint64_t from = request->offset + done;
    if (done == request->len || from < at || from >= at + bytes.size()) return;
    const std::size_t count = std::min(request->len - done, at + bytes.size() - from);
    std::memcpy(request->scratch + done, bytes.data() + (from - at), count);
    request->result = Slice(request->scratch, done + count);
  }

  const std::string path_;
  const int fd_;
  IoBuffers& buffers_;
};

class RocksFileSystem : public rocksdb::FileSystemWrapper {
 public:
  explicit RocksFileSystem(bool direct_io)
      : FileSystemWrapper(rocksdb::FileSystem::Default()),
        direct_io_(direct_io),
        buffers_(kBuffersKept) {}

  const char* Name() const override { return "KvmillFileSystem"; }

  IOStatus NewWritableFile(const std::string& path, const FileOptions& options,
                           std::unique_ptr<FSWritableFile>* file, IODebugContext* dbg) override {
    if (!IsBlobFile(path)) return target()->NewWritableFile(path, options, file, dbg);
    IoBuffers::Buffer buffer = buffers_.Acquire();
    if (buffer.empty()) return ErrnoStatus("open", path, ENOMEM);
    const int fd = Open(path, O_RDWR | O_CREAT | O_TRUNC, direct_io_);
    if (fd < 0) return ErrnoStatus("open", path, errno);
    *file = std::make_unique<BlobWriter>(path, fd, buffers_, std::move(buffer), options);
    return IOStatus::OK();
  }

  IOStatus NewRandomAccessFile(const std::string& path, const FileOptions& options,
                               std::unique_ptr<FSRandomAccessFile>* file,
                               IODebugContext* dbg) override {
    if (!IsBlobFile(path)) return target()->NewRandomAccessFile(path, options, file, dbg);
    const int fd = Open(path, O_RDONLY, direct_io_);
    if (fd < 0) return ErrnoStatus("open", path, errno);
    *file = std::make_unique<BlobReader>(path, fd, buffers_);
    return IOStatus::OK();
  }

 private:
  static bool IsBlobFile(const std::string& path) { return absl::EndsWith(path, ".blob"); }

  const bool direct_io_;
  IoBuffers buffers_;
};

}  // namespace

std::shared_ptr<rocksdb::FileSystem> NewRocksFileSystem(bool direct_io) {
  return std::make_shared<RocksFileSystem>(direct_io);
}

}  // namespace kvmill
