// Grid: a thread per check. No shared memory. Bound: the latency of one load from mapped memory.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "kernels/generation_check.h"

namespace kvmill {
namespace device {
namespace {

constexpr unsigned kCheckThreads = 128;
constexpr unsigned kCheckBlocksMax = 1024;

KVMILL_KERNEL(kCheckThreads, 1)
GenerationCheckKernel(const GenerationCheck* checks, std::size_t check_count,
                      std::uint32_t* changed) {
  std::size_t i = std::size_t{BlockIndex()} * BlockThreads() + ThreadIndex();
  for (; i < check_count; i += std::size_t{GridBlocks()} * BlockThreads()) {
    const GenerationCheck check = checks[i];
    const std::uint64_t now = LoadFromSystem(check.word);
    if (now != check.expected || now % 2 != 0) AtomicAdd(changed, 1);
  }
}

}  // namespace
}  // namespace device

absl::Status CheckGenerationsCuda(const GenerationCheck* checks, std::size_t check_count,
                                  std::uint32_t* changed, CUstream_st* stream) {
  if (check_count == 0) return absl::OkStatus();
  const std::size_t blocks = (check_count + device::kCheckThreads - 1) / device::kCheckThreads;
  const auto grid = static_cast<unsigned>(std::min<std::size_t>(blocks, device::kCheckBlocksMax));
  return device::Launch(device::GenerationCheckKernel, {grid, device::kCheckThreads, 0}, stream,
                        checks, check_count, changed);
}

}  // namespace kvmill
