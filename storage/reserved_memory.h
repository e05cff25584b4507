// Zeroed memory whose largest size is reserved as addresses and that costs the machine only what is
// touched, page by page. A structure in it grows without moving: what a pointer names stays there.
//
// Internal to storage/. Thread-safe: constant after Create.
#ifndef KVMILL_STORAGE_RESERVED_MEMORY_H_
#define KVMILL_STORAGE_RESERVED_MEMORY_H_

#include <cstddef>

#include "absl/status/statusor.h"

namespace kvmill {

class ReservedMemory {
 public:
  // RESOURCE_EXHAUSTED, naming the size, when the machine refuses so many addresses.
  static absl::StatusOr<ReservedMemory> Create(std::size_t bytes);
  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept;
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  std::byte* base() const { return base_; }  // Aligned to a page.

 private:
  ReservedMemory(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* base_;
  std::size_t bytes_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_RESERVED_MEMORY_H_
