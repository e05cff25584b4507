#include "storage/rocks_append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <utility>

#include "storage/rocks_io_status.h"

namespace kvmill {
namespace {

using rocksdb::FileOptions;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

class AppendFile : public FSWritableFile {
 public:
  AppendFile(std::string path, int fd, const FileOptions& options, std::uint64_t reserve_bytes)
      : FSWritableFile(options), path_(std::move(path)), fd_(fd), reserve_bytes_(reserve_bytes) {
    Reserve();
  }
  ~AppendFile() override {
    if (fd_ >= 0) close(fd_);
  }

  using FSWritableFile::Append;
  IOStatus Append(const Slice& data, const IOOptions&, IODebugContext*) override {
    std::size_t done = 0;
    while (done < data.size()) {
      const ssize_t wrote =
          pwrite(fd_, data.data() + done, data.size() - done, static_cast<off_t>(bytes_ + done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return ErrnoIoStatus("append to", path_, errno);
      done += static_cast<std::size_t>(wrote);
    }
    bytes_ += done;
    Reserve();
    return IOStatus::OK();
  }

  // Only ever called with the current size.
  IOStatus Truncate(std::uint64_t size, const IOOptions&, IODebugContext*) override {
    if (ftruncate(fd_, static_cast<off_t>(size)) != 0) {
      return ErrnoIoStatus("truncate", path_, errno);
    }
    bytes_ = size;
    return IOStatus::OK();
  }

  IOStatus Close(const IOOptions&, IODebugContext*) override {
    // Gives back what was reserved; where it cannot, it goes with the file.
    if (reserved_bytes_ > bytes_ && ftruncate(fd_, static_cast<off_t>(bytes_)) == 0) {
      reserved_bytes_ = bytes_;
    }
    if (close(std::exchange(fd_, -1)) != 0) return ErrnoIoStatus("close", path_, errno);
    return IOStatus::OK();
  }

  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }
  IOStatus Sync(const IOOptions&, IODebugContext*) override {
    if (fdatasync(fd_) != 0) return ErrnoIoStatus("fdatasync", path_, errno);
    return IOStatus::OK();
  }
  IOStatus Fsync(const IOOptions&, IODebugContext*) override {
    if (fsync(fd_) != 0) return ErrnoIoStatus("fsync", path_, errno);
    return IOStatus::OK();
  }
  bool IsSyncThreadSafe() const override { return true; }

  std::uint64_t GetFileSize(const IOOptions&, IODebugContext*) override { return bytes_; }

 private:
  // Best effort: where it fails the append itself says what is wrong.
  void Reserve() {
    if (reserve_bytes_ == 0 || bytes_ + reserve_bytes_ / 2 < reserved_bytes_) return;
    const std::uint64_t wanted = bytes_ + reserve_bytes_;
    if (fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(wanted)) == 0) {
      reserved_bytes_ = wanted;
    }
  }

  const std::string path_;
  int fd_;
  const std::uint64_t reserve_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t reserved_bytes_ = 0;  // Of the disk, from the file's begin.
};

}  // namespace

IOStatus NewAppendFile(const std::string& path, const FileOptions& options,
                       std::uint64_t reserve_bytes, std::unique_ptr<FSWritableFile>* file) {
  int fd = -1;
  do {
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoIoStatus("open", path, errno);
  *file = std::make_unique<AppendFile>(path, fd, options, reserve_bytes);
  return IOStatus::OK();
}

}  // namespace kvmill
