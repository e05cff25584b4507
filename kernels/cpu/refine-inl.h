// Refines rows (kernels/refine.h) of the tile that was just quantized and lies in the workspace,
// and packs their codes. Included once per SIMD target.
//
// A fit needs sums over codes and over steps, which are what codes round: those of the first come
// with the quantization. Steps for another S and Z are a linear function of those before, so their
// mean and variance need no further pass; a pass finds codes and the two or three sums that depend
// on them. The last one packs. Fits are vectors of rows.
#if defined(KVMILL_KERNELS_CPU_REFINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_REFINE_INL_H_
#undef KVMILL_KERNELS_CPU_REFINE_INL_H_
#else
#define KVMILL_KERNELS_CPU_REFINE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/quantize-inl.h"
#include "kernels/cpu/vectors-inl.h"
#include "kernels/cpu/workspace.h"
#include "kernels/refine.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// Of kLanes rows.
struct RowMoments {
  Vf mean_q, covariance;  // Codes; codes and steps.

  HWY_INLINE RowMoments(const RefinedRows& r, std::size_t i) {
    const Df d;
    const Vf inverse = hn::Set(d, r.weight_inverse);
    mean_q = hn::Mul(hn::Load(d, r.q + i), inverse);
    covariance =
        hn::NegMulAdd(mean_q, hn::Load(d, r.mean + i), hn::Mul(hn::Load(d, r.qu + i), inverse));
  }
};

HWY_INLINE void PutRows(RefinedRows& r, std::size_t i, Vf scale, Vf zero) {
  const Df d;
  const Vf inverse =
      hn::IfThenElseZero(hn::Ge(scale, hn::Set(d, kFloat16SmallestScale)),
                         hn::Div(hn::Set(d, 1.0f), scale));  // Without a scale every code is 0.
  hn::Store(scale, d, r.scale + i);
  hn::Store(zero, d, r.zero + i);
  hn::Store(inverse, d, r.scale_inverse + i);
  hn::Store(hn::Mul(zero, inverse), d, r.zero_steps + i);
}

HWY_INLINE hn::Mask<Df> HalvesHold(Vf scale, Vf zero) {
  const Df d;
  const Vf overflow = hn::Set(d, kHalfOverflow);
  return hn::And(hn::And(hn::Ge(scale, hn::Set(d, kFloat16SmallestScale)), hn::Lt(scale, overflow)),
                 hn::Lt(hn::Abs(zero), overflow));
}

// S and Z of encode, after the sums of StepSums.
HWY_INLINE void StartRows(EncodeWorkspace& ws, std::size_t first, std::size_t last) {
  const Df d;
  RefinedRows& r = ws.refined;
  const Vf inverse = hn::Set(d, r.weight_inverse);
  for (std::size_t i = first; i < last; i += kLanes) {
    const Vf mean = hn::Mul(hn::Load(d, r.u + i), inverse);
    hn::Store(mean, d, r.mean + i);
    hn::Store(hn::NegMulAdd(mean, mean, hn::Mul(hn::Load(d, r.uu + i), inverse)), d,
              r.variance + i);
    PutRows(r, i, hn::Load(d, ws.absorbed.scale + i), hn::Load(d, ws.absorbed.zero + i));
  }
}

// Least squares, after the sums q, qq and qu.
HWY_INLINE void FitRows(RefinedRows& r, std::size_t first, std::size_t last) {
  const Df d;
  for (std::size_t i = first; i < last; i += kLanes) {
    const RowMoments m(r, i);
    const Vf square = hn::Mul(hn::Load(d, r.qq + i), hn::Set(d, r.weight_inverse));
    const Vf variance = hn::NegMulAdd(m.mean_q, m.mean_q, square);
    const Vf mean = hn::Load(d, r.mean + i);
    const Vf scale = hn::Load(d, r.scale + i);
    const Vf zero = hn::Load(d, r.zero + i);
    // Steps are slope * q + offset.
    const Vf slope = hn::Div(m.covariance, variance);
    const Vf offset = hn::NegMulAdd(slope, m.mean_q, mean);
    const Vf new_scale = hn::Mul(scale, slope);
    const Vf new_zero = hn::MulAdd(scale, offset, zero);
    const auto fits =
        hn::And(hn::And(hn::Gt(variance, hn::Mul(square, hn::Set(d, kRefineVarianceMin))),
                        hn::Gt(m.covariance, hn::Zero(d))),
                HalvesHold(new_scale, new_zero));
    const Vf inverse = hn::Div(hn::Set(d, 1.0f), slope);
    const Vf spread = hn::Load(d, r.variance + i);
    hn::Store(hn::IfThenElse(fits, hn::Mul(hn::Sub(mean, offset), inverse), mean), d, r.mean + i);
    hn::Store(hn::IfThenElse(fits, hn::Mul(spread, hn::Mul(inverse, inverse)), spread), d,
              r.variance + i);
    PutRows(r, i, hn::IfThenElse(fits, new_scale, scale), hn::IfThenElse(fits, new_zero, zero));
  }
}

