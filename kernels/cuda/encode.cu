// Encode, one pass: a block of threads gathers one half of a tile into registers, rotates,
// normalizes, quantizes and packs it there, K and then V; the record is staged in shared memory and
// written once.
//
// Grid: a block per tile, of head_dim * group / 64 threads, 64 values each. Shared memory:
// EncodeShared and the record, 10 to 80 KiB. Bounds: docs/perf.md, "CUDA".
#include <climits>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/normalize.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/tile_registers.h"
#include "kernels/cuda_formats.h"
#include "kernels/encode.h"
#include "kernels/tile_format.h"

namespace kvmill {
namespace device {
namespace {

// A magnitude beyond which no tile can hold a half; see kernels/cpu/encode_hwy.cc.
constexpr float kMagnitudeMax = 1e14f;

struct EncodeParameters {
  const EncodeArgs* tiles;
  EncodeResult* results;
  RecordLayout layout;
  int key_bits;
  int value_bits;
  bool rotate;
};

template <typename Shape>
struct EncodeShared {
  union {
    NormalizeShared<Shape> normalize;
    QuantizeShared<Shape> quantize;
  };
  unsigned largest[Shape::kWarps];  // Magnitudes of the input, as 16 bits.
};

// Where the staged record begins.
template <typename Shape>
constexpr std::size_t kRecordOffset = (sizeof(EncodeShared<Shape>) + 15) / 16 * 16;

template <typename Shape, Half kHalf>
KVMILL_DEVICE EncodeResult EncodeHalf(EncodeShared<Shape>& shared, const TilePlace<Shape>& place,
                                      const HeadPages& pages, int bits, bool rotate,
                                      const HalfRecord& out) {
  Tile x;
  const unsigned own_largest = ReduceMax(kAllLanes, GatherTile(pages, place, x));
  if (LaneIndex() == 0) shared.largest[WarpIndex()] = own_largest;
  SyncThreads();
  const unsigned lane = LaneIndex();
  const unsigned largest_bits =
      ReduceMax(kAllLanes, shared.largest[lane < Shape::kWarps ? lane : 0]);
  const bool fp16 = pages.dtype == DType::kFloat16;
  if (largest_bits >= (fp16 ? 0x7C00u : 0x7F80u)) return EncodeResult::kNonFinite;
  const auto half = static_cast<std::uint16_t>(largest_bits);
  const float largest = fp16 ? HalfToFloat(half) : BFloat16ToFloat(half);
  if (largest > kMagnitudeMax) return EncodeResult::kRaw;
  const float unit = 1.0f / Max(largest, 1e-30f);

  if (rotate) RotateTile<Shape>(x);
  const KeptScales kept = Normalizer<Shape, kHalf>(shared.normalize, place, x).Run();
  const bool fits = Quantizer<Shape, kHalf>(shared.quantize, place, bits, unit, out).Run(x, kept);
  return fits ? EncodeResult::kTile : EncodeResult::kRaw;
}

// `to` in units as large as its alignment allows.
KVMILL_DEVICE void CopyRecord(const std::byte* from, std::byte* to, unsigned bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (address % 16 == 0) {
    for (unsigned i = 16 * ThreadIndex(); i < bytes; i += 16 * BlockThreads()) {
      Store16(to + i, Load16(from + i));
    }
  } else if (address % 4 == 0) {
    for (unsigned i = 4 * ThreadIndex(); i < bytes; i += 4 * BlockThreads()) {
      *reinterpret_cast<std::uint32_t*>(to + i) = *reinterpret_cast<const std::uint32_t*>(from + i);
    }
  } else {
    for (unsigned i = ThreadIndex(); i < bytes; i += BlockThreads()) to[i] = from[i];
  }
}

template <int kDim, int kGroup>
KVMILL_KERNEL(kDim* kGroup / 64, 512 * 64 / (kDim * kGroup))
EncodeKernel(EncodeParameters p) {
  using Shape = TileShape<kDim, kGroup>;
  KVMILL_DYNAMIC_SHARED(std::byte, memory);
  auto& shared = *reinterpret_cast<EncodeShared<Shape>*>(memory);
  std::byte* const record = memory + kRecordOffset<Shape>;
  const auto halves = [record](std::size_t offset) {
    return reinterpret_cast<std::uint16_t*>(record + offset);
  };
  const TilePlace<Shape> place;
  const EncodeArgs args = p.tiles[BlockIndex()];

  const HalfRecord k_out{record + p.layout.k_codes, halves(p.layout.k_scale),
                         halves(p.layout.k_zero), halves(p.layout.k_token)};
  const EncodeResult k =
      EncodeHalf<Shape, Half::kKeys>(shared, place, args.k, p.key_bits, p.rotate, k_out);
  EncodeResult result = k;
  // Also after a K that stays raw: a value that is not finite must not go unseen.
  if (k != EncodeResult::kNonFinite) {
    SyncThreads();  // `largest` is read.
    const HalfRecord v_out{record + p.layout.v_codes, halves(p.layout.v_scale),
                           halves(p.layout.v_zero), halves(p.layout.v_channel)};
    const EncodeResult v =
        EncodeHalf<Shape, Half::kValues>(shared, place, args.v, p.value_bits, p.rotate, v_out);
    if (v != EncodeResult::kTile) result = v;
  }
  if (result == EncodeResult::kTile) {
    CopyRecord(record, args.record, static_cast<unsigned>(p.layout.bytes));
  }
  if (ThreadIndex() == 0) p.results[BlockIndex()] = result;
}

template <int kDim, int kGroup>
absl::Status LaunchEncode(const EncodeParameters& p, unsigned blocks, CUstream_st* stream) {
  using Shape = TileShape<kDim, kGroup>;
  return Launch(EncodeKernel<kDim, kGroup>,
                {blocks, Shape::kThreads, kRecordOffset<Shape> + p.layout.bytes}, stream, p);
}

}  // namespace
}  // namespace device

absl::Status EncodeTilesCuda(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                             std::size_t tile_count, EncodeResult* results, CUstream_st* stream) {
  const absl::Status valid = ValidateCudaTileFormat(format);
  if (!valid.ok()) return valid;
  if (tile_count == 0) return absl::OkStatus();
  if (tile_count > INT_MAX) return absl::InvalidArgumentError("more tiles than a grid has blocks");
  const device::EncodeParameters p{tiles,           results,           LayoutOf(format),
                                   format.key_bits, format.value_bits, frame == Frame::kModel};
  const auto blocks = static_cast<unsigned>(tile_count);
  const bool long_group = format.group == 128;
  switch (format.head_dim) {
    case 64:
      return long_group ? device::LaunchEncode<64, 128>(p, blocks, stream)
                        : device::LaunchEncode<64, 64>(p, blocks, stream);
    case 128:
      return long_group ? device::LaunchEncode<128, 128>(p, blocks, stream)
                        : device::LaunchEncode<128, 64>(p, blocks, stream);
    default:
      return long_group ? device::LaunchEncode<256, 128>(p, blocks, stream)
                        : device::LaunchEncode<256, 64>(p, blocks, stream);
  }
}

}  // namespace kvmill
