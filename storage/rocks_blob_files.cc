#include "storage/rocks_blob_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/rocks_io_status.h"

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

static_assert(kFileHeaderBytes % kIoAlignment == 0 && kIoAlignment % kCipherUnitBytes == 0,
              "what direct I/O reads are whole units");

constexpr std::size_t kWriteBytes = std::size_t{4} << 20;  // Per request.
// Two pages closer than this are read together: what lies between costs less than a request.
constexpr std::uint64_t kGapBytesMax = 32 * 1024;

constexpr std::uint64_t RoundDown(std::uint64_t value) {
  return value / kIoAlignment * kIoAlignment;
}
constexpr std::uint64_t RoundUp(std::uint64_t value) { return RoundDown(value + kIoAlignment - 1); }

int Open(const std::string& path, int flags, bool direct_io) {
  int fd = -1;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC | (direct_io ? O_DIRECT : 0), 0600);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// A limit cuts a direct write that reaches beyond it to a length that direct writes do not have.
int ReasonOf(int error, std::uint64_t end) {
  rlimit limit{};
  if (error != EINVAL || getrlimit(RLIMIT_FSIZE, &limit) != 0) return error;
  return end > limit.rlim_cur ? EFBIG : error;
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
//
// With a cipher the file begins with its header, and whole units are encrypted as they come, into
// the buffer instead of a copy. The last, partial one stays as it is in the buffer; WriteTail
// encrypts it for the file. Padding is not encrypted: it would be what encrypts nothing but zeros.
class BlobWriter : public FSWritableFile {
 public:
  BlobWriter(std::string path, int fd, IoBuffers& buffers, IoBuffers::Buffer buffer,
             const FileOptions& options, const FileCipher* cipher)
      : FSWritableFile(options),
        path_(std::move(path)),
        fd_(fd),
        buffers_(buffers),
        buffer_(std::move(buffer)) {
    if (cipher == nullptr) return;
    cipher_ = std::make_unique<UnitCipher>(*cipher, UnitCipher::Direction::kEncrypt);
    cipher->WriteHeader(buffer_.data());
    header_bytes_ = buffered_bytes_ = kFileHeaderBytes;
  }
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
      Take(from, bytes);
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
      status = ErrnoIoStatus("close", path_, errno);
    }
    return status;
  }

  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

  IOStatus Sync(const IOOptions&, IODebugContext*) override {
    IOStatus status = WriteTail();
    if (status.ok() && fdatasync(fd_) != 0) status = ErrnoIoStatus("fdatasync", path_, errno);
    return status;
  }

  // Only ever called with the current size.
  IOStatus Truncate(std::uint64_t, const IOOptions&, IODebugContext*) override {
    return IOStatus::OK();
  }

  std::uint64_t GetFileSize(const IOOptions&, IODebugContext*) override {
    return written_bytes_ + buffered_bytes_ - header_bytes_;
  }

 private:
  std::uint64_t UnitAt(std::size_t in_buffer) const {
    return (written_bytes_ + in_buffer) / kCipherUnitBytes;
  }

  // Into the buffer, which has room.
  void Take(const char* from, std::size_t bytes) {
    if (cipher_ == nullptr) {
      std::memcpy(buffer_.data() + buffered_bytes_, from, bytes);
      buffered_bytes_ += bytes;
      return;
    }
    while (bytes > 0) {
      char* const to = buffer_.data() + buffered_bytes_;
      const std::size_t in_unit = buffered_bytes_ % kCipherUnitBytes;
      std::size_t step = 0;
      if (in_unit == 0 && bytes >= kCipherUnitBytes) {
        step = bytes / kCipherUnitBytes * kCipherUnitBytes;
        cipher_->Run(UnitAt(buffered_bytes_), from, step, to);
      } else {
        step = std::min(bytes, kCipherUnitBytes - in_unit);
        std::memcpy(to, from, step);
        if (in_unit + step == kCipherUnitBytes) {
          cipher_->Run(UnitAt(buffered_bytes_), to - in_unit, kCipherUnitBytes, to - in_unit);
        }
      }
      buffered_bytes_ += step;
      from += step;
      bytes -= step;
    }
  }

  IOStatus Write(const char* data, std::size_t bytes, std::uint64_t offset) const {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t wrote =
          pwrite(fd_, data + done, bytes - done, static_cast<off_t>(offset + done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return ErrnoIoStatus("write", path_, ReasonOf(errno, offset + bytes));
      // A disk that fills up writes what still fits; the next call says why. Direct I/O goes on
      // only from whole blocks.
      const auto step = RoundDown(static_cast<std::uint64_t>(wrote));
      if (step == 0) return ErrnoIoStatus("write", path_, ENOSPC);
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
    const std::size_t partial = cipher_ == nullptr ? 0 : buffered_bytes_ % kCipherUnitBytes;
    char* const unit = buffer_.data() + buffered_bytes_ - partial;
    std::array<char, kCipherUnitBytes> plain;  // More may be appended to it.
    std::memcpy(plain.data(), unit, partial);
    if (partial > 0) cipher_->Run(UnitAt(buffered_bytes_ - partial), unit, partial, unit);
    status = Write(buffer_.data(), padded, written_bytes_);
    std::memcpy(unit, plain.data(), partial);
    if (!status.ok()) return status;
    if (padded != buffered_bytes_ &&
        ftruncate(fd_, static_cast<off_t>(written_bytes_ + buffered_bytes_)) != 0) {
      return ErrnoIoStatus("ftruncate", path_, errno);
    }
    tail_bytes_ = buffered_bytes_;
    return IOStatus::OK();
  }

  const std::string path_;
  int fd_;
  IoBuffers& buffers_;
  std::unique_ptr<UnitCipher> cipher_;  // Null: not encrypted.
  std::size_t header_bytes_ = 0;
  IoBuffers::Buffer buffer_;         // Being filled.
  IoBuffers::Buffer other_;          // Being written, or empty.
  std::uint64_t written_bytes_ = 0;  // In the file or on the way, a multiple of kWriteBytes.
  std::size_t buffered_bytes_ = 0;   // In the buffer, behind written_bytes_.
  std::size_t tail_bytes_ = 0;       // Of these, in the file already.
  BackgroundWrite write_;            // Last: it uses the others until it is gone.
};

// With a cipher what is read is decrypted on its way to who asked, instead of copied.
class BlobReader : public FSRandomAccessFile {
 public:
  BlobReader(std::string path, int fd, IoBuffers& buffers, std::optional<FileCipher> cipher,
             std::uint64_t file_bytes)
      : path_(std::move(path)),
        fd_(fd),
        buffers_(buffers),
        cipher_(std::move(cipher)),
        header_bytes_(cipher_.has_value() ? kFileHeaderBytes : 0),
        file_bytes_(file_bytes) {}
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
    // A header, a multiple of the alignment, would move both ends.
    return next.offset <= last.offset + last.len + kGapBytesMax &&
           RoundUp(next.offset + next.len) - RoundDown(run.front()->offset) <= kIoBufferBytes;
  }

  // In the file, which may have a header.
  std::uint64_t Begin(const FSReadRequest& request) const { return header_bytes_ + request.offset; }

  // One aligned read over all of them when it fits the buffer, else (a single large one) piece by
  // piece. A result is shorter than asked only at the end of the file.
  void ReadRun(const std::vector<FSReadRequest*>& run) const {
    const IoBuffers::Buffer buffer = buffers_.Acquire();
    if (buffer.empty()) {
      for (FSReadRequest* request : run) request->status = ErrnoIoStatus("read", path_, ENOMEM);
      return;
    }
    for (FSReadRequest* request : run) request->result = Slice(request->scratch, 0);
    std::optional<UnitCipher> cipher;
    if (cipher_.has_value()) cipher.emplace(*cipher_, UnitCipher::Direction::kDecrypt);
    std::uint64_t at = RoundDown(Begin(*run.front()));
    std::uint64_t end = 0;
    for (const FSReadRequest* request : run) end = std::max(end, Begin(*request) + request->len);
    while (at < end) {
      const std::size_t want = std::min<std::uint64_t>(RoundUp(end) - at, kIoBufferBytes);
      const ssize_t got = pread(fd_, buffer.data(), want, static_cast<off_t>(at));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        const IOStatus status = ErrnoIoStatus("read", path_, errno);
        for (FSReadRequest* request : run) request->status = status;
        return;
      }
      const absl::string_view bytes(buffer.data(), static_cast<std::size_t>(got));
      for (FSReadRequest* request : run) {
        if (cipher.has_value()) {
          DecryptOut(at, bytes, request, &*cipher);
        } else {
          CopyOut(at, bytes, request);
        }
      }
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

  // The same of an encrypted file. `at` is a multiple of the alignment; a unit that is not whole in
  // `bytes` comes with the next read, or is not there.
  void DecryptOut(std::uint64_t at, absl::string_view bytes, FSReadRequest* request,
                  UnitCipher* cipher) const {
    for (;;) {
      const std::size_t done = request->result.size();
      const std::size_t left = request->len - done;
      const std::uint64_t from = Begin(*request) + done;
      if (left == 0 || from < at || from >= at + bytes.size() || from >= file_bytes_) return;
      const std::uint64_t unit = from / kCipherUnitBytes;
      const std::uint64_t unit_begin = unit * kCipherUnitBytes;
      const std::size_t unit_bytes =
          std::min<std::uint64_t>(kCipherUnitBytes, file_bytes_ - unit_begin);
      if (unit_begin + unit_bytes > at + bytes.size()) return;
      const char* const in = bytes.data() + (unit_begin - at);
      char* const out = request->scratch + done;
      std::size_t step = 0;
      if (from == unit_begin && left >= kCipherUnitBytes && unit_bytes == kCipherUnitBytes) {
        // Only the file's last unit is short.
        step = std::min<std::uint64_t>({left, at + bytes.size() - from, file_bytes_ - from}) /
               kCipherUnitBytes * kCipherUnitBytes;
        cipher->Run(unit, in, step, out);
      } else {
        std::array<char, kCipherUnitBytes> plain;
        cipher->Run(unit, in, unit_bytes, plain.data());
        const std::size_t skipped = from - unit_begin;
        step = std::min(left, unit_bytes - skipped);
        std::memcpy(out, plain.data() + skipped, step);
      }
      request->result = Slice(request->scratch, done + step);
    }
  }

  const std::string path_;
  const int fd_;
  IoBuffers& buffers_;
  const std::optional<FileCipher> cipher_;
  const std::uint64_t header_bytes_;
  const std::uint64_t file_bytes_;  // With the header; of an encrypted file.
};

}  // namespace

