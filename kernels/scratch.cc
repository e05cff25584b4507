// How much scratch encode and decode ask for: one number for all implementations, so that callers
// can swap them.
#include "kernels/decode.h"
#include "kernels/encode.h"

namespace kvmill {

std::size_t EncodeScratchBytes(const TileFormat& format) {
  // Reference: the tile and its rescaled copy. Cpu: the tile and some 40 vectors along its axes.
  const std::size_t half_bytes = std::size_t{format.group} * format.head_dim * sizeof(float);
  return 2 * half_bytes + std::size_t{40} * kHeadDimMax * sizeof(float);
}

std::size_t DecodeScratchBytes(const TileFormat& format) {
  // One half in fp32.
  return std::size_t{format.group} * format.head_dim * sizeof(float);
}

}  // namespace kvmill