// The regression of codes on values, after the sums q and qu; S and Z into the record.
HWY_INLINE void StretchRows(const RefinedRows& r, std::size_t first, std::size_t last,
                            const HalfRecord& out) {
  const Df d;
  for (std::size_t i = first; i < last; i += kLanes) {
    const RowMoments m(r, i);
    const Vf scale = hn::Load(d, r.scale + i);
    const Vf zero = hn::Load(d, r.zero + i);
    const Vf slope = hn::Div(hn::Load(d, r.variance + i), m.covariance);
    const Vf new_scale = hn::Mul(scale, slope);
    const Vf new_zero =
        hn::MulAdd(scale, hn::NegMulAdd(slope, m.mean_q, hn::Load(d, r.mean + i)), zero);
    const Vf most = hn::Set(d, kStretchMax);
    const auto fits = hn::And(
        hn::And(hn::Gt(m.covariance, hn::Zero(d)), hn::Le(slope, most)),
        hn::And(hn::Ge(hn::Mul(slope, most), hn::Set(d, 1.0f)), HalvesHold(new_scale, new_zero)));
    StoreHalf(FloatToHalf<DType::kFloat16>(hn::IfThenElse(fits, new_scale, scale)),
              out.scale + 2 * i);
    StoreHalf(FloatToHalf<DType::kFloat16>(hn::IfThenElse(fits, new_zero, zero)), out.zero + 2 * i);
  }
}

// (x / T - Z) / S.
HWY_INLINE Vf StepsOf(Vf x, Vf across_inverse, Vf scale_inverse, Vf zero_steps) {
  return hn::MulSub(hn::Mul(x, across_inverse), scale_inverse, zero_steps);
}
template <std::uint32_t kBits>
HWY_INLINE Vf NearestCode(Vf steps) {
  const Df d;
  constexpr auto kMax = static_cast<float>((1u << kBits) - 1u);
  return hn::Min(hn::Max(hn::Round(steps), hn::Zero(d)), hn::Set(d, kMax));
}

// Codes of all rows and the sums q, qq and qu.
template <std::size_t kDim, std::uint32_t kBits>
HWY_NOINLINE void SumKeyCodes(EncodeWorkspace& ws, std::size_t tokens) {
  const Df d;
  RefinedRows& r = ws.refined;
  for (std::size_t i = 0; i < kDim; i += 2 * kLanes) {  // Two vectors: a line of the cache.
    Vf inverse[2], zero_steps[2], sum_q[2], sum_qq[2], sum_qu[2];
    for (std::size_t j = 0; j < 2; ++j) {
      inverse[j] = hn::Load(d, r.scale_inverse + i + j * kLanes);
      zero_steps[j] = hn::Load(d, r.zero_steps + i + j * kLanes);
      sum_q[j] = sum_qq[j] = sum_qu[j] = hn::Zero(d);
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      const Vf across_inverse = hn::Set(d, ws.token.weight[t]);
      const Vf weight = hn::Set(d, r.weight[t]);
      for (std::size_t j = 0; j < 2; ++j) {
        const Vf u = StepsOf(hn::Load(d, ws.tile + t * kDim + i + j * kLanes), across_inverse,
                             inverse[j], zero_steps[j]);
        const Vf q = NearestCode<kBits>(u);
        const Vf weighted = hn::Mul(weight, q);
        sum_q[j] = hn::Add(sum_q[j], weighted);
        sum_qq[j] = hn::MulAdd(weighted, q, sum_qq[j]);
        sum_qu[j] = hn::MulAdd(weighted, u, sum_qu[j]);
      }
    }
    for (std::size_t j = 0; j < 2; ++j) {
      hn::Store(sum_q[j], d, r.q + i + j * kLanes);
      hn::Store(sum_qq[j], d, r.qq + i + j * kLanes);
      hn::Store(sum_qu[j], d, r.qu + i + j * kLanes);
    }
  }
}

