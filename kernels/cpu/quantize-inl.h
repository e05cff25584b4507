// Quantization, absorbed scales and packing of a normalized tile, and the rule of what a tile
// cannot hold. Included once per SIMD target.
//
// Everything here is divided and rounded as the reference does it. Where all scales are clamped to
// the same value, inputs of few bits lie exactly in the middle of two codes, and only the same
// roundings fall to the same side: with reciprocals one half in a hundred of real keys and values
// differed in a code.
#if defined(KVMILL_KERNELS_CPU_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_QUANTIZE_INL_H_
#undef KVMILL_KERNELS_CPU_QUANTIZE_INL_H_
#else
#define KVMILL_KERNELS_CPU_QUANTIZE_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/normalize-inl.h"
#include "kernels/cpu/three_bits-inl.h"
#include "kernels/cpu/vectors-inl.h"
#include "kernels/cpu/workspace.h"
#include "kernels/encode.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// Where the sections of one half lie in the record.
struct HalfRecord {
  std::byte* codes;
  std::byte* scale;   // S
  std::byte* zero;    // Z
  std::byte* across;  // T
};

// Rounds `values` to fp16 into `out` and, as fp32 again, into `stored`. Returns the largest
// magnitude.
HWY_INLINE float StoreAsHalf(const float* values, std::size_t count, std::byte* out,
                             float* stored) {
  const Df d;
  Vf largest = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf v = hn::Load(d, values + i);
    const Vu16 half = FloatToHalf<DType::kFloat16>(v);
    StoreHalf(half, out + 2 * i);
    hn::Store(HalfToFloat<DType::kFloat16>(half), d, stored + i);
    largest = hn::Max(largest, hn::Abs(v));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// The first value that rounds to infinity in fp16.
inline constexpr float kHalfOverflow = 65520.0f;

// Sums that decide whether the fp16 vectors are exact enough: squares of the decoded values, and of
// how far they move.
struct RoundingError {
  Vf moved, values;

  HWY_INLINE RoundingError() : moved(hn::Zero(Df())), values(hn::Zero(Df())) {}

  // One decoded value is inner * across, with fp32 vectors and as stored in fp16.
  HWY_INLINE void Add(Vf inner, Vf across, Vf stored_inner, Vf stored_across) {
    const Vf exact = hn::Mul(inner, across);
    const Vf error = hn::NegMulAdd(stored_inner, stored_across, exact);
    moved = hn::MulAdd(error, error, moved);
    values = hn::MulAdd(exact, exact, values);
  }
  HWY_INLINE bool IsSmall() const {
    const Df d;
    constexpr float kLimit = kScaleRoundingErrorMax * kScaleRoundingErrorMax;
    // As a product, so that 0/0 counts as 0.
    return hn::GetLane(hn::SumOfLanes(d, moved)) <= kLimit * hn::GetLane(hn::SumOfLanes(d, values));
  }
};

// x / y, correctly rounded, from the correctly rounded 1 / y: one step of Newton's method on the
// quotient, whose residual a fused multiply-add computes exactly.
HWY_INLINE Vf Divide(Vf x, Vf y, Vf inverse) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  (void)inverse;
  return hn::Div(x, y);  // No fused multiply-add.
#else
  const Vf quotient = hn::Mul(x, inverse);
  return hn::MulAdd(hn::NegMulAdd(quotient, y, x), inverse, quotient);
#endif
}

// The inverse of the kept scales of an axis, into `weight`.
HWY_INLINE void InvertBestScale(AxisState& axis, std::size_t count) {
  const Df d;
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf scale = hn::Load(d, axis.best_scale + i);
    hn::Store(hn::Div(hn::Set(d, 1.0f), scale), d, axis.weight + i);
  }
}

// From the kept scales across the rows: T into the record, and T times `unit` (exact and as stored)
// for RoundingError. `unit` brings the largest value near 1, so that squares neither overflow nor
// vanish. False if one overflows fp16.
HWY_INLINE bool AbsorbAcross(AbsorbedScales& a, const AxisState& axis, std::size_t count,
                             float unit, std::byte* out) {
  const Df d;
  const float largest = StoreAsHalf(axis.best_scale, count, out, a.stored_across);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf scale = hn::Load(d, axis.best_scale + i);
    hn::Store(hn::Mul(scale, hn::Set(d, unit)), d, a.across + i);
    hn::Store(hn::Mul(hn::Load(d, a.stored_across + i), hn::Set(d, unit)), d, a.stored_across + i);
  }
  return largest < kHalfOverflow;
}

