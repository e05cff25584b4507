#include "kernels/encode_bound.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/encode.h"

namespace kvmill {

double MeasureEncodePassesMicroseconds(const TileFormat& format, int repetitions) {
  std::vector<std::uint16_t> values(std::size_t{format.group} * format.head_dim);
  std::mt19937 random(1);
  std::normal_distribution<float> gauss;
  for (std::uint16_t& v : values) v = FloatToFloat16(gauss(random));
  const auto* page = reinterpret_cast<const std::byte*>(values.data());
  const HeadPages pages{&page,          0, format.group, std::ptrdiff_t{2} * format.head_dim, 2,
                        DType::kFloat16};
  std::vector<std::byte> record(RecordBytes(format));
  std::vector<std::byte> storage(EncodeScratchBytes(format) + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
  const absl::Span<std::byte> scratch(storage.data() + (64 - address % 64) % 64,
                                      EncodeScratchBytes(format));
  const EncodeArgs args{pages, pages, record.data()};
  EncodeResult result;
  EncodeTilesCpu(format, Frame::kModel, {&args, 1}, {&result, 1}, scratch);

  double fastest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    if (!RunEncodePassesCpu(format, scratch)) return 0;
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    fastest = std::min(fastest, took.count());
  }
  return fastest;
}

}  // namespace kvmill
