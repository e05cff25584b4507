// What every method under evaluation is: K or V of one head in, what a decoder would give back and
// the exact number of bits that it would store for it out.
#ifndef KVMILL_CLIENT_EVAL_QUANTIZER_H_
#define KVMILL_CLIENT_EVAL_QUANTIZER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/float16.h"

namespace kvmill::eval {

enum class Half : std::uint8_t { kKey = 0, kValue = 1 };

// K or V of one head: keys after RoPE, in the model's frame, finite. A view.
struct HeadValues {
  absl::Span<const float> values;  // [tokens][head_dim].
  std::uint32_t tokens = 0;        // A multiple of the tile's group.
  std::uint32_t head_dim = 0;      // 64, 128 or 256.
  DType dtype = DType::kFloat16;   // In which the values are exact.
};

struct Decoded {
  std::vector<float> values;  // As HeadValues::values.
  // Of a packed form, metadata included: codes, scales, zeros, indices of outliers, codebooks that
  // come from the data. Nothing is counted for what is the same for all data (a fixed rotation).
  std::uint64_t bits = 0;
  // Blocks that the method could not hold: 16 bits an element, and exact.
  std::uint32_t raw_blocks = 0;
};

// Immutable: thread-safe. Two calls with the same values give the same result.
class Quantizer {
 public:
  virtual ~Quantizer() = default;
  virtual Decoded Quantize(Half half, const HeadValues& head) const = 0;
};

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_QUANTIZER_H_
