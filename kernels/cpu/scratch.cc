// How much scratch encode and decode ask for: one number for all implementations, so that callers
// can swap them.
#include <algorithm>

#include "kernels/cpu/workspace.h"
#include "kernels/decode.h"
#include "kernels/encode.h"

namespace kvmill {

std::size_t EncodeScratchBytes(const TileFormat& format) {
  const std::size_t half_bytes = std::size_t{format.group} * format.head_dim * sizeof(float);
  return std::max(2 * half_bytes, EncodeWorkspaceBytes(format));  // Reference, cpu.
}

std::size_t DecodeScratchBytes(const TileFormat& format) {
  // One half in fp32.
  return std::size_t{format.group} * format.head_dim * sizeof(float);
}

}  // namespace kvmill
