// Which encoder makes tiles. The format is the same, and so is what decodes them.
#ifndef KVMILL_KERNELS_ALGORITHM_H_
#define KVMILL_KERNELS_ALGORITHM_H_

#include <cstdint>

namespace kvmill {

// What an encoder does to find codes, scales and zeros.
enum class Algorithm : std::uint8_t {
  kKvarn,    // EncodeTiles* (kernels/encode.h): bits that golden tiles pin down.
  kRefined,  // EncodeRefinedTiles* (kernels/refine.h).
};

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ALGORITHM_H_
