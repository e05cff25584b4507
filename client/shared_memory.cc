#include "client/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<SharedMemory> SharedMemory::Create(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > std::numeric_limits<off_t>::max() - page) {
    return absl::InvalidArgumentError(absl::StrCat("shared memory of ", bytes, " bytes"));
  }
  SharedMemory memory;
  memory.bytes_ = (bytes + page - 1) / page * page;
  memory.pid_ = getpid();
  const auto failed = [&](absl::string_view what) {
    return absl::ResourceExhaustedError(absl::StrCat("shared memory of ", memory.bytes_,
                                                     " bytes: ", what, ": ", std::strerror(errno)));
  };
  memory.fd_ = memfd_create("kvmill-engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (memory.fd_ < 0) return failed("memfd_create");
  if (ftruncate(memory.fd_, static_cast<off_t>(memory.bytes_)) != 0) return failed("ftruncate");
  void* data = mmap(nullptr, memory.bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_, 0);
  if (data == MAP_FAILED) return failed("mmap");
  memory.data_ = static_cast<std::byte*>(data);
  if (madvise(data, memory.bytes_, MADV_DONTFORK) != 0) return failed("madvise");
  madvise(data, memory.bytes_, MADV_DONTDUMP);
  madvise(data, memory.bytes_, MADV_HUGEPAGE);  // Where the system has them for shared memory.
  // Now, where it can be refused, and in this process's account. Through the mapping, which knows
  // of huge pages; Linux before 5.14 cannot.
  if (madvise(data, memory.bytes_, MADV_POPULATE_WRITE) != 0 &&
      (errno != EINVAL || fallocate(memory.fd_, 0, 0, static_cast<off_t>(memory.bytes_)) != 0)) {
    return failed("allocating it");
  }
  // After the mapping, which stays writable.
  if (fcntl(memory.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) != 0) {
    return failed("seals");
  }
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      pid_(other.pid_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  std::swap(pid_, other.pid_);
  return *this;
}

SharedMemory::~SharedMemory() {
  // In a forked child something else may lie there.
  if (data_ != nullptr && getpid() == pid_) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace kvmill
