#include "client/eval/polarquant.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "client/eval/round_to_nearest.h"

namespace kvmill::eval {
namespace {

constexpr float kTurn = 6.283185307179586f;

// Equal bins between minimum and maximum, in place; decoded to their middles.
void BinGroup(std::vector<float>& values, std::uint32_t bits) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const auto bins = static_cast<float>(1u << bits);
  const float width = Float16ToFloat(FloatToFloat16((*high - *low) / bins));
  const float start = Float16ToFloat(FloatToFloat16(*low));
  for (float& x : values) {
    if (width == 0) {
      x = start;
      continue;
    }
    const float bin = std::clamp(std::floor((x - start) / width), 0.0f, bins - 1);
    x = (bin + 0.5f) * width + start;
  }
}

class PolarQuant : public Quantizer {
 public:
  PolarQuant(std::uint32_t key_bits, std::uint32_t value_bits, std::uint32_t group)
      : key_bits_(key_bits), value_bits_(value_bits), group_(group) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    Decoded out;
    out.values.assign(head.values.begin(), head.values.end());
    if (half == Half::kValue) {
      out.bits = RoundGroups(out.values.data(), head.tokens, head.head_dim, Axis::kPerToken,
                             head.head_dim, value_bits_);
      return out;
    }
    const std::size_t dim = head.head_dim;
    for (std::size_t begin = 0; begin < head.tokens; begin += group_) {
      const std::size_t count = std::min<std::size_t>(group_, head.tokens - begin);
      std::vector<float> radii(count), angles(count);
      for (std::size_t pair = 0; pair < dim / 2; ++pair) {
        float* first = out.values.data() + begin * dim + pair;
        float* second = first + dim / 2;
        for (std::size_t t = 0; t < count; ++t) {
          const float x = first[t * dim], y = second[t * dim];
          const float angle = std::atan2(y, x);
          radii[t] = std::hypot(x, y);
          angles[t] = angle < 0 ? angle + kTurn : angle;
        }
        BinGroup(radii, key_bits_);
        BinGroup(angles, key_bits_);
        for (std::size_t t = 0; t < count; ++t) {
          first[t * dim] = radii[t] * std::cos(angles[t]);
          second[t * dim] = radii[t] * std::sin(angles[t]);
        }
        out.bits += 2 * count * key_bits_ + 64;
      }
    }
    return out;
  }

 private:
  const std::uint32_t key_bits_, value_bits_, group_;
};

}  // namespace

std::unique_ptr<Quantizer> MakePolarQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                          std::uint32_t group_tokens) {
  return std::make_unique<PolarQuant>(key_bits, value_bits, group_tokens);
}

}  // namespace kvmill::eval
