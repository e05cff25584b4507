// Refine: a record that encode made, with better codes, scales and zeros in the same format.
//
// Encode spans the smallest to the largest value of a row with its codes (docs/formats.md), which
// wastes some where there are few: with 2 bits a quarter of the error of V. Here S and Z of a row
// are those of least squares, T stays:
//
//   codes     the nearest ones for S, Z and T as the record has them, in fp16
//   S and Z   those with the least sum of ((q S + Z) T - x)^2 over the row, rounded to fp16
//   twice, then codes once more. A row whose sum the first fit did not make smaller keeps its S and
//   Z, as does one whose codes are all the same or whose fit fp16 cannot hold.
//
// `Reference` is the oracle; `Cpu` is vectorized with runtime dispatch. Both take records of any
// encoder. Their sums of squares agree to a hundredth; codes may differ, since a row is a chain of
// decisions.
//
// Pure functions over the caller's memory: thread-safe, no allocation, no global state.
#ifndef KVMILL_KERNELS_REFINE_H_
#define KVMILL_KERNELS_REFINE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/encode.h"
#include "kernels/tile_format.h"

namespace kvmill {

// What an encoder does to find codes, scales and zeros. The format is the same.
enum class Algorithm : std::uint8_t {
  kKvarn,    // Encode alone.
  kRefined,  // Encode, then refine.
};

// After an encode with the same format, frame, tiles and results: improves the records of the tiles
// whose result is kTile, in place, and leaves the others. `scratch` as for encode, which is done
// with it.
void RefineTilesReference(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                          absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch);
void RefineTilesCpu(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                    absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_REFINE_H_
