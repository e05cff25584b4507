// Encode: engine pages of one (block, KV head) to a record.
//
// Rotate (x·H), variance-normalize on both axes, quantize, absorb scales, pack: arXiv:2606.03458,
// sections as in docs/formats.md. All arithmetic is fp32. Implementations: `Reference` is the
// oracle (obvious loops); `Cpu` is vectorized with runtime dispatch; `Cuda` runs on a device. They
// agree in codes up to 1e-5 of them (each off by one) and in decoded tiles up to 2e-2 relative
// Frobenius (p99 2.5e-3): records are never compared bit by bit between implementations.
//
// Pure functions over the caller's memory: thread-safe, no allocation, no global state.
#ifndef KVMILL_KERNELS_ENCODE_H_
#define KVMILL_KERNELS_ENCODE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/engine_pages.h"
#include "kernels/tile_format.h"

struct CUstream_st;  // What a cudaStream_t points to.

namespace kvmill {

// Iterations of the variance normalization in the shipped configuration.
inline constexpr int kNormalizeIterations = 8;

// A tile whose fp16 S, Z, T move the decoded values by more than this (relative Frobenius distance
// to decoding with the fp32 S, Z, T; K and V each on their own), or are not finite, cannot hold the
// head: it stays raw.
inline constexpr float kScaleRoundingErrorMax = 1e-2f;

enum class Frame : std::uint8_t {
  kModel = 0,    // As the model computed it (post-RoPE): encode rotates, decode rotates back.
  kRotated = 1,  // Already multiplied by H: neither rotates.
};

struct EncodeArgs {
  HeadPages k;  // format.group tokens of format.head_dim channels.
  HeadPages v;
  std::byte* record = nullptr;  // RecordBytes(format) bytes, any alignment; not in the pages.
};

enum class EncodeResult : std::uint8_t {
  kTile,       // `record` is complete.
  kRaw,        // A tile cannot hold these values; `record` is unspecified.
  kNonFinite,  // NaN or infinity in K or V, see FindNonFinite; `record` is unspecified.
};

// Scratch of one encode, for any implementation: aligned to 64 bytes, one per thread, reused from
// call to call. Its contents mean nothing between calls.
std::size_t EncodeScratchBytes(const TileFormat& format);

// `results[i]` says what became of `tiles[i]`; sizes must match. `format` must be valid
// (ValidateTileFormat).
void EncodeTilesReference(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                          absl::Span<EncodeResult> results, absl::Span<std::byte> scratch);
void EncodeTilesCpu(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                    absl::Span<EncodeResult> results, absl::Span<std::byte> scratch);

// The same on a device, where `tiles`, `results` and everything that `tiles` points to (pages,
// records, and the lists of page pointers) must be readable and writable; it stays so until the
// stream has got there. Enqueues one kernel: no allocation, no synchronization, legal while the
// stream is captured into a graph. INVALID_ARGUMENT for a bad format, INTERNAL when the launch
// fails, UNIMPLEMENTED in builds without CUDA and for 3-bit keys (kernels/cuda_formats.h).
absl::Status EncodeTilesCuda(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                             std::size_t tile_count, EncodeResult* results, CUstream_st* stream);

// Where the first NaN or infinity of one head is: by token; in a token K before V, then by channel.
// Slow path, for the error message.
struct NonFinite {
  bool found = false;
  bool in_value = false;    // In V; otherwise in K.
  std::uint32_t token = 0;  // Of the block.
  std::uint32_t channel = 0;
};
NonFinite FindNonFinite(const HeadPages& k, const HeadPages& v, std::uint32_t token_count,
                        std::uint32_t head_dim);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ENCODE_H_