IOStatus NewBlobWriter(const std::string& path, bool direct_io, const FileOptions& options,
                       const FileCipher* cipher, IoBuffers& buffers,
                       std::unique_ptr<FSWritableFile>* file) {
  IoBuffers::Buffer buffer = buffers.Acquire();
  if (buffer.empty()) return ErrnoIoStatus("open", path, ENOMEM);
  const int fd = Open(path, O_RDWR | O_CREAT | O_TRUNC, direct_io);
  if (fd < 0) return ErrnoIoStatus("open", path, errno);
  *file = std::make_unique<BlobWriter>(path, fd, buffers, std::move(buffer), options, cipher);
  return IOStatus::OK();
}

IOStatus NewBlobReader(const std::string& path, bool direct_io, const EncryptedFiles* files,
                       IoBuffers& buffers, std::unique_ptr<FSRandomAccessFile>* file) {
  const int fd = Open(path, O_RDONLY, direct_io);
  if (fd < 0) return ErrnoIoStatus("open", path, errno);
  std::optional<FileCipher> cipher;
  std::uint64_t file_bytes = 0;
  if (files != nullptr) {
    struct stat info {};
    if (fstat(fd, &info) != 0) {
      const int error = errno;
      close(fd);
      return ErrnoIoStatus("stat", path, error);
    }
    file_bytes = static_cast<std::uint64_t>(info.st_size);
    absl::StatusOr<FileCipher> opened = files->Open(path, CipherMode::kUnits);
    if (!opened.ok()) {
      close(fd);
      return ToIoStatus(opened.status());
    }
    cipher = *std::move(opened);
  }
  *file = std::make_unique<BlobReader>(path, fd, buffers, std::move(cipher), file_bytes);
  return IOStatus::OK();
}

}  // namespace kvmill