// For the rows first..last, whose smallest and largest values are in low and high, divided by the
// scales across already: divides them by the row's own scale as well, and makes step, S and Z of
// them, S and Z also into the record. False if one overflows fp16.
HWY_INLINE bool AbsorbRows(AbsorbedScales& a, const AxisState& rows, std::size_t first,
                           std::size_t last, std::uint32_t code_max, const HalfRecord& out) {
  const Df d;
  for (std::size_t i = first; i < last; i += kLanes) {
    const Vf row_scale = hn::Load(d, rows.best_scale + i);
    const Vf inverse = hn::Load(d, rows.weight + i);
    // Division is monotonic: the smallest quotient is that of the smallest value.
    const Vf low = Divide(hn::Load(d, a.low + i), row_scale, inverse);
    const Vf high = Divide(hn::Load(d, a.high + i), row_scale, inverse);
    const Vf range = hn::Sub(high, low);
    const Vf step =
        hn::Max(hn::Div(range, hn::Set(d, static_cast<float>(code_max))), hn::Set(d, 1e-10f));
    hn::Store(low, d, a.low + i);
    hn::Store(step, d, a.step + i);
    hn::Store(hn::Div(hn::Set(d, 1.0f), step), d, a.step_inverse + i);
    hn::Store(hn::Mul(row_scale, step), d, a.scale + i);
    hn::Store(hn::Mul(row_scale, low), d, a.zero + i);
  }
  const std::size_t count = last - first;
  const float scale_max =
      StoreAsHalf(a.scale + first, count, out.scale + 2 * first, a.stored_scale + first);
  const float zero_max =
      StoreAsHalf(a.zero + first, count, out.zero + 2 * first, a.stored_zero + first);
  return scale_max < kHalfOverflow && zero_max < kHalfOverflow;
}

// clamp(round_half_even(steps), 0, 2^b - 1) with steps = (y - lo) / step.
template <std::uint32_t kBits>
HWY_INLINE hn::Vec<Di32> CodesOf(Vf steps) {
  const Di32 di;
  const auto q = hn::NearestInt(steps);
  return hn::Min(hn::Max(q, hn::Zero(di)), hn::Set(di, (1 << kBits) - 1));
}

// What a fit of S and Z to codes q needs (refine-inl.h): sums over steps u and q with weights T^2.
struct StepSums {
  Vf q, qq, qu, u, uu;

  HWY_INLINE StepSums() : q(hn::Zero(Df())), qq(q), qu(q), u(q), uu(q) {}

  HWY_INLINE void Add(Vf steps, Vf code, Vf weight) {
    const Vf weighted_code = hn::Mul(weight, code);
    const Vf weighted_steps = hn::Mul(weight, steps);
    q = hn::Add(q, weighted_code);
    qq = hn::MulAdd(weighted_code, code, qq);
    qu = hn::MulAdd(weighted_code, steps, qu);
    u = hn::Add(u, weighted_steps);
    uu = hn::MulAdd(weighted_steps, steps, uu);
  }
};

// T^2 and the sum of it, for the kept scales across the rows.
HWY_INLINE void WeighColumns(RefinedRows& r, const AxisState& axis, std::size_t count) {
  const Df d;
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf scale = hn::Load(d, axis.best_scale + i);
    hn::Store(hn::Mul(scale, scale), d, r.weight + i);
  }
  r.weight_inverse = 1.0f / Sum(r.weight, count);
}

// The sums of kBlockTokens vectors.
HWY_INLINE void AddLanes(const float* HWY_RESTRICT lanes, float* HWY_RESTRICT out) {
  const Df d;
  for (std::size_t start = 0; start < kBlockTokens; start += kLanes) {
    Vf quads[kLanes / 4];
    for (std::size_t quad = 0; quad < kLanes / 4; ++quad) {
      const float* row = lanes + (start + 4 * quad) * kLanes;
      quads[quad] =
          ReduceBlocks4<AddOp>(hn::Load(d, row), hn::Load(d, row + kLanes),
                               hn::Load(d, row + 2 * kLanes), hn::Load(d, row + 3 * kLanes));
    }
    hn::Store(ReduceQuads<AddOp>(quads), d, out + start);
  }
}

// Bits that a code of kBits takes in a word: words of 3-bit codes are narrowed once they are full.
template <std::uint32_t kBits>
inline constexpr std::uint32_t kWordBits = kBits == 3 ? 4 : kBits;

