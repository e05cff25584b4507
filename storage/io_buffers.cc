#include "storage/io_buffers.h"

#include <sys/mman.h>

#include <cstdint>

namespace kvmill {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// A mapping larger by one huge page holds an aligned buffer wherever the kernel puts it; the rest
// is unmapped again.
char* Map() {
  constexpr std::size_t kMapped = kIoBufferBytes + kHugePageBytes;
  void* mapped = mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const start = static_cast<char*>(mapped);
  const std::size_t before =
      (kHugePageBytes - reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  if (before > 0) munmap(start, before);
  if (before < kHugePageBytes) {
    munmap(start + before + kIoBufferBytes, kHugePageBytes - before);
  }
  char* const data = start + before;
  madvise(data, kIoBufferBytes, MADV_HUGEPAGE);  // Only a wish: small pages work, slower.
  return data;
}

}  // namespace

IoBuffers::~IoBuffers() {
  for (char* data : unused_) munmap(data, kIoBufferBytes);
}

IoBuffers::Buffer IoBuffers::Acquire() {
  {
    MutexLock lock(mutex_);
    if (!unused_.empty()) {
      char* const data = unused_.back();
      unused_.pop_back();
      return Buffer(this, data);
    }
  }
  char* const data = Map();
  return data == nullptr ? Buffer() : Buffer(this, data);
}

void IoBuffers::Release(char* data) {
  {
    MutexLock lock(mutex_);
    if (unused_.size() < kept_max_) {
      unused_.push_back(data);
      return;
    }
  }
  munmap(data, kIoBufferBytes);
}

}  // namespace kvmill
