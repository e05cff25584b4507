// Asks for memory before it is needed. Blocks lie anywhere, so the hardware's own prefetching
// starts anew with each one; a cache line asked for now and then while the block before is worked
// on hides that.
#ifndef KVMILL_KERNELS_CPU_AHEAD_H_
#define KVMILL_KERNELS_CPU_AHEAD_H_

#include <cstddef>

namespace kvmill {

class Ahead {
 public:
  Ahead() = default;  // Nothing.
  Ahead(const std::byte* first, std::ptrdiff_t stride_bytes, std::size_t row_bytes,
        std::size_t row_count)
      : row_(first), stride_bytes_(stride_bytes), row_bytes_(row_bytes), left_(row_count) {}

  // Asks for `count` more cache lines, if there are as many.
  void Take(std::size_t count) {
    constexpr std::size_t kLineBytes = 64;
    for (; count != 0 && left_ != 0; --count) {
      __builtin_prefetch(row_ + offset_, 0, 2);
      offset_ += kLineBytes;
      if (offset_ >= row_bytes_) {
        offset_ = 0;
        row_ += stride_bytes_;
        --left_;
      }
    }
  }

 private:
  const std::byte* row_ = nullptr;
  std::ptrdiff_t stride_bytes_ = 0;
  std::size_t row_bytes_ = 0;
  std::size_t offset_ = 0;
  std::size_t left_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_AHEAD_H_
