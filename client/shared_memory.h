// Memory that an engine can share with a local daemon: KV pages are allocated in it, registered
// (EngineRegion::fd) and then stored without a copy (client/page_store.h).
//
// A memfd that can neither shrink nor grow nor lose a page, mapped to read and write; nobody else
// can map it to write. (A daemon takes any memfd of ordinary pages that cannot shrink: a page that
// went away would end its process. From users other than its own it takes only what has all its
// pages and F_SEAL_FUTURE_WRITE: pages that reading makes would be the daemon's.) A forked child
// does not have the mapping, and its pages are in no core file.
#ifndef KVMILL_CLIENT_SHARED_MEMORY_H_
#define KVMILL_CLIENT_SHARED_MEMORY_H_

#include <sys/types.h>

#include <cstddef>

#include "absl/status/statusor.h"

namespace kvmill {

// Owns the mapping and the descriptor. Movable. Not thread-safe itself; the memory is the caller's
// to synchronize.
class SharedMemory {
 public:
  // `bytes` zeros, rounded up to whole pages of the system, all allocated here: some 0.1 s a GiB.
  // INVALID_ARGUMENT for 0; RESOURCE_EXHAUSTED when the system has no room.
  static absl::StatusOr<SharedMemory> Create(std::size_t bytes);

  SharedMemory() = default;  // Nothing.
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }  // Owned by this object.

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int fd_ = -1;
  pid_t pid_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_SHARED_MEMORY_H_
