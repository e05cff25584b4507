// Asks for memory before it is needed, a few cache lines at a time.
//
// Blocks lie anywhere, so the hardware's own prefetching starts anew with each one, and it stops
// where a kernel computes on what it has. A core has few requests under way at a time: memory keeps
// up only if they are made in equal steps of time, whatever the kernel does at that time.
#ifndef KVMILL_KERNELS_CPU_AHEAD_H_
#define KVMILL_KERNELS_CPU_AHEAD_H_

#include <cstddef>

namespace kvmill {

class Ahead {
 public:
  static constexpr std::size_t kLineBytes = 64;

  Ahead() = default;  // Nothing.
  Ahead(const std::byte* first, std::ptrdiff_t stride_bytes, std::size_t row_bytes,
        std::size_t row_count) {
    Add(first, stride_bytes, row_bytes, row_count);
  }

  // After what there is. Three times at most; none of 0 rows or bytes.
  void Add(const std::byte* first, std::ptrdiff_t stride_bytes, std::size_t row_bytes,
           std::size_t row_count) {
    parts_[end_++] = {first, stride_bytes, row_bytes, row_count};
    if (end_ == 1) Begin();
  }

  // Asks for `count` more cache lines, if there are as many.
  inline __attribute__((always_inline)) void Take(std::size_t count) {
    const std::byte* at = at_;
    for (; count != 0 && at != nullptr; --count) {
      __builtin_prefetch(at, 0, 2);
      at += kLineBytes;
      if (at >= row_end_) at = NextRow();
    }
    at_ = at;
  }

 private:
  struct Part {
    const std::byte* row;
    std::ptrdiff_t stride_bytes;
    std::size_t row_bytes;
    std::size_t left;
  };

  void Begin() {
    at_ = parts_[part_].row;
    row_end_ = at_ + parts_[part_].row_bytes;
  }

  const std::byte* NextRow() {
    Part& part = parts_[part_];
    if (--part.left != 0) {
      part.row += part.stride_bytes;
    } else if (++part_ == end_) {
      return nullptr;
    }
    Begin();
    return at_;
  }

  Part parts_[3];
  std::size_t part_ = 0;
  std::size_t end_ = 0;
  const std::byte* at_ = nullptr;
  const std::byte* row_end_ = nullptr;
};

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_AHEAD_H_
