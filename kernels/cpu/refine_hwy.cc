// Rows of K are lanes and rows of V are rows, as in the encoder. A pass over a half finds codes and
// adds up what the fits need, 15 operations a vector; the fits are scalar, one a row. The tile is
// gathered and rotated again: encode's own is overwritten by V.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/targets.h"
#include "kernels/packed_codes.h"
#include "kernels/refine.h"
#include "kernels/refine_row.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/refine_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/gather-inl.h"
#include "kernels/cpu/quantize-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void RefineTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                 absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch) {
  RefineTilesReference(format, frame, tiles, results, scratch);
}

#else

// S and Z of some rows, as CodeOf and RefineSums want them.
struct RowVectors {
  Vf scale, scale_inverse, zero, zero_steps;
};
HWY_INLINE RowVectors LoadRows(const RefineWorkspace& ws, std::size_t i) {
  const Df d;
  return {hn::Load(d, ws.scale + i), hn::Load(d, ws.scale_inverse + i), hn::Load(d, ws.zero + i),
          hn::Load(d, ws.zero_steps + i)};
}
HWY_INLINE RowVectors SetRow(const RefineWorkspace& ws, std::size_t r) {
  const Df d;
  return {hn::Set(d, ws.scale[r]), hn::Set(d, ws.scale_inverse[r]), hn::Set(d, ws.zero[r]),
          hn::Set(d, ws.zero_steps[r])};
}

// The code of (x / T - Z) / S.
HWY_INLINE Vf CodeOf(Vf x, Vf across_inverse, const RowVectors& row, Vf code_max) {
  const Vf steps = hn::MulSub(hn::Mul(x, across_inverse), row.scale_inverse, row.zero_steps);
  return hn::Min(hn::Max(hn::Round(steps), hn::Zero(Df())), code_max);
}

// RowSums but for w, which is the same for all rows, and the sum of squared errors.
struct RefineSums {
  Vf wq, wqq, wx, wqx, error;

  HWY_INLINE RefineSums() : wq(hn::Zero(Df())), wqq(wq), wx(wq), wqx(wq), error(wq) {}

  HWY_INLINE void Add(Vf x, Vf q, Vf across, Vf across_square, const RowVectors& row) {
    const Vf weighted_code = hn::Mul(across_square, q);
    const Vf weighted_value = hn::Mul(across, x);
    wq = hn::Add(wq, weighted_code);
    wqq = hn::MulAdd(weighted_code, q, wqq);
    wx = hn::Add(wx, weighted_value);
    wqx = hn::MulAdd(weighted_value, q, wqx);
    const Vf moved = hn::MulSub(hn::MulAdd(q, row.scale, row.zero), across, x);
    error = hn::MulAdd(moved, moved, error);
  }
};

template <std::size_t kDim>
HWY_NOINLINE void SumKeys(RefineWorkspace& ws, std::size_t tokens, float largest_code) {
  const Df d;
  const Vf code_max = hn::Set(d, largest_code);
  for (std::size_t i = 0; i < kDim; i += 2 * kLanes) {  // Two vectors: a line of the cache.
    const RowVectors rows[2] = {LoadRows(ws, i), LoadRows(ws, i + kLanes)};
    RefineSums sums[2];
    for (std::size_t t = 0; t < tokens; ++t) {
      const Vf across = hn::Set(d, ws.across[t]);
      const Vf inverse = hn::Set(d, ws.across_inverse[t]);
      const Vf square = hn::Set(d, ws.across_square[t]);
      for (std::size_t j = 0; j < 2; ++j) {
        const Vf x = hn::Load(d, ws.tile + t * kDim + i + j * kLanes);
        sums[j].Add(x, CodeOf(x, inverse, rows[j], code_max), across, square, rows[j]);
      }
    }
    for (std::size_t j = 0; j < 2; ++j) {
      const std::size_t at = i + j * kLanes;
      hn::Store(sums[j].wq, d, ws.wq + at);
      hn::Store(sums[j].wqq, d, ws.wqq + at);
      hn::Store(sums[j].wx, d, ws.wx + at);
      hn::Store(sums[j].wqx, d, ws.wqx + at);
      hn::Store(sums[j].error, d, ws.error + at);
    }
  }
}

