// Builds without CUDA.
#include "absl/status/status.h"
#include "kernels/attention.h"

namespace kvmill {

std::size_t AttentionCudaWorkspaceBytes(const TileFormat&, std::size_t, std::uint32_t) { return 0; }

absl::Status AttentionCuda(const AttentionArgs&, std::uint32_t, void*, CUstream_st*) {
  return absl::UnimplementedError("this build has no CUDA kernels");
}

}  // namespace kvmill
