// Verbs for the kernel tests: encode one tile from plain [tokens, channels] arrays, decode it,
// compare.
#ifndef KVMILL_TESTS_KERNELS_TILE_TESTING_H_
#define KVMILL_TESTS_KERNELS_TILE_TESTING_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/packed_codes.h"
#include "tests/kernels/implementations.h"

namespace kvmill {

// 64-byte aligned scratch.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : storage_(bytes + 64), bytes_(bytes) {}
  absl::Span<std::byte> span() {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    return {storage_.data() + (64 - address % 64) % 64, bytes_};
  }

 private:
  std::vector<std::byte> storage_;
  std::size_t bytes_;
};

// K and V of one tile as the engine would hold them, in one page.
struct TileInput {
  DType dtype = DType::kFloat16;
  std::vector<std::uint16_t> k, v;  // [group, head_dim] each.
};

struct Encoded {
  EncodeResult result = EncodeResult::kRaw;
  std::vector<std::byte> record;
};

inline Encoded Encode(const Implementation& with, const TileFormat& format, const TileInput& input,
                      Frame frame = Frame::kModel) {
  const auto* k_page = reinterpret_cast<const std::byte*>(input.k.data());
  const auto* v_page = reinterpret_cast<const std::byte*>(input.v.data());
  const std::ptrdiff_t stride = std::ptrdiff_t{2} * format.head_dim;
  Encoded out;
  out.record.resize(RecordBytes(format));
  EncodeArgs args;
  args.k = {&k_page, 0, format.group, stride, 2, input.dtype};
  args.v = {&v_page, 0, format.group, stride, 2, input.dtype};
  args.record = out.record.data();
  Scratch scratch(EncodeScratchBytes(format));
  with.encode(format, frame, {&args, 1}, {&out.result, 1}, scratch.span());
  return out;
}

struct Decoded {
  std::vector<float> k, v;  // [group, head_dim] each.
};

inline Decoded Decode(const Implementation& with, const TileFormat& format,
                      const std::vector<std::byte>& record, Frame frame = Frame::kModel) {
  Decoded out;
  out.k.resize(std::size_t{format.group} * format.head_dim);
  out.v.resize(out.k.size());
  with.decode_to_float(format, frame, record.data(), absl::MakeSpan(out.k), absl::MakeSpan(out.v));
  return out;
}

// ||a - b|| / ||b||, with 0/0 = 0.
inline double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(a[i]);
    const double y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

struct CodeDifferences {
  std::size_t count = 0;      // Codes that differ.
  std::uint32_t largest = 0;  // By how much at most.
};

// [rows][columns], packed along the columns.
inline CodeDifferences CompareCodes(const std::byte* a, const std::byte* b, std::size_t rows,
                                    std::size_t columns, std::uint32_t bits) {
  CodeDifferences out;
  for (std::size_t i = 0; i < rows * columns; ++i) {
    const std::size_t row = i / columns * (columns * bits / 8);
    const auto x = static_cast<int>(CodeAt(a + row, i % columns, bits, columns));
    const auto y = static_cast<int>(CodeAt(b + row, i % columns, bits, columns));
    if (x == y) continue;
    ++out.count;
    out.largest = std::max(out.largest, static_cast<std::uint32_t>(std::abs(x - y)));
  }
  return out;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_KERNELS_TILE_TESTING_H_
