// Which tile formats the CUDA kernels have.
#ifndef KVMILL_KERNELS_CUDA_FORMATS_H_
#define KVMILL_KERNELS_CUDA_FORMATS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/tile_format.h"

namespace kvmill {

// They have TileFormatAt(i) for i below this: all but those with 3-bit keys.
inline constexpr std::size_t kCudaTileFormatCount = 24;

// As ValidateTileFormat; UNIMPLEMENTED naming the format for one that only the CPU has.
absl::Status ValidateCudaTileFormat(const TileFormat& format);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_FORMATS_H_