// The same, packed, and without qq. Codes of successive tokens collect in 32-bit words, as in
// QuantizeKeys.
template <std::size_t kDim, std::uint32_t kBits>
HWY_NOINLINE void PackKeyCodes(EncodeWorkspace& ws, std::size_t tokens, std::byte* out) {
  const Df d;
  const Di32 di;
  RefinedRows& r = ws.refined;
  Fill(r.q, 0.0f, kDim);
  Fill(r.qu, 0.0f, kDim);
  constexpr std::size_t kWordTokens = 32 / kWordBits<kBits>;
  for (std::size_t word = 0; word < tokens / kWordTokens; ++word) {
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const Vf inverse = hn::Load(d, r.scale_inverse + i);
      const Vf zero_steps = hn::Load(d, r.zero_steps + i);
      Vf sum_q = hn::Load(d, r.q + i), sum_qu = hn::Load(d, r.qu + i);
      auto packed = hn::Zero(di);
      for (std::size_t n = kWordTokens; n-- > 0;) {  // The first token ends in the low bits.
        const std::size_t t = word * kWordTokens + n;
        const Vf u = StepsOf(hn::Load(d, ws.tile + t * kDim + i), hn::Set(d, ws.token.weight[t]),
                             inverse, zero_steps);
        const Vf q = NearestCode<kBits>(u);
        const Vf weighted = hn::Mul(hn::Set(d, r.weight[t]), q);
        sum_q = hn::Add(sum_q, weighted);
        sum_qu = hn::MulAdd(weighted, u, sum_qu);
        packed =
            hn::Or(hn::ShiftLeft<static_cast<int>(kWordBits<kBits>)>(packed), hn::ConvertTo(di, q));
      }
      hn::Store(sum_q, d, r.q + i);
      hn::Store(sum_qu, d, r.qu + i);
      hn::Store(WordOf<kBits>(packed), Du32(), ws.words + word * kDim + i);
    }
  }
  StoreWords<kDim, kBits>(ws, tokens / kWordTokens, out);
}

template <std::size_t kDim, std::uint32_t kBits>
HWY_INLINE void RefineKeys(EncodeWorkspace& ws, std::size_t tokens, const HalfRecord& out) {
  StartRows(ws, 0, kDim);
  FitRows(ws.refined, 0, kDim);
  for (int fit = 1; fit < kRefineFits; ++fit) {
    SumKeyCodes<kDim, kBits>(ws, tokens);
    FitRows(ws.refined, 0, kDim);
  }
  PackKeyCodes<kDim, kBits>(ws, tokens, out.codes);
  StretchRows(ws.refined, 0, kDim, out);
}

// A block of rows. kLast: packs, without qq.
template <std::size_t kDim, std::uint32_t kBits, bool kLast>
HWY_INLINE void SumValueCodes(EncodeWorkspace& ws, std::size_t first, std::byte* out) {
  const Df d;
  const hn::Rebind<std::uint8_t, Df> d8;
  RefinedRows& r = ws.refined;
  for (std::size_t t = first; t < first + kBlockTokens; ++t) {
    const Vf inverse = hn::Set(d, r.scale_inverse[t]);
    const Vf zero_steps = hn::Set(d, r.zero_steps[t]);
    Vf sum_q = hn::Zero(d), sum_qq = sum_q, sum_qu = sum_q;
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      const Vf u = StepsOf(hn::Load(d, ws.tile + t * kDim + i), hn::Load(d, ws.channel.weight + i),
                           inverse, zero_steps);
      const Vf q = NearestCode<kBits>(u);
      const Vf weighted = hn::Mul(hn::Load(d, r.weight + i), q);
      sum_q = hn::Add(sum_q, weighted);
      sum_qu = hn::MulAdd(weighted, u, sum_qu);
      if constexpr (kLast) {
        hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(Di32(), q)), d8, ws.codes + i);
      } else {
        sum_qq = hn::MulAdd(weighted, q, sum_qq);
      }
    }
    const std::size_t row = (t - first) * kLanes;
    hn::Store(sum_q, d, r.lanes[0] + row);
    hn::Store(sum_qu, d, r.lanes[1] + row);
    if constexpr (kLast) {
      PackRow<kDim, kBits>(ws.codes, out + t * (kDim * kBits / 8));
    } else {
      hn::Store(sum_qq, d, r.lanes[2] + row);
    }
  }
  AddLanes(r.lanes[0], r.q + first);
  AddLanes(r.lanes[1], r.qu + first);
  if constexpr (!kLast) AddLanes(r.lanes[2], r.qq + first);
}

template <std::size_t kDim, std::uint32_t kBits>
HWY_NOINLINE void RefineValues(EncodeWorkspace& ws, std::size_t tokens, const HalfRecord& out) {
  for (std::size_t first = 0; first < tokens; first += kBlockTokens) {
    const std::size_t last = first + kBlockTokens;
    StartRows(ws, first, last);
    FitRows(ws.refined, first, last);
    for (int fit = 1; fit < kRefineFits; ++fit) {
      SumValueCodes<kDim, kBits, false>(ws, first, nullptr);
      FitRows(ws.refined, first, last);
    }
    SumValueCodes<kDim, kBits, true>(ws, first, out.codes);
    StretchRows(ws.refined, first, last, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_REFINE_INL_H_