// A full word, as StoreWords wants it.
template <std::uint32_t kBits>
HWY_INLINE hn::Vec<Du32> WordOf(hn::Vec<Di32> packed) {
  const auto word = hn::BitCast(Du32(), packed);
  if constexpr (kBits == 3) {
    return NarrowWords(Du32(), word);
  } else {
    return word;
  }
}

// Words of codes, channel by channel, into the record.
template <std::size_t kDim, std::uint32_t kBits>
HWY_INLINE void StoreWords(const EncodeWorkspace& ws, std::size_t word_count, std::byte* out) {
  if constexpr (kBits == 3) {
    for (std::size_t channel = 0; channel < kDim; ++channel, out += 3 * word_count) {
      std::byte* const high = out + 2 * word_count;
      for (std::size_t word = 0; word < word_count; ++word) {
        const std::uint32_t bits = ws.words[word * kDim + channel];
        const auto low = static_cast<std::uint16_t>(bits);
        std::memcpy(out + 2 * word, &low, sizeof(low));
        high[word] = static_cast<std::byte>(bits >> 16);
      }
    }
    return;
  }
  for (std::size_t channel = 0; channel < kDim; ++channel) {
    std::byte* row = out + channel * word_count * sizeof(std::uint32_t);
    for (std::size_t word = 0; word < word_count; ++word) {
      std::memcpy(row + word * sizeof(std::uint32_t), ws.words + word * kDim + channel,
                  sizeof(std::uint32_t));
    }
  }
}

// Keys: rows are channels, which are lanes here; the codes of successive tokens collect in 32-bit
// words. kRefine: codes are not packed, but their sums are left in ws.refined.
template <std::size_t kDim, std::uint32_t kBits, bool kRefine>
HWY_NOINLINE bool QuantizeKeys(EncodeWorkspace& ws, std::size_t tokens, float unit,
                               const HalfRecord& out) {
  const Df d;
  const Di32 di;
  AbsorbedScales& a = ws.absorbed;
  if (!AbsorbAcross(a, ws.token, tokens, unit, out.across)) return false;
  InvertBestScale(ws.token, tokens);
  InvertBestScale(ws.channel, kDim);

  for (std::size_t i = 0; i < kDim; i += 4 * kLanes) {
    Vf low[4];
    Vf high[4];
    for (std::size_t j = 0; j < 4; ++j) {
      low[j] = Divide(hn::Load(d, ws.tile + i + j * kLanes), hn::Set(d, ws.token.best_scale[0]),
                      hn::Set(d, ws.token.weight[0]));
      high[j] = low[j];
    }
    for (std::size_t t = 1; t < tokens; ++t) {
      const Vf scale = hn::Set(d, ws.token.best_scale[t]);
      const Vf inverse = hn::Set(d, ws.token.weight[t]);
      for (std::size_t j = 0; j < 4; ++j) {
        const Vf y = Divide(hn::Load(d, ws.tile + t * kDim + i + j * kLanes), scale, inverse);
        low[j] = hn::Min(low[j], y);
        high[j] = hn::Max(high[j], y);
      }
    }
    for (std::size_t j = 0; j < 4; ++j) {
      hn::Store(low[j], d, a.low + i + j * kLanes);
      hn::Store(high[j], d, a.high + i + j * kLanes);
    }
  }
  if (!AbsorbRows(a, ws.channel, 0, kDim, (1u << kBits) - 1u, out)) return false;

  constexpr std::size_t kWordTokens = 32 / kWordBits<kBits>;
  const std::size_t word_count = tokens / kWordTokens;
  RefinedRows& r = ws.refined;
  if constexpr (kRefine) {
    WeighColumns(r, ws.token, tokens);
    for (float* sums : {r.q, r.qq, r.qu, r.u, r.uu}) Fill(sums, 0.0f, kDim);
  }
  RoundingError error;
  for (std::size_t word = 0; word < word_count; ++word) {
    const std::size_t first = word * kWordTokens;
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const Vf low = hn::Load(d, a.low + i);
      const Vf step = hn::Load(d, a.step + i);
      const Vf step_inverse = hn::Load(d, a.step_inverse + i);
      const Vf row = hn::Load(d, ws.channel.best_scale + i);
      const Vf row_inverse = hn::Load(d, ws.channel.weight + i);
      const Vf scale = hn::Load(d, a.scale + i);
      const Vf zero = hn::Load(d, a.zero + i);
      const Vf stored_scale = hn::Load(d, a.stored_scale + i);
      const Vf stored_zero = hn::Load(d, a.stored_zero + i);
      auto packed = hn::Zero(di);
      StepSums sums;
      if constexpr (kRefine) {
        sums.q = hn::Load(d, r.q + i);
        sums.qq = hn::Load(d, r.qq + i);
        sums.qu = hn::Load(d, r.qu + i);
        sums.u = hn::Load(d, r.u + i);
        sums.uu = hn::Load(d, r.uu + i);
      }
      for (std::size_t n = kWordTokens; n-- > 0;) {  // The first token ends in the low bits.
        const std::size_t t = first + n;
        const Vf y = Divide(hn::Load(d, ws.tile + t * kDim + i), hn::Set(d, ws.token.best_scale[t]),
                            hn::Set(d, ws.token.weight[t]));
        const Vf steps = Divide(hn::Sub(Divide(y, row, row_inverse), low), step, step_inverse);
        const auto q = CodesOf<kBits>(steps);
        const Vf code = hn::ConvertTo(d, q);
        if constexpr (kRefine) {
          sums.Add(steps, code, hn::Set(d, r.weight[t]));
        } else {
          packed = hn::Or(hn::ShiftLeft<static_cast<int>(kWordBits<kBits>)>(packed), q);
        }
        error.Add(hn::MulAdd(code, scale, zero), hn::Set(d, a.across[t]),
                  hn::MulAdd(code, stored_scale, stored_zero), hn::Set(d, a.stored_across[t]));
      }
      if constexpr (kRefine) {
        hn::Store(sums.q, d, r.q + i);
        hn::Store(sums.qq, d, r.qq + i);
        hn::Store(sums.qu, d, r.qu + i);
        hn::Store(sums.u, d, r.u + i);
        hn::Store(sums.uu, d, r.uu + i);
      } else {
        hn::Store(WordOf<kBits>(packed), Du32(), ws.words + word * kDim + i);
      }
    }
  }
  if constexpr (!kRefine) StoreWords<kDim, kBits>(ws, word_count, out.codes);
  return error.IsSmall();
}

