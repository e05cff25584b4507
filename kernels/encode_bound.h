// The bound that the cpu encoder is measured against: the time of the two passes per iteration of
// the normalization alone. For benchmarks.
#ifndef KVMILL_KERNELS_ENCODE_BOUND_H_
#define KVMILL_KERNELS_ENCODE_BOUND_H_

#include <cstddef>

#include "absl/types/span.h"
#include "kernels/tile_format.h"

namespace kvmill {

// Runs the passes of one tile (kNormalizeIterations for K and as many for V) over whatever tile the
// last EncodeTilesCpu with this format and scratch left there: the very code that the encoder runs.
// False, and nothing is done, at the level "SCALAR" (kernels/simd.h), which has no such passes. The
// scratch is good for nothing afterwards but another call.
bool RunEncodePassesCpu(const TileFormat& format, absl::Span<std::byte> scratch);

// Encodes a Gaussian tile, then times RunEncodePassesCpu: the fastest of `repetitions` runs, in
// microseconds per tile (K and V). 0 at the level "SCALAR". Allocates.
double MeasureEncodePassesMicroseconds(const TileFormat& format, int repetitions = 200);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ENCODE_BOUND_H_
