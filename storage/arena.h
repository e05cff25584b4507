// One arena: a memfd that this process writes and everyone else can only read.
//
// Internal to storage/ (page_pool.h is the public side). Not thread-safe; the pool serializes.
#ifndef KVMILL_STORAGE_ARENA_H_
#define KVMILL_STORAGE_ARENA_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace kvmill {

class Arena {
 public:
  Arena() = default;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;
  ~Arena();

  // Creates the memfd, maps it writable, then seals it against every later writable mapping,
  // shrinking and growing. `reserve` allocates all of its memory now. RESOURCE_EXHAUSTED naming the
  // size when it cannot be had.
  absl::Status Open(std::size_t bytes, bool reserve);

  // Puts fresh, zeroed memory at the same address under a new fd. Processes that mapped the old one
  // keep it, and see no byte of what comes: sealed memory can neither be punched nor taken back.
  absl::Status Renew();

  // Makes sure that pages [begin, end) are mapped, so that no first touch stalls later.
  void Prefault(std::size_t begin, std::size_t end);

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  absl::Status MapAt(void* address);

  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  bool reserve_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ARENA_H_