// kDim codes, a byte each, to kDim * kBits / 8 bytes.
template <std::size_t kDim, std::uint32_t kBits>
HWY_INLINE void PackRow(const std::uint8_t* HWY_RESTRICT codes, std::byte* HWY_RESTRICT out) {
  if constexpr (kBits == 4) {
    // Byte pairs as 16-bit lanes: b0 | b1 << 8 becomes b0 | b1 << 4 in the low byte.
    const hn::CappedTag<std::uint16_t, 32> d;
    const hn::Rebind<std::uint8_t, decltype(d)> d8;
    constexpr std::size_t kStep = hn::MaxLanes(d);
    for (std::size_t i = 0; i < kDim / 2; i += kStep) {
      const auto v = hn::Load(d, reinterpret_cast<const std::uint16_t*>(codes) + i);
      const auto packed = hn::And(hn::Or(v, hn::ShiftRight<4>(v)), hn::Set(d, 0xFF));
      hn::StoreU(hn::TruncateTo(d8, packed), d8, reinterpret_cast<std::uint8_t*>(out) + i);
    }
  } else {
    // Four bytes as one 32-bit lane: b0 | b1 << 2 | b2 << 4 | b3 << 6 in the low byte, by two
    // foldings.
    const Du32 d;
    const hn::Rebind<std::uint8_t, Du32> d8;
    for (std::size_t i = 0; i < kDim / 4; i += kLanes) {
      auto v = hn::Load(d, reinterpret_cast<const std::uint32_t*>(codes) + i);
      v = hn::Or(v, hn::ShiftRight<6>(v));
      v = hn::Or(v, hn::ShiftRight<12>(v));
      hn::StoreU(hn::TruncateTo(d8, v), d8, reinterpret_cast<std::uint8_t*>(out) + i);
    }
  }
}

