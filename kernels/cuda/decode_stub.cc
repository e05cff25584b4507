// Builds without CUDA.
#include "absl/status/status.h"
#include "kernels/decode.h"

namespace kvmill {

absl::Status DecodeTilesCuda(const TileFormat&, Frame, const DecodeArgs*, std::size_t,
                             CUstream_st*) {
  return absl::UnimplementedError("this build has no CUDA kernels");
}

}  // namespace kvmill
