#include "storage/disk_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvmill {
namespace {

constexpr char kLockName[] = "kvmill.lock";

absl::Status ErrnoStatus(absl::string_view call, absl::string_view path, int error) {
  const std::string message =
      absl::StrCat(call, " ", path, ": ", std::generic_category().message(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::UnavailableError(message);
}

// Whether there is something in it and no lock of ours. A fresh file system's folder does not
// count.
bool HoldsOthersFiles(const std::string& directory) {
  std::error_code error;
  bool others = false;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == kLockName) return false;
    others = others || name != "lost+found";
  }
  return others;
}

std::string ReadPid(int fd) {
  char text[32] = {};
  const ssize_t bytes = pread(fd, text, sizeof(text) - 1, 0);
  if (bytes <= 0) return "?";
  return std::string(
      absl::StripAsciiWhitespace(absl::string_view(text, static_cast<std::size_t>(bytes))));
}

}  // namespace

absl::StatusOr<DiskDirectory> DiskDirectory::Lock(absl::string_view path) {
  std::string directory(path);
  if (directory.empty()) return absl::InvalidArgumentError("spill directory: empty path");
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus("mkdir", directory, errno);
  }
  struct stat info {};
  if (stat(directory.c_str(), &info) != 0) return ErrnoStatus("stat", directory, errno);
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("spill directory ", directory, " is not a directory"));
  }
  if (info.st_uid != geteuid()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "spill directory %s belongs to uid %d, want %d", directory, info.st_uid, geteuid()));
  }
  if ((info.st_mode & 07777) != 0700) {
    // Prompt data lies here, and nothing else: a mistyped path must not close /tmp to everybody.
    if (HoldsOthersFiles(directory)) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "spill directory %s has mode %04o and files that are not kvmill's: name a directory of "
          "its own",
          directory, info.st_mode & 07777));
    }
    if (chmod(directory.c_str(), 0700) != 0) return ErrnoStatus("chmod 0700", directory, errno);
  }

  // A lock file of our own, taken before RocksDB opens anything: RocksDB renames the running
  // owner's log before it looks at its LOCK file.
  const std::string lock_path = absl::StrCat(directory, "/", kLockName);
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return ErrnoStatus("open", lock_path, errno);
  DiskDirectory locked(std::move(directory), fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error != EWOULDBLOCK) return ErrnoStatus("flock", lock_path, error);
    return absl::FailedPreconditionError(
        absl::StrFormat("spill directory %s is in use by process %s", locked.path_, ReadPid(fd)));
  }
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) != 0) return ErrnoStatus("ftruncate", lock_path, errno);
  if (pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return ErrnoStatus("write", lock_path, errno);
  }
  return locked;
}

DiskDirectory::DiskDirectory(DiskDirectory&& other) noexcept
    : path_(std::move(other.path_)), lock_fd_(std::exchange(other.lock_fd_, -1)) {}

DiskDirectory::~DiskDirectory() {
  if (lock_fd_ >= 0) close(lock_fd_);
}

std::uint64_t DiskDirectory::UsedBytes() const {
  std::uint64_t bytes = 0;
  std::error_code error;
  // Files come and go while we walk: one that vanished counts 0.
  for (auto it = std::filesystem::recursive_directory_iterator(path_, error);
       !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
    struct stat info {};
    if (lstat(it->path().c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
      bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
    }
  }
  return bytes;
}

std::uint64_t DiskDirectory::AvailableBytes() const {
  struct statvfs info {};
  if (statvfs(path_.c_str(), &info) != 0) return 0;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

bool DiskDirectory::SupportsDirectIo() const {
  const std::string probe = absl::StrCat(path_, "/direct-io-probe");
  const int fd = open(probe.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
  unlink(probe.c_str());
  if (fd < 0) return false;
  close(fd);
  return true;
}

}  // namespace kvmill
