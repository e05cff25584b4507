// Reads the rows of one head for the reference implementations.
#ifndef KVMILL_KERNELS_GATHER_REFERENCE_H_
#define KVMILL_KERNELS_GATHER_REFERENCE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/encode.h"
#include "kernels/float16.h"
#include "kernels/hadamard.h"

namespace kvmill {

// Token-major, `tokens` rows of `channels` floats, rotated when they are in the model's frame.
// False when a value is not finite: then some rows are missing.
inline bool GatherReference(const HeadPages& pages, std::uint32_t tokens, std::uint32_t channels,
                            Frame frame, float* rows) {
  for (std::uint32_t t = 0; t < tokens; ++t) {
    const std::byte* row = pages.Row(t);
    for (std::uint32_t d = 0; d < channels; ++d) {
      std::uint16_t bits;
      std::memcpy(&bits, row + static_cast<std::ptrdiff_t>(d) * pages.channel_stride_bytes,
                  sizeof(bits));
      const float value = ToFloat(bits, pages.dtype);
      if (!std::isfinite(value)) return false;
      rows[std::size_t{t} * channels + d] = value;
    }
  }
  if (frame == Frame::kModel) RotateRowsReference(rows, tokens, channels);
  return true;
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_GATHER_REFERENCE_H_
