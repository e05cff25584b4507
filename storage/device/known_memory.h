// Which memory a device can reach, and whether what a kernel is given lies in it.
//
// On a GPU a pointer to anything else is an illegal address, and the end of the context. HostDevice
// could read anything, so it looks here first: what would break a GPU is an error on every machine.
//
// Internal to storage/device. KnownMemory is thread-safe; a View belongs to one thread.
#ifndef KVMILL_STORAGE_DEVICE_KNOWN_MEMORY_H_
#define KVMILL_STORAGE_DEVICE_KNOWN_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/generation_check.h"
#include "storage/core/mutex.h"

namespace kvmill {

// kForeign: memory of another process's allocator, which is to be read only.
enum class MemoryUse : std::uint8_t { kAllocated, kImported, kPinned, kPinnedToRead, kForeign };

constexpr bool MayBeWritten(MemoryUse use) {
  return use == MemoryUse::kAllocated || use == MemoryUse::kPinned;
}
constexpr bool IsPinned(MemoryUse use) {
  return use == MemoryUse::kPinned || use == MemoryUse::kPinnedToRead;
}

class KnownMemory {
 public:
  struct Range {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    MemoryUse use = MemoryUse::kAllocated;
    int fd = -1;                 // Of memory that can be exported. Borrowed.
    std::uint32_t openings = 1;  // Of foreign memory, which lies in one place however often.
  };
  using Ranges = std::vector<Range>;  // Ascending, disjoint.

  // The ranges as they were when it was made.
  class View {
   public:
    explicit View(std::shared_ptr<const Ranges> ranges) : ranges_(std::move(ranges)) {}
    // Whether all of it lies in one range, and in one that may be written if `written`.
    bool Holds(const void* start, std::size_t bytes, bool written = false);
    // The range that any of it lies in, or null.
    const Range* FindAnyOf(const void* start, std::size_t bytes) const;

   private:
    std::shared_ptr<const Ranges> ranges_;  // Shared with the table, which replaces its own.
    std::size_t last_ = 0;                  // Most look-ups find what the one before found.
  };

  // INVALID_ARGUMENT when some of it is known already; foreign memory may be, as it is.
  absl::Status Add(const void* start, std::size_t bytes, MemoryUse use, int fd = -1);
  // False when there is no such range.
  bool Remove(const void* start, std::size_t bytes, MemoryUse use);
  // Of either kind of pinned memory.
  bool RemovePinned(const void* start, std::size_t bytes) {
    return Remove(start, bytes, MemoryUse::kPinned) ||
           Remove(start, bytes, MemoryUse::kPinnedToRead);
  }
  View Look() const;
  bool empty() const;

 private:
  mutable Mutex mu_;
  // Copied when it changes, so that a look costs no lock afterwards.
  std::shared_ptr<const Ranges> ranges_ ABSL_GUARDED_BY(mu_) = std::make_shared<Ranges>();
};

// Whether the arguments of a kernel, to the last page and row that it reads or writes, lie in known
// memory. INVALID_ARGUMENT naming what does not. The lists are read, so they must be complete.
absl::Status CheckReach(KnownMemory::View memory, const TileFormat& format,
                        absl::Span<const EncodeArgs> tiles, const EncodeResult* results);
absl::Status CheckReach(KnownMemory::View memory, const TileFormat& format,
                        absl::Span<const DecodeArgs> tiles);
// Also ValidateAttention.
absl::Status CheckReach(KnownMemory::View memory, const AttentionArgs& args);
absl::Status CheckReach(KnownMemory::View memory, absl::Span<const GenerationCheck> checks,
                        const std::uint32_t* changed);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_KNOWN_MEMORY_H_
