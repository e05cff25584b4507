#include "storage/device/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/check.h"
#include "storage/core/memory_limit.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kNameMax = 200;  // memfd_create takes 249 bytes.
constexpr int kSeals = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status NoMemory(absl::string_view what, std::size_t bytes, int error) {
  return absl::ResourceExhaustedError(absl::StrCat("host: ", what, " of ", bytes,
                                                   " bytes: ", std::strerror(error), "; ",
                                                   MemoryLimitBytes(), " bytes are available"));
}

}  // namespace

absl::StatusOr<std::size_t> RoundUpDeviceMemory(std::size_t bytes) {
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 2) {
    return absl::InvalidArgumentError(absl::StrCat("device memory of ", bytes, " bytes"));
  }
  return (bytes + kDeviceMemoryStep - 1) / kDeviceMemoryStep * kDeviceMemoryStep;
}

// Asking for asynchronous write-back changes nothing.
bool IsMapped(absl::Span<const std::byte> memory) {
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t first_page = begin / page_bytes * page_bytes;
  return msync(reinterpret_cast<void*>(first_page), begin - first_page + memory.size(), MS_ASYNC) ==
         0;
}

absl::Status CheckMapped(absl::string_view device, absl::Span<const std::byte> memory) {
  if (!memory.empty() && IsMapped(memory)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: cannot pin %d bytes at %p: nothing is mapped there", device,
                      memory.size(), memory.data()));
}

absl::StatusOr<std::unique_ptr<HostMemory>> HostMemory::Allocate(std::size_t bytes,
                                                                 absl::string_view name,
                                                                 KnownMemory* known) {
  KVMILL_ASSIGN_OR_RETURN(const std::size_t rounded, RoundUpDeviceMemory(bytes));
  // Asked first: memory that is promised but not there ends in the out-of-memory killer.
  const std::uint64_t limit_bytes = MemoryLimitBytes();
  if (rounded > limit_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("host: ", rounded, " bytes for ", name,
                                                     ": only ", limit_bytes,
                                                     " bytes are available to this process"));
  }
  std::unique_ptr<HostMemory> memory(new HostMemory(rounded, known, MemoryUse::kAllocated));
  KVMILL_RETURN_IF_ERROR(memory->Create(name));
  return memory;
}

absl::Status HostMemory::Create(absl::string_view name) {
  const std::string file_name = absl::StrCat("kvmill-", name.substr(0, kNameMax));
  fd_ = memfd_create(file_name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) return NoMemory("memfd_create", bytes_, errno);
  if (ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) return NoMemory("ftruncate", bytes_, errno);
  KVMILL_RETURN_IF_ERROR(Map(fd_, PROT_READ | PROT_WRITE));
  KVMILL_RETURN_IF_ERROR(Populate());
  return Seal();
}

absl::StatusOr<std::unique_ptr<HostMemory>> HostMemory::Import(int fd, std::size_t bytes,
                                                               KnownMemory* known, MemoryUse use) {
  KVMILL_ASSIGN_OR_RETURN(const std::size_t rounded, RoundUpDeviceMemory(bytes));
  struct stat file;
  if (fstat(fd, &file) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("host: file descriptor ", fd, ": ", std::strerror(errno)));
  }
  if (file.st_size < 0 || static_cast<std::size_t>(file.st_size) != rounded) {
    return absl::InvalidArgumentError(absl::StrCat("host: file descriptor ", fd, " has ",
                                                   file.st_size, " bytes, want ", rounded));
  }
  // What can still shrink would raise SIGBUS in whoever reads it.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return absl::InvalidArgumentError(
        absl::StrCat("host: file descriptor ", fd, " is no sealed memory of a device"));
  }
  std::unique_ptr<HostMemory> memory(new HostMemory(rounded, known, use));
  KVMILL_RETURN_IF_ERROR(memory->Map(fd, PROT_READ));
  return memory;
}

HostMemory::~HostMemory() {
  if (is_known_) KVMILL_CHECK(known_->Remove(address_, bytes_, use_));
  if (reserved_ != nullptr) munmap(reserved_, bytes_ + kDeviceMemoryStep);
  if (fd_ >= 0) close(fd_);
}

absl::Status HostMemory::Reserve() {
  void* reserved = mmap(nullptr, bytes_ + kDeviceMemoryStep, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return NoMemory("address range", bytes_, errno);
  reserved_ = reserved;
  const auto start = reinterpret_cast<std::uintptr_t>(reserved);
  address_ = static_cast<std::byte*>(reserved) +
             (kDeviceMemoryStep - start % kDeviceMemoryStep) % kDeviceMemoryStep;
  return absl::OkStatus();
}

absl::Status HostMemory::Map(int fd, int protection) {
  KVMILL_RETURN_IF_ERROR(Reserve());
  if (mmap(address_, bytes_, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return NoMemory("mmap", bytes_, errno);
  }
  // Hints; without them everything works, slower. Prompt data has no place in a core file.
  madvise(address_, bytes_, MADV_HUGEPAGE);
  madvise(address_, bytes_, MADV_DONTDUMP);
  KVMILL_RETURN_IF_ERROR(known_->Add(address_, bytes_, use_, fd_));
  is_known_ = true;
  return absl::OkStatus();
}

absl::Status HostMemory::Populate() const {
  int result = 0;
  do {
    result = madvise(address_, bytes_, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  // Before Linux 5.14.
  if (errno == EINVAL) {
    if (fallocate(fd_, 0, 0, static_cast<off_t>(bytes_)) == 0) return absl::OkStatus();
  }
  return NoMemory("memory", bytes_, errno);
}

absl::Status HostMemory::Seal() const {
  // After our own mapping, which stays writable. From here on it can be shared.
  if (fcntl(fd_, F_ADD_SEALS, kSeals | F_SEAL_SEAL) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("host: cannot seal shared memory (Linux 5.1 or later): ", std::strerror(errno)));
}

}  // namespace kvmill