// Values: rows are tokens. kRefine: as for keys.
template <std::size_t kDim, std::uint32_t kBits, bool kRefine>
HWY_NOINLINE bool QuantizeValues(EncodeWorkspace& ws, std::size_t tokens, float unit,
                                 const HalfRecord& out) {
  const Df d;
  const hn::Rebind<std::uint8_t, Df> d8;
  AbsorbedScales& a = ws.absorbed;
  if (!AbsorbAcross(a, ws.channel, kDim, unit, out.across)) return false;
  InvertBestScale(ws.token, tokens);
  InvertBestScale(ws.channel, kDim);

  RefinedRows& r = ws.refined;
  if constexpr (kRefine) WeighColumns(r, ws.channel, kDim);
  RoundingError error;
  for (std::size_t first = 0; first < tokens; first += kBlockTokens) {
    for (std::size_t start = first; start < first + kBlockTokens; start += kLanes) {
      Vf quad_low[kLanes / 4];
      Vf quad_high[kLanes / 4];
      for (std::size_t quad = 0; quad < kLanes / 4; ++quad) {
        const float* row = ws.tile + (start + 4 * quad) * kDim;
        Vf low[4];
        Vf high[4];
        for (std::size_t j = 0; j < 4; ++j) {
          low[j] = Divide(hn::Load(d, row + j * kDim), hn::Load(d, ws.channel.best_scale),
                          hn::Load(d, ws.channel.weight));
          high[j] = low[j];
        }
        for (std::size_t i = kLanes; i < kDim; i += kLanes) {
          const Vf scale = hn::Load(d, ws.channel.best_scale + i);
          const Vf inverse = hn::Load(d, ws.channel.weight + i);
          for (std::size_t j = 0; j < 4; ++j) {
            const Vf y = Divide(hn::Load(d, row + j * kDim + i), scale, inverse);
            low[j] = hn::Min(low[j], y);
            high[j] = hn::Max(high[j], y);
          }
        }
        quad_low[quad] = ReduceBlocks4<MinOp>(low[0], low[1], low[2], low[3]);
        quad_high[quad] = ReduceBlocks4<MaxOp>(high[0], high[1], high[2], high[3]);
      }
      hn::Store(ReduceQuads<MinOp>(quad_low), d, a.low + start);
      hn::Store(ReduceQuads<MaxOp>(quad_high), d, a.high + start);
    }
    if (!AbsorbRows(a, ws.token, first, first + kBlockTokens, (1u << kBits) - 1u, out)) {
      return false;
    }
    for (std::size_t t = first; t < first + kBlockTokens; ++t) {
      const Vf low = hn::Set(d, a.low[t]);
      const Vf step = hn::Set(d, a.step[t]);
      const Vf step_inverse = hn::Set(d, a.step_inverse[t]);
      const Vf row = hn::Set(d, ws.token.best_scale[t]);
      const Vf row_inverse = hn::Set(d, ws.token.weight[t]);
      const Vf scale = hn::Set(d, a.scale[t]);
      const Vf zero = hn::Set(d, a.zero[t]);
      const Vf stored_scale = hn::Set(d, a.stored_scale[t]);
      const Vf stored_zero = hn::Set(d, a.stored_zero[t]);
      StepSums sums;
      for (std::size_t i = 0; i < kDim; i += kLanes) {
        const Vf y =
            Divide(hn::Load(d, ws.tile + t * kDim + i), hn::Load(d, ws.channel.best_scale + i),
                   hn::Load(d, ws.channel.weight + i));
        const Vf steps = Divide(hn::Sub(Divide(y, row, row_inverse), low), step, step_inverse);
        const auto q = CodesOf<kBits>(steps);
        const Vf code = hn::ConvertTo(d, q);
        if constexpr (kRefine) {
          sums.Add(steps, code, hn::Load(d, r.weight + i));
        } else {
          hn::StoreU(hn::DemoteTo(d8, q), d8, ws.codes + i);
        }
        error.Add(hn::MulAdd(code, scale, zero), hn::Load(d, a.across + i),
                  hn::MulAdd(code, stored_scale, stored_zero), hn::Load(d, a.stored_across + i));
      }
      if constexpr (kRefine) {
        const std::size_t at = (t - first) * kLanes;
        hn::Store(sums.q, d, r.lanes[0] + at);
        hn::Store(sums.qq, d, r.lanes[1] + at);
        hn::Store(sums.qu, d, r.lanes[2] + at);
        hn::Store(sums.u, d, r.lanes[3] + at);
        hn::Store(sums.uu, d, r.lanes[4] + at);
      } else {
        PackRow<kDim, kBits>(ws.codes, out.codes + t * (kDim * kBits / 8));
      }
    }
    if constexpr (kRefine) {
      AddLanes(r.lanes[0], r.q + first);
      AddLanes(r.lanes[1], r.qq + first);
      AddLanes(r.lanes[2], r.qu + first);
      AddLanes(r.lanes[3], r.u + first);
      AddLanes(r.lanes[4], r.uu + first);
    }
  }
  return error.IsSmall();
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_QUANTIZE_INL_H_
