#include "storage/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvmill {
namespace {

absl::Status SystemError(absl::string_view what, std::size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of ", bytes, " bytes of shared memory failed: ", std::strerror(errno)));
}

}  // namespace

Arena::Arena(Arena&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      reserve_(other.reserve_) {}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) close(fd_);
}

absl::Status Arena::Open(std::size_t bytes, bool reserve) {
  bytes_ = bytes;
  reserve_ = reserve;
  return MapAt(nullptr);
}

absl::Status Arena::Renew() { return MapAt(base_); }

absl::Status Arena::MapAt(void* address) {
  const int fd = memfd_create("kvmill-pages", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return SystemError("memfd_create", bytes_);
  const auto fail = [&](absl::string_view what) {
    absl::Status status = SystemError(what, bytes_);
    close(fd);
    return status;
  };
  const off_t length = static_cast<off_t>(bytes_);
  if (ftruncate(fd, length) != 0) return fail("ftruncate");
  if (reserve_ && fallocate(fd, 0, 0, length) != 0) return fail("fallocate");
  const int flags = MAP_SHARED | (address != nullptr ? MAP_FIXED : 0);
  void* mapped = mmap(address, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (mapped == MAP_FAILED) return fail("mmap");
  // Our own writable mapping exists; from here on nobody, not even we, can make another.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) !=
      0) {
    if (address == nullptr) munmap(mapped, bytes_);
    return fail("sealing");
  }
  // A hint: shared memory gets huge pages only where the operator allowed it
  // (shmem_enabled=advise). A child of a fork must not keep the arenas alive.
  madvise(mapped, bytes_, MADV_HUGEPAGE);
  madvise(mapped, bytes_, MADV_DONTFORK);
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
  base_ = static_cast<std::byte*>(mapped);
  return absl::OkStatus();
}

void Arena::Prefault(std::size_t begin, std::size_t end) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(base_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
#endif
  const std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = begin; offset < end; offset += page_bytes) {
    // Read and write back: the memory may already hold generations.
    auto* byte = reinterpret_cast<volatile unsigned char*>(base_ + offset);
    *byte = *byte;
  }
}

}  // namespace kvmill
