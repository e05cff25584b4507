// Builds without CUDA.
#include "absl/status/status.h"
#include "kernels/generation_check.h"

namespace kvmill {

absl::Status CheckGenerationsCuda(const GenerationCheck*, std::size_t, std::uint32_t*,
                                  CUstream_st*) {
  return absl::UnimplementedError("this build has no CUDA kernels");
}

}  // namespace kvmill
