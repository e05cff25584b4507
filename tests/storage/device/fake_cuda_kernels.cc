// The launchers of kernels/ for fake_cuda.h: the CPU's kernels at the stream's place. What a kernel
// cannot reach breaks the device, as it does on a GPU.
#include <atomic>
#include <vector>

#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/generation_check.h"
#include "tests/storage/device/fake_cuda.h"

namespace kvmill {
namespace {

using fake_cuda::Global;

// Aligned to 64 bytes.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : storage_(bytes + 64), bytes_(bytes) {}
  absl::Span<std::byte> span() {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    return {storage_.data() + (64 - address % 64) % 64, bytes_};
  }

 private:
  std::vector<std::byte> storage_;
  std::size_t bytes_;
};

absl::Status Launched(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

}  // namespace

absl::Status EncodeTilesCuda(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                             std::size_t tile_count, EncodeResult* results, CUstream_st* stream) {
  return Launched(fake_cuda::Enqueue(stream, [=] {
    if (!CheckReach(Global().known.Look(), format, {tiles, tile_count}, results).ok()) {
      return cudaErrorIllegalAddress;
    }
    Scratch scratch(EncodeScratchBytes(format));
    EncodeTilesCpu(format, frame, {tiles, tile_count}, {results, tile_count}, scratch.span());
    return cudaSuccess;
  }));
}

absl::Status DecodeTilesCuda(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                             std::size_t tile_count, CUstream_st* stream) {
  return Launched(fake_cuda::Enqueue(stream, [=] {
    if (!CheckReach(Global().known.Look(), format, {tiles, tile_count}).ok()) {
      return cudaErrorIllegalAddress;
    }
    Scratch scratch(DecodeScratchBytes(format));
    DecodeTilesCpu(format, frame, {tiles, tile_count}, scratch.span());
    return cudaSuccess;
  }));
}

std::size_t AttentionCudaWorkspaceBytes(const TileFormat&, std::size_t, std::uint32_t workers) {
  return std::size_t{256} * workers;
}

absl::Status AttentionCuda(const AttentionArgs& args, std::uint32_t worker_count, void* workspace,
                           CUstream_st* stream) {
  return Launched(fake_cuda::Enqueue(stream, [=] {
    KnownMemory::View known = Global().known.Look();
    const std::size_t bytes =
        AttentionCudaWorkspaceBytes(args.shape.format, args.sequences.size(), worker_count);
    if (!CheckReach(known, args).ok() || !known.Holds(workspace, bytes, true)) {
      return cudaErrorIllegalAddress;
    }
    std::atomic_ref<std::uint32_t> in_use(*static_cast<std::uint32_t*>(workspace));
    if (in_use.exchange(1) != 0) fake_cuda::Problem("a workspace that is in use, or not zeroed");
    Scratch scratch(AttentionScratchBytes(args, worker_count));
    AttentionCpu(args, {worker_count}, scratch.span());
    in_use.store(0);
    return cudaSuccess;
  }));
}

absl::Status CheckGenerationsCuda(const GenerationCheck* checks, std::size_t check_count,
                                  std::uint32_t* changed, CUstream_st* stream) {
  return Launched(fake_cuda::Enqueue(stream, [=] {
    if (!CheckReach(Global().known.Look(), {checks, check_count}, changed).ok()) {
      return cudaErrorIllegalAddress;
    }
    CheckGenerationsReference(checks, check_count, changed);
    return cudaSuccess;
  }));
}

}  // namespace kvmill
