// The host memory under a page pool: arenas of shareable memory at fixed addresses. A pool in a
// device's memory keeps its generations in such arenas (storage/device_arenas.h has the rest).
//
// Every arena is a memfd that is mapped here once, writable, and then sealed: whoever else gets its
// file descriptor can map it only to read, and nobody can resize it.
//
// Internal to storage/. address() and fd() are thread-safe; Renew() of different arenas too.
#ifndef KVMILL_STORAGE_ARENA_MEMORY_H_
#define KVMILL_STORAGE_ARENA_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/device/device.h"
#include "storage/huge_pages.h"

namespace kvmill {

class ArenaMemory {
 public:
  struct Options {
    std::uint32_t arena_count = 0;
    std::size_t arena_bytes = 0;              // Multiple of 2 MiB.
    bool prefault = true;                     // Touch all memory, in parallel.
    HugePages huge_pages = HugePages::kAuto;  // Of what is touched.
    Device* pin_for = nullptr;  // That copies to and from the arenas; outlives them. Or null.
    std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> progress;
  };
  // RESOURCE_EXHAUSTED naming size and limit, also when the memory cannot be pinned or, for kOn,
  // not all of it be had in huge pages.
  static absl::StatusOr<std::unique_ptr<ArenaMemory>> Create(const Options& options);
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  // All arenas lie one after the other; addresses never change. Aligned to 2 MiB.
  std::byte* base() const { return base_; }
  std::byte* address(std::uint32_t arena) const { return base_ + arena * arena_bytes_; }
  // Borrowed, valid until Renew(arena).
  int fd(std::uint32_t arena) const { return fds_[arena]; }

  std::uint64_t bytes() const { return std::uint64_t{fds_.size()} * arena_bytes_; }  // Of all.
  // What lies in huge pages, and why that is not everything that was touched: an errno, or 0.
  std::uint64_t huge_bytes() const;
  int huge_error() const { return huge_error_.load(std::memory_order_relaxed); }

  // Gives the arena's memory back to the machine and puts fresh, zeroed memory (another memfd) at
  // the same address. Whoever mapped the old memory keeps it and sees nothing of the new.
  // RESOURCE_EXHAUSTED when there is none: then the arena has no memory and must not be touched
  // until a later Renew succeeds. Small pages where no huge ones can be had, whatever the options.
  absl::Status Renew(std::uint32_t arena);

 private:
  explicit ArenaMemory(const Options& options);
  absl::Status Reserve();
  absl::Status MapArena(std::uint32_t arena);
  absl::Status Pin(std::uint32_t arena);
  void Unpin(std::uint32_t arena);
  absl::Status PrefaultAll(const std::function<void(std::uint64_t, std::uint64_t)>& progress);
  // Pages in, without the SIGBUS or the silent over-commitment that a first touch may mean.
  absl::Status Prefault(std::uint32_t arena, std::size_t offset_bytes, std::size_t bytes);
  // As much of that as can be had in huge pages.
  void GatherHugePages(std::uint32_t arena, std::size_t offset_bytes, std::size_t bytes);

  const std::size_t arena_bytes_;
  const bool prefault_;
  const HugePages huge_pages_;
  Device* const pin_for_;
  std::byte* reserved_ = nullptr;  // What was reserved; base_ is the first 2 MiB boundary in it.
  std::byte* base_ = nullptr;
  std::vector<int> fds_;              // -1 without memory.
  std::vector<std::uint8_t> pinned_;  // Whether, by arena.
  // Extents in huge pages, by arena. For numbers that people read.
  const std::unique_ptr<std::atomic<std::uint32_t>[]> huge_extents_;
  std::atomic<std::uint32_t> huge_refusals_{0};  // By the kernel; after some, nobody asks any more.
  std::atomic<int> huge_error_{0};               // Of the last.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ARENA_MEMORY_H_
