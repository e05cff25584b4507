// Asymmetric round-to-nearest with groups along one axis: what per-token RTN, KIVI and QuaRot are
// made of.
//
//   lo, hi = clip * (min, max) of the group     scale = fp16((hi - lo) / (2^bits - 1))
//   zero   = fp16(lo)                           code  = clamp(round((x - zero) / scale))
//   decoded = code * scale + zero
//
// Codes are chosen against the rounded scale and zero, which are what a decoder has. A group of n
// stores n * bits + 32 bits.
//
// - Per-token RTN: K and V per token, one group a token.
// - KIVI (Liu et al., arXiv:2402.02750, section 3, Algorithm 1): K per channel in groups of
// tokens,
//   V per token in groups of channels. Ours keeps no residual of recent tokens in 16 bits: only
//   tokens in tiles are measured.
// - QuaRot (Ashkboos et al., arXiv:2404.00456, sections 4 and 5): K (after RoPE)
// and
//   V multiplied by a Hadamard matrix per head, then per-token asymmetric RTN, groups of up to 128,
//   with min and max multiplied by 0.95. Ours uses the plain Sylvester matrix and leaves weights
//   and activations alone.
// - Hadamard + KIVI axes: no paper; KVarN without its normalization, with KIVI's zero and scale.
#ifndef KVMILL_CLIENT_EVAL_ROUND_TO_NEAREST_H_
#define KVMILL_CLIENT_EVAL_ROUND_TO_NEAREST_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "client/eval/quantizer.h"

namespace kvmill::eval {

// One group in place: `count` values that lie `stride` apart. The bits that it stores.
std::uint64_t RoundGroup(float* values, std::size_t count, std::size_t stride, std::uint32_t bits,
                         float clip_ratio = 1);

enum class Axis : std::uint8_t {
  kPerToken,    // A group is consecutive channels of one token.
  kPerChannel,  // A group is consecutive tokens of one channel.
};

// All of `values` ([tokens][head_dim]) in place, in groups of `group` along the axis; the last
// group of a row may be shorter. The bits that it stores.
std::uint64_t RoundGroups(float* values, std::size_t tokens, std::size_t head_dim, Axis axis,
                          std::size_t group, std::uint32_t bits, float clip_ratio = 1);

struct RoundingOptions {
  std::uint32_t key_bits = 2;
  std::uint32_t value_bits = 2;
  Axis key_axis = Axis::kPerToken;  // Values are always per token.
  std::size_t group = 128;
  bool rotate = false;  // By the Hadamard matrix, before; back after.
  float clip_ratio = 1;
};
std::unique_ptr<Quantizer> MakeRounding(const RoundingOptions& options);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_ROUND_TO_NEAREST_H_
