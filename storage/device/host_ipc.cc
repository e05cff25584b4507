#include "storage/device/host_ipc.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/device/host_memory.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kMagic = 0x3143504954534F48;  // "HOSTIPC1" in memory.

constexpr const char* kMemfdPrefix = "/memfd:";

struct HostHandle {
  std::uint64_t magic = kMagic;
  std::int64_t pid = 0;
  std::int64_t fd = 0;
  std::uint64_t inode = 0;  // Another file may have got the number since.
  std::uint64_t zeros[4] = {};
};
static_assert(sizeof(HostHandle) == sizeof(IpcHandle));

}  // namespace

absl::StatusOr<IpcMemory> ExportHostIpc(const KnownMemory::View& known, const void* start,
                                        std::size_t bytes) {
  const KnownMemory::Range* range = known.FindAnyOf(start, bytes);
  const auto begin = reinterpret_cast<std::uintptr_t>(start);
  struct stat file {};
  if (bytes == 0 || range == nullptr || range->use != MemoryUse::kAllocated ||
      begin < range->begin || bytes > range->end - begin || fstat(range->fd, &file) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "host: %d bytes at %p are not within memory that this device allocated", bytes, start));
  }
  HostHandle handle;
  handle.pid = getpid();
  handle.fd = range->fd;
  handle.inode = file.st_ino;
  IpcMemory memory;
  std::memcpy(memory.handle.data(), &handle, sizeof(handle));
  memory.allocation_bytes = range->end - range->begin;
  memory.offset_bytes = begin - range->begin;
  return memory;
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenHostIpc(const IpcHandle& bytes,
                                                          std::size_t allocation_bytes, pid_t owner,
                                                          KnownMemory* known) {
  HostHandle handle;
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  if (handle.magic != kMagic) {
    return absl::InvalidArgumentError("host: the handle is not one of host memory");
  }
  if (owner != 0 && handle.pid != owner) {
    return absl::PermissionDeniedError(absl::StrCat("host: the handle is of memory of process ",
                                                    handle.pid, ", it came from process ", owner));
  }
  if (handle.pid == getpid()) {
    return absl::FailedPreconditionError(
        "host: the handle is of memory of this process, which needs no opening");
  }
  const std::string path = absl::StrCat("/proc/", handle.pid, "/fd/", handle.fd);
  // Whatever the other process has under that number: opening it must not wait for anybody.
  char name[16] = {};
  if (readlink(path.c_str(), name, sizeof(name) - 1) > 0 &&
      std::strncmp(name, kMemfdPrefix, std::strlen(kMemfdPrefix)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("host: memory of process ", handle.pid, ": ", path, " is no memfd"));
  }
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) {
    return absl::InvalidArgumentError(absl::StrCat("host: memory of process ", handle.pid, ": ",
                                                   path, ": ", std::strerror(errno)));
  }
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat file {};
  if (fstat(fd, &file) != 0 || file.st_ino != handle.inode) {
    return absl::InvalidArgumentError(
        absl::StrCat("host: memory of process ", handle.pid, ": it is not there any more"));
  }
  return HostMemory::Import(fd, allocation_bytes, known, MemoryUse::kForeign);
}

}  // namespace kvmill
