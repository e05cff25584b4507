// Builds without CUDA.
#include "absl/status/status.h"
#include "kernels/encode.h"

namespace kvmill {

absl::Status EncodeTilesCuda(const TileFormat&, Frame, const EncodeArgs*, std::size_t,
                             EncodeResult*, CUstream_st*) {
  return absl::UnimplementedError("this build has no CUDA kernels");
}

}  // namespace kvmill
