// Encode with better codes, S and Z than those of the range of a row, in the same format.
//
// Encode spans the smallest to the largest value of a row with its codes (docs/formats.md), which
// wastes some where there are few. From its codes, S and Z, before they are rounded to fp16, a row
// goes on here; T stays:
//
//   kRefineFits times   S and Z with the least sum of ((q S + Z) T - x)^2 over the row, then the
//                       nearest codes for them
//   then once           codes as they are, S and Z of the regression the other way round, of codes
//                       on values, weighted by T^2
//
// Least squares shortens: what is decoded has a smaller product with the values than the values
// have with themselves, so logits come out nearer to each other. The last step makes the two equal
// (about the row's mean) for a little more error.
//
// A row keeps what it has where a step has nothing to go by (all codes the same), fp16 could not
// hold the result, or the last one would more than double or halve S. Whether a tile can hold the
// head at all is decided as encode does, from its own codes, S, Z and T.
//
// Same contracts as kernels/encode.h. The two agree in products and squared errors to a hundredth;
// codes may differ, since a row is a chain of decisions.
#ifndef KVMILL_KERNELS_REFINE_H_
#define KVMILL_KERNELS_REFINE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/algorithm.h"
#include "kernels/encode.h"
#include "kernels/tile_format.h"

namespace kvmill {

inline constexpr int kRefineFits = 2;

// How many times S the stretched S may be at most, and its inverse at least.
inline constexpr float kStretchMax = 2.0f;

// Codes are all the same when their variance is less than this share of their mean square. One code
// of 128 that is off by one leaves 3e-5 of it; sums in fp32 leave 1e-7 of rounding.
inline constexpr float kRefineVarianceMin = 1e-6f;

// The smallest fp16: rows with a smaller S have one code, 0.
inline constexpr float kFloat16SmallestScale = 5.9604645e-8f;

void EncodeRefinedTilesReference(const TileFormat& format, Frame frame,
                                 absl::Span<const EncodeArgs> tiles,
                                 absl::Span<EncodeResult> results, absl::Span<std::byte> scratch);
void EncodeRefinedTilesCpu(const TileFormat& format, Frame frame,
                           absl::Span<const EncodeArgs> tiles, absl::Span<EncodeResult> results,
                           absl::Span<std::byte> scratch);

// EncodeTilesCpu and EncodeTilesReference, or what takes their place.
constexpr decltype(&EncodeTilesCpu) CpuEncoderOf(Algorithm algorithm) {
  return algorithm == Algorithm::kRefined ? &EncodeRefinedTilesCpu : &EncodeTilesCpu;
}
constexpr decltype(&EncodeTilesReference) ReferenceEncoderOf(Algorithm algorithm) {
  return algorithm == Algorithm::kRefined ? &EncodeRefinedTilesReference : &EncodeTilesReference;
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_REFINE_H_
