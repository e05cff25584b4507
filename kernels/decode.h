// Decode: a record to 16-bit engine pages, or to fp32 rows.
//
// The reference decoder in the rotated frame is bit-exact: (q * S + Z) * T in fp32, without FMA
// contraction. Un-rotation (frame kModel) multiplies by H once more; reference and cpu agree within
// 1e-6 relative in fp32, and so does cuda before it rounds. fp32 to 16 bits rounds to nearest even.
//
// Pure functions over the caller's memory: thread-safe, no allocation, no global state. A record is
// plain bytes: any bytes of the right length decode to something, so callers verify checksums
// before.
#ifndef KVMILL_KERNELS_DECODE_H_
#define KVMILL_KERNELS_DECODE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/encode.h"
#include "kernels/engine_pages.h"
#include "kernels/tile_format.h"

namespace kvmill {

struct DecodeArgs {
  const std::byte* record = nullptr;  // RecordBytes(format) bytes, any alignment.
  MutableHeadPages k;                 // format.group tokens of format.head_dim channels.
  MutableHeadPages v;
};

std::size_t DecodeScratchBytes(const TileFormat& format);

// `frame` is the frame of the output: kModel un-rotates, kRotated leaves the tile as it is stored.
void DecodeTilesReference(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                          absl::Span<std::byte> scratch);
void DecodeTilesCpu(const TileFormat& format, Frame frame, absl::Span<const DecodeArgs> tiles,
                    absl::Span<std::byte> scratch);

// The same on a device, as EncodeTilesCuda does it: everything that `tiles` names lies there, one
// kernel is enqueued, same errors. Frame kRotated is bit-exact but for the payload of NaN.
absl::Status DecodeTilesCuda(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                             std::size_t tile_count, CUstream_st* stream);

// The same into fp32, token-major [group, head_dim] each; `k` and `v` hold group * head_dim floats.
void DecodeTileToFloatReference(const TileFormat& format, Frame frame, const std::byte* record,
                                absl::Span<float> k, absl::Span<float> v);
void DecodeTileToFloatCpu(const TileFormat& format, Frame frame, const std::byte* record,
                          absl::Span<float> k, absl::Span<float> v);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_DECODE_H_
