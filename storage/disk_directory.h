// A spill directory that belongs to one process at a time.
#ifndef KVMILL_STORAGE_DISK_DIRECTORY_H_
#define KVMILL_STORAGE_DISK_DIRECTORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmill {

// Holds an exclusive lock on the directory while it lives; the kernel releases it when the process
// dies, however it dies. Movable. Const functions are thread-safe.
class DiskDirectory {
 public:
  // Creates the directory (parents must exist) or adopts one that this user owns, and sets its mode
  // to 0700: KV blocks are prompt data. FAILED_PRECONDITION when another process holds it (the
  // message names its pid) or another user owns it; UNAVAILABLE when the file system refuses;
  // RESOURCE_EXHAUSTED when it is full.
  static absl::StatusOr<DiskDirectory> Lock(absl::string_view path);

  DiskDirectory(DiskDirectory&& other) noexcept;
  DiskDirectory& operator=(DiskDirectory&&) = delete;
  ~DiskDirectory();

  const std::string& path() const { return path_; }

  // What all files below it occupy, as the file system counts it. Walks the directory.
  std::uint64_t UsedBytes() const;
  // What this user may still write; 0 when the file system does not say.
  std::uint64_t AvailableBytes() const;
  // Whether files in it can be opened with O_DIRECT.
  bool SupportsDirectIo() const;

 private:
  DiskDirectory(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}

  std::string path_;
  int lock_fd_;  // -1 after a move.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DISK_DIRECTORY_H_