template <std::size_t kDim>
HWY_NOINLINE void SumValues(RefineWorkspace& ws, std::size_t tokens, float largest_code) {
  const Df d;
  const Vf code_max = hn::Set(d, largest_code);
  for (std::size_t t = 0; t < tokens; ++t) {
    const RowVectors row = SetRow(ws, t);
    RefineSums sums;
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const Vf x = hn::Load(d, ws.tile + t * kDim + i);
      const Vf q = CodeOf(x, hn::Load(d, ws.across_inverse + i), row, code_max);
      sums.Add(x, q, hn::Load(d, ws.across + i), hn::Load(d, ws.across_square + i), row);
    }
    ws.wq[t] = hn::GetLane(hn::SumOfLanes(d, sums.wq));
    ws.wqq[t] = hn::GetLane(hn::SumOfLanes(d, sums.wqq));
    ws.wx[t] = hn::GetLane(hn::SumOfLanes(d, sums.wx));
    ws.wqx[t] = hn::GetLane(hn::SumOfLanes(d, sums.wqx));
    ws.error[t] = hn::GetLane(hn::SumOfLanes(d, sums.error));
  }
}

// Codes of successive tokens collect in 32-bit words, as in QuantizeKeys.
template <std::size_t kDim, std::uint32_t kBits>
HWY_NOINLINE void PackKeys(RefineWorkspace& ws, std::size_t tokens, std::byte* out) {
  const Df d;
  const Di32 di;
  const Vf code_max = hn::Set(d, static_cast<float>((1u << kBits) - 1u));
  constexpr std::size_t kWordTokens = 32 / kBits;
  const std::size_t word_count = tokens / kWordTokens;
  for (std::size_t word = 0; word < word_count; ++word) {
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const RowVectors rows = LoadRows(ws, i);
      auto packed = hn::Zero(di);
      for (std::size_t n = kWordTokens; n-- > 0;) {  // The first token ends in the low bits.
        const std::size_t t = word * kWordTokens + n;
        const Vf x = hn::Load(d, ws.tile + t * kDim + i);
        const Vf q = CodeOf(x, hn::Set(d, ws.across_inverse[t]), rows, code_max);
        packed = hn::Or(hn::ShiftLeft<static_cast<int>(kBits)>(packed), hn::ConvertTo(di, q));
      }
      hn::Store(hn::BitCast(Du32(), packed), Du32(), ws.words + word * kDim + i);
    }
  }
  for (std::size_t channel = 0; channel < kDim; ++channel) {
    std::byte* row = out + channel * word_count * sizeof(std::uint32_t);
    for (std::size_t word = 0; word < word_count; ++word) {
      std::memcpy(row + word * sizeof(std::uint32_t), ws.words + word * kDim + channel,
                  sizeof(std::uint32_t));
    }
  }
}

template <std::size_t kDim, std::uint32_t kBits>
HWY_NOINLINE void PackValues(RefineWorkspace& ws, std::size_t tokens, std::byte* out) {
  const Df d;
  const hn::Rebind<std::uint8_t, Di32> d8;
  const Vf code_max = hn::Set(d, static_cast<float>((1u << kBits) - 1u));
  for (std::size_t t = 0; t < tokens; ++t) {
    const RowVectors row = SetRow(ws, t);
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const Vf x = hn::Load(d, ws.tile + t * kDim + i);
      const Vf q = CodeOf(x, hn::Load(d, ws.across_inverse + i), row, code_max);
      hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(Di32(), q)), d8, ws.codes + i);
    }
    PackRow<kDim, kBits>(ws.codes, out + t * (kDim * kBits / 8));
  }
}

void PutRow(RefineWorkspace& ws, std::size_t r, const RowScale& row) {
  ws.stored[r] = row;
  const float scale = Float16ToFloat(row.scale), zero = Float16ToFloat(row.zero);
  const float inverse = scale == 0 ? 0 : 1 / scale;  // Without a scale every code is 0.
  ws.scale[r] = scale;
  ws.scale_inverse[r] = inverse;
  ws.zero[r] = zero;
  ws.zero_steps[r] = zero * inverse;
}

bool Fit(const RefineWorkspace& ws, std::size_t r, double w, RowScale& row) {
  return FitRow({w, static_cast<double>(ws.wq[r]), static_cast<double>(ws.wqq[r]),
                 static_cast<double>(ws.wx[r]), static_cast<double>(ws.wqx[r])},
                row);
}

