#include <cstddef>

#include "kernels/cpu/targets.h"
#include "kernels/encode.h"
#include "kernels/encode_bound.h"
#include "kernels/refine.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/encode_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/gather-inl.h"
#include "kernels/cpu/normalize-inl.h"
#include "kernels/cpu/quantize-inl.h"
#include "kernels/cpu/refine-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// No vectors: the reference is as good.
void EncodeTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                 absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeTilesReference(format, frame, tiles, results, scratch);
}
void EncodeRefinedTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                        absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeRefinedTilesReference(format, frame, tiles, results, scratch);
}
bool RunEncodePasses(const TileFormat&, absl::Span<std::byte>) { return false; }

#else

// A magnitude beyond which no tile can hold a half: the largest decoded value is 16 * 65504 * 22026
// = 2.3e10, and a rotated row has a value of at least the largest input / sqrt(head_dim). Far below
// where fp32 moments overflow.
constexpr float kMagnitudeMax = 1e14f;

template <std::size_t kDim, DType kDType>
std::uint16_t GatherTile(const HeadPages& pages, std::size_t tokens, bool rotate,
                         EncodeWorkspace& ws) {
  OpenTile<kDim>(ws, tokens);
  RowWalk<const std::byte> walk(pages);
  std::uint16_t largest = 0;
  for (std::size_t t = 0; t < tokens; t += kBlockTokens) {
    const std::uint16_t bits = GatherRows<kDim, kBlockTokens, kDType>(
        walk, pages.channel_stride_bytes, rotate, t + kBlockTokens < tokens, ws.tile + t * kDim);
    largest = bits > largest ? bits : largest;
    AddPlainMoments<kDim>(ws, t);
  }
  return largest;
}

// False if a tile cannot hold the half.
template <std::size_t kDim, Half kHalf, std::uint32_t kBits, bool kRefine>
bool QuantizeHalf(std::size_t tokens, float unit, const HalfRecord& out, EncodeWorkspace& ws) {
  if constexpr (kHalf == Half::kKeys) {
    if (!QuantizeKeys<kDim, kBits, kRefine>(ws, tokens, unit, out)) return false;
    if constexpr (kRefine) RefineKeys<kDim, kBits>(ws, tokens, out);
  } else {
    if (!QuantizeValues<kDim, kBits, kRefine>(ws, tokens, unit, out)) return false;
    if constexpr (kRefine) RefineValues<kDim, kBits>(ws, tokens, out);
  }
  return true;
}

template <std::size_t kDim, Half kHalf, bool kRefine>
EncodeResult EncodeHalf(const HeadPages& pages, std::size_t tokens, std::uint32_t bits, bool rotate,
                        const HalfRecord& out, EncodeWorkspace& ws) {
  const bool fp16 = pages.dtype == DType::kFloat16;
  const std::uint16_t largest_bits =
      fp16 ? GatherTile<kDim, DType::kFloat16>(pages, tokens, rotate, ws)
           : GatherTile<kDim, DType::kBFloat16>(pages, tokens, rotate, ws);
  if (largest_bits >= (fp16 ? 0x7C00 : 0x7F80)) return EncodeResult::kNonFinite;
  const float largest = ToFloat(largest_bits, pages.dtype);
  if (largest > kMagnitudeMax) return EncodeResult::kRaw;
  const float unit = 1.0f / (largest > 1e-30f ? largest : 1e-30f);

  Normalize<kDim, kHalf>(ws, tokens);
  bool fits = false;
  if (bits == 2) {
    fits = QuantizeHalf<kDim, kHalf, 2, kRefine>(tokens, unit, out, ws);
  } else if (bits == 4) {
    fits = QuantizeHalf<kDim, kHalf, 4, kRefine>(tokens, unit, out, ws);
  } else if constexpr (kHalf == Half::kKeys) {
    fits = QuantizeHalf<kDim, kHalf, 3, kRefine>(tokens, unit, out, ws);
  }
  return fits ? EncodeResult::kTile : EncodeResult::kRaw;
}

template <std::size_t kDim, bool kRefine>
EncodeResult EncodeTile(const TileFormat& format, bool rotate, const EncodeArgs& args,
                        EncodeWorkspace& ws) {
  const RecordLayout l = LayoutOf(format);
  const EncodeResult k =
      EncodeHalf<kDim, Half::kKeys, kRefine>(args.k, format.group, format.key_bits, rotate,
                                             {args.record + l.k_codes, args.record + l.k_scale,
                                              args.record + l.k_zero, args.record + l.k_token},
                                             ws);
  if (k == EncodeResult::kNonFinite) return k;
  // Also after a K that stays raw: a value that is not finite must not go unseen.
  const EncodeResult v =
      EncodeHalf<kDim, Half::kValues, kRefine>(args.v, format.group, format.value_bits, rotate,
                                               {args.record + l.v_codes, args.record + l.v_scale,
                                                args.record + l.v_zero, args.record + l.v_channel},
                                               ws);
  return v == EncodeResult::kTile ? k : v;
}

EncodeWorkspace& WorkspaceIn(absl::Span<std::byte> scratch) {
  return *reinterpret_cast<EncodeWorkspace*>(scratch.data());
}

template <bool kRefine>
void EncodeTilesWith(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                     absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  const bool rotate = frame == Frame::kModel;
  EncodeWorkspace& ws = WorkspaceIn(scratch);
  const auto encode = format.head_dim == 64    ? EncodeTile<64, kRefine>
                      : format.head_dim == 128 ? EncodeTile<128, kRefine>
                                               : EncodeTile<256, kRefine>;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    results[i] = encode(format, rotate, tiles[i], ws);
  }
}

void EncodeTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                 absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeTilesWith<false>(format, frame, tiles, results, scratch);
}

void EncodeRefinedTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                        absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeTilesWith<true>(format, frame, tiles, results, scratch);
}

template <std::size_t kDim>
void RunPasses(EncodeWorkspace& ws, std::size_t tokens) {
  for (int i = 0; i < kNormalizeIterations; ++i) FusedPass<kDim, Half::kKeys>(ws, tokens);
  for (int i = 0; i < kNormalizeIterations; ++i) FusedPass<kDim, Half::kValues>(ws, tokens);
}

bool RunEncodePasses(const TileFormat& format, absl::Span<std::byte> scratch) {
  EncodeWorkspace& ws = WorkspaceIn(scratch);
  const auto run = format.head_dim == 64    ? RunPasses<64>
                   : format.head_dim == 128 ? RunPasses<128>
                                            : RunPasses<256>;
  run(ws, format.group);
  return true;
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(EncodeTiles);
HWY_EXPORT(EncodeRefinedTiles);
HWY_EXPORT(RunEncodePasses);

void EncodeTilesCpu(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                    absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  HWY_DYNAMIC_DISPATCH(EncodeTiles)(format, frame, tiles, results, scratch);
}

void EncodeRefinedTilesCpu(const TileFormat& format, Frame frame,
                           absl::Span<const EncodeArgs> tiles, absl::Span<EncodeResult> results,
                           absl::Span<std::byte> scratch) {
  HWY_DYNAMIC_DISPATCH(EncodeRefinedTiles)(format, frame, tiles, results, scratch);
}

bool RunEncodePassesCpu(const TileFormat& format, absl::Span<std::byte> scratch) {
  return HWY_DYNAMIC_DISPATCH(RunEncodePasses)(format, scratch);
}

}  // namespace kvmill
#endif  // HWY_ONCE
