// Buffers for direct I/O: page-aligned, of huge pages where the kernel gives them, kept for reuse.
#ifndef KVMILL_STORAGE_IO_BUFFERS_H_
#define KVMILL_STORAGE_IO_BUFFERS_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "storage/core/mutex.h"

namespace kvmill {

inline constexpr std::size_t kIoAlignment = 4096;
inline constexpr std::size_t kIoBufferBytes = std::size_t{6} << 20;  // Three huge pages.

// Thread-safe. Must outlive its buffers.
class IoBuffers {
 public:
  // Goes back to the pool when destroyed. Empty when memory is short.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept
        : pool_(other.pool_), data_(std::exchange(other.data_, nullptr)) {}
    Buffer& operator=(Buffer&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(data_, other.data_);
      return *this;
    }
    ~Buffer() {
      if (data_ != nullptr) pool_->Release(data_);
    }

    bool empty() const { return data_ == nullptr; }
    char* data() const { return data_; }  // kIoBufferBytes.

   private:
    friend class IoBuffers;
    Buffer(IoBuffers* pool, char* data) : pool_(pool), data_(data) {}
    IoBuffers* pool_ = nullptr;
    char* data_ = nullptr;
  };

  // Keeps up to `kept_max` unused buffers.
  explicit IoBuffers(std::size_t kept_max) : kept_max_(kept_max) {}
  ~IoBuffers();

  Buffer Acquire();

 private:
  void Release(char* data);

  const std::size_t kept_max_;
  Mutex mutex_;
  std::vector<char*> unused_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_IO_BUFFERS_H_