template <std::size_t kDim, DType kDType>
void GatherAgain(const HeadPages& pages, std::size_t tokens, bool rotate, RefineWorkspace& ws) {
  RowWalk<const std::byte> walk(pages);
  for (std::size_t t = 0; t < tokens; t += kBlockTokens) {
    GatherRows<kDim, kBlockTokens, kDType>(walk, pages.channel_stride_bytes, rotate,
                                           t + kBlockTokens < tokens, ws.tile + t * kDim);
  }
}

template <std::size_t kDim, Half kHalf>
void RefineHalf(const HeadPages& pages, std::size_t tokens, std::uint32_t bits, bool rotate,
                const HalfRecord& out, RefineWorkspace& ws) {
  if (pages.dtype == DType::kFloat16) {
    GatherAgain<kDim, DType::kFloat16>(pages, tokens, rotate, ws);
  } else {
    GatherAgain<kDim, DType::kBFloat16>(pages, tokens, rotate, ws);
  }
  constexpr bool kKeys = kHalf == Half::kKeys;
  const std::size_t rows = kKeys ? kDim : tokens, columns = kKeys ? tokens : kDim;
  double w = 0;
  for (std::size_t c = 0; c < columns; ++c) {
    const float across = Float16At(out.across, c);
    ws.across[c] = across;
    ws.across_inverse[c] = 1 / across;
    ws.across_square[c] = across * across;
    w += static_cast<double>(ws.across_square[c]);
  }
  const auto code_max = static_cast<float>((1u << bits) - 1u);
  const auto sum = kKeys ? SumKeys<kDim> : SumValues<kDim>;
  for (std::size_t r = 0; r < rows; ++r) {
    ws.encoded[r] = {Float16BitsAt(out.scale, r), Float16BitsAt(out.zero, r)};
    PutRow(ws, r, ws.encoded[r]);
  }
  sum(ws, tokens, code_max);
  for (std::size_t r = 0; r < rows; ++r) {
    ws.error_before[r] = ws.error[r];
    RowScale row = ws.encoded[r];
    if (Fit(ws, r, w, row)) PutRow(ws, r, row);
  }
  sum(ws, tokens, code_max);
  for (std::size_t r = 0; r < rows; ++r) {
    RowScale row = ws.stored[r];
    if (!(ws.error[r] < ws.error_before[r])) {
      PutRow(ws, r, ws.encoded[r]);
    } else if (Fit(ws, r, w, row)) {
      PutRow(ws, r, row);
    }
    PutFloat16(out.scale, r, ws.stored[r].scale);
    PutFloat16(out.zero, r, ws.stored[r].zero);
  }
  if constexpr (kKeys) {
    bits == 2 ? PackKeys<kDim, 2>(ws, tokens, out.codes) : PackKeys<kDim, 4>(ws, tokens, out.codes);
  } else {
    bits == 2 ? PackValues<kDim, 2>(ws, tokens, out.codes)
              : PackValues<kDim, 4>(ws, tokens, out.codes);
  }
}

template <std::size_t kDim>
void RefineTile(const TileFormat& format, bool rotate, const EncodeArgs& args,
                RefineWorkspace& ws) {
  const RecordLayout l = LayoutOf(format);
  RefineHalf<kDim, Half::kKeys>(args.k, format.group, format.key_bits, rotate,
                                {args.record + l.k_codes, args.record + l.k_scale,
                                 args.record + l.k_zero, args.record + l.k_token},
                                ws);
  RefineHalf<kDim, Half::kValues>(args.v, format.group, format.value_bits, rotate,
                                  {args.record + l.v_codes, args.record + l.v_scale,
                                   args.record + l.v_zero, args.record + l.v_channel},
                                  ws);
}

void RefineTiles(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                 absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch) {
  auto& ws = *reinterpret_cast<RefineWorkspace*>(scratch.data());
  const auto refine = format.head_dim == 64    ? RefineTile<64>
                      : format.head_dim == 128 ? RefineTile<128>
                                               : RefineTile<256>;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (results[i] == EncodeResult::kTile) refine(format, frame == Frame::kModel, tiles[i], ws);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(RefineTiles);

void RefineTilesCpu(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                    absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch) {
  HWY_DYNAMIC_DISPATCH(RefineTiles)(format, frame, tiles, results, scratch);
}

}  // namespace kvmill
#endif  // HWY_ONCE
