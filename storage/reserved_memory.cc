#include "storage/reserved_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {

absl::StatusOr<ReservedMemory> ReservedMemory::Create(std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot reserve ", bytes, " bytes of addresses: ", strerror(errno)));
  }
  // Huge pages would make memory resident that was not touched, and a first touch clear 2 MiB.
  // Advice only: a kernel without them has nothing to switch off.
  (void)madvise(base, bytes, MADV_NOHUGEPAGE);
  return ReservedMemory(static_cast<std::byte*>(base), bytes);
}

ReservedMemory::ReservedMemory(ReservedMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

ReservedMemory::~ReservedMemory() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace kvmill
