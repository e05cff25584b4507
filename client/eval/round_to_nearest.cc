#include "client/eval/round_to_nearest.h"

#include <algorithm>
#include <cmath>

#include "kernels/hadamard.h"

namespace kvmill::eval {
namespace {

class Rounding : public Quantizer {
 public:
  explicit Rounding(const RoundingOptions& options) : options_(options) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    Decoded out;
    out.values.assign(head.values.begin(), head.values.end());
    float* values = out.values.data();
    if (options_.rotate) RotateRowsReference(values, head.tokens, head.head_dim);
    const bool key = half == Half::kKey;
    out.bits = RoundGroups(values, head.tokens, head.head_dim,
                           key ? options_.key_axis : Axis::kPerToken, options_.group,
                           key ? options_.key_bits : options_.value_bits, options_.clip_ratio);
    if (options_.rotate) RotateRowsReference(values, head.tokens, head.head_dim);
    return out;
  }

 private:
  const RoundingOptions options_;
};

}  // namespace

std::uint64_t RoundGroup(float* values, std::size_t count, std::size_t stride, std::uint32_t bits,
                         float clip_ratio) {
  float low = values[0], high = values[0];
  for (std::size_t i = 1; i < count; ++i) {
    low = std::min(low, values[i * stride]);
    high = std::max(high, values[i * stride]);
  }
  low *= clip_ratio;
  high *= clip_ratio;
  const auto code_max = static_cast<float>((1u << bits) - 1u);
  const float scale = Float16ToFloat(FloatToFloat16((high - low) / code_max));
  const float zero = Float16ToFloat(FloatToFloat16(low));
  for (std::size_t i = 0; i < count; ++i) {
    float& x = values[i * stride];
    const float code =
        scale == 0 ? 0 : std::clamp(std::nearbyint((x - zero) / scale), 0.0f, code_max);
    x = code * scale + zero;
  }
  return count * bits + 32;
}

std::uint64_t RoundGroups(float* values, std::size_t tokens, std::size_t head_dim, Axis axis,
                          std::size_t group, std::uint32_t bits, float clip_ratio) {
  const bool per_token = axis == Axis::kPerToken;
  const std::size_t rows = per_token ? tokens : head_dim;
  const std::size_t length = per_token ? head_dim : tokens;
  const std::size_t row_stride = per_token ? head_dim : 1;
  const std::size_t stride = per_token ? 1 : head_dim;
  std::uint64_t total = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t begin = 0; begin < length; begin += group) {
      total += RoundGroup(values + row * row_stride + begin * stride,
                          std::min(group, length - begin), stride, bits, clip_ratio);
    }
  }
  return total;
}

std::unique_ptr<Quantizer> MakeRounding(const RoundingOptions& options) {
  return std::make_unique<Rounding>(options);
}

}  // namespace kvmill::eval
