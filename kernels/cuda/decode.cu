// Decode to 16-bit engine pages: the record comes into shared memory by asynchronous copies, K and
// V are decoded in registers (8x8 values a thread, see tile_registers.h), rotated back there and
// scattered.
//
// Grid: a block per tile, of head_dim * group / 64 threads. Shared memory: the record, up to 35
// KiB. Bound: the bytes of the record read and of the 16-bit rows written.
#include <climits>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/tile_registers.h"
#include "kernels/cuda_formats.h"
#include "kernels/decode.h"
#include "kernels/tile_format.h"

namespace kvmill {
namespace device {
namespace {

struct DecodeParameters {
  const DecodeArgs* tiles;
  RecordLayout layout;
  int key_bits;
  int value_bits;
  bool rotate;
};

// Ends with a barrier.
KVMILL_DEVICE void LoadRecord(const std::byte* from, std::byte* to, unsigned bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    for (unsigned i = 16 * ThreadIndex(); i < bytes; i += 16 * BlockThreads()) {
      CpAsync16(to + i, from + i);
    }
    CpAsyncCommit();
    CpAsyncWait<0>();
  } else {
    for (unsigned i = ThreadIndex(); i < bytes; i += BlockThreads()) to[i] = from[i];
  }
  SyncThreads();
}

// Eight codes of `bits`, the first in the low bits.
KVMILL_DEVICE std::uint32_t LoadCodes(const std::byte* at, int bits) {
  return bits == 4 ? *reinterpret_cast<const std::uint32_t*>(at)
                   : *reinterpret_cast<const std::uint16_t*>(at);
}

// (q * S + Z) * T. Rows are channels of keys, tokens of values; T belongs to the other axis.
template <typename Shape, bool kKeys>
KVMILL_DEVICE void DecodeHalf(const TilePlace<Shape>& place, const std::byte* codes, int bits,
                              const std::uint16_t* scales, const std::uint16_t* zeros,
                              const std::uint16_t* across, bool rotate,
                              const MutableHeadPages& pages) {
  const int first_row = kKeys ? place.channel : place.token;
  const int first_across = kKeys ? place.token : place.channel;
  const int row_bytes = (kKeys ? Shape::kGroup : Shape::kDim) * bits / 8;
  const std::byte* row = codes + first_row * row_bytes + first_across * bits / 8;
  const std::uint32_t code_mask = (1u << bits) - 1u;
  float t[8];
  KVMILL_UNROLL
  for (int c = 0; c < 8; ++c) t[c] = HalfToFloat(across[first_across + c]);
  Tile x;
  KVMILL_UNROLL
  for (int r = 0; r < 8; ++r, row += row_bytes) {
    const std::uint32_t word = LoadCodes(row, bits);
    const float scale = HalfToFloat(scales[first_row + r]);
    const float zero = HalfToFloat(zeros[first_row + r]);
    KVMILL_UNROLL
    for (int c = 0; c < 8; ++c) {
      const auto code = static_cast<float>((word >> (c * bits)) & code_mask);
      (kKeys ? x[c][r] : x[r][c]) = (code * scale + zero) * t[c];
    }
  }
  if (rotate) RotateTile<Shape>(x);
  ScatterTile(pages, place, x);
}

template <int kDim, int kGroup>
KVMILL_KERNEL(kDim* kGroup / 64, 512 * 64 / (kDim * kGroup))
DecodeKernel(DecodeParameters p) {
  using Shape = TileShape<kDim, kGroup>;
  KVMILL_DYNAMIC_SHARED(std::byte, record);
  const auto halves = [record](std::size_t offset) {
    return reinterpret_cast<const std::uint16_t*>(record + offset);
  };
  const TilePlace<Shape> place;
  const DecodeArgs args = p.tiles[BlockIndex()];
  LoadRecord(args.record, record, static_cast<unsigned>(p.layout.bytes));
  DecodeHalf<Shape, true>(place, record + p.layout.k_codes, p.key_bits, halves(p.layout.k_scale),
                          halves(p.layout.k_zero), halves(p.layout.k_token), p.rotate, args.k);
  DecodeHalf<Shape, false>(place, record + p.layout.v_codes, p.value_bits, halves(p.layout.v_scale),
                           halves(p.layout.v_zero), halves(p.layout.v_channel), p.rotate, args.v);
}

template <int kDim, int kGroup>
absl::Status LaunchDecode(const DecodeParameters& p, unsigned blocks, CUstream_st* stream) {
  return Launch(DecodeKernel<kDim, kGroup>, {blocks, kDim * kGroup / 64, p.layout.bytes}, stream,
                p);
}

}  // namespace
}  // namespace device

absl::Status DecodeTilesCuda(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                             std::size_t tile_count, CUstream_st* stream) {
  const absl::Status valid = ValidateCudaTileFormat(format);
  if (!valid.ok()) return valid;
  if (tile_count == 0) return absl::OkStatus();
  if (tile_count > INT_MAX) return absl::InvalidArgumentError("more tiles than a grid has blocks");
  const device::DecodeParameters p{tiles, LayoutOf(format), format.key_bits, format.value_bits,
                                   frame == Frame::kModel};
  const auto blocks = static_cast<unsigned>(tile_count);
  const bool long_group = format.group == 128;
  switch (format.head_dim) {
    case 64:
      return long_group ? device::LaunchDecode<64, 128>(p, blocks, stream)
                        : device::LaunchDecode<64, 64>(p, blocks, stream);
    case 128:
      return long_group ? device::LaunchDecode<128, 128>(p, blocks, stream)
                        : device::LaunchDecode<128, 64>(p, blocks, stream);
    default:
      return long_group ? device::LaunchDecode<256, 128>(p, blocks, stream)
                        : device::LaunchDecode<256, 64>(p, blocks, stream);
  }
}

}  // namespace kvmill
