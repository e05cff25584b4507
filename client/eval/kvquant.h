// KVQuant (Hooper et al., arXiv:2401.18079, sections 3.1, 3.3 and 3.4): keys per channel, values
// per token; of each such vector a small share of elements is kept in 16 bits, the range of the
// others is stretched to [-1, 1], and they go to the nearest of 2^bits levels that need not be
// equally far apart ("nuq"). A vector of n stores n * bits + 32 bits (its range, fp16) and 16 +
// ceil(log2 n) bits an outlier; a head's K and its V each 2^bits * 16 bits of levels.
//
// Ours differs: keys are after RoPE, where the paper takes them before (section 3.2); ranges come
// from the tile's own tokens, where the paper calibrates those of keys beforehand; levels come from
// the very data by k-means without the paper's weights (Fisher information), so they need no
// calibration and flatter the method. Which elements are outliers: those without which the range is
// smallest, a whole number a vector (1 % of 64 or 128 is 1).
#ifndef KVMILL_CLIENT_EVAL_KVQUANT_H_
#define KVMILL_CLIENT_EVAL_KVQUANT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/quantizer.h"

namespace kvmill::eval {

// Elements of a vector of `count` that are kept: `share` of them, rounded, at least one.
std::size_t OutlierCount(std::size_t count, double share);

// The indices, ascending, of the `outliers` elements without which max - min is smallest; of equal
// choices the one that keeps the smaller values.
std::vector<std::size_t> FindOutliers(absl::Span<const float> vector, std::size_t outliers);

std::unique_ptr<Quantizer> MakeKvQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                       std::uint32_t group_tokens, double outlier_share);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_KVQUANT_H_
