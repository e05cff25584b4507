// What attention does with whole rows of fp32 between its products: folding scales in, the softmax,
// adding results up. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#undef KVMILL_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#else
#define KVMILL_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#endif

#include <cstddef>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/tile_method.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// 2^x for x <= 0 (rounding up to a little more is fine); 0 below -126. Relative error 2e-7.
HWY_INLINE Vf Exp2(Vf x) {
  const Df d;
  const Di32 di;
  const Vf clamped = hn::Max(x, hn::Set(d, -127.0f));  // Also -infinity.
  const auto whole = hn::NearestInt(clamped);
  const Vf f = hn::Sub(clamped, hn::ConvertTo(d, whole));  // -1/2 to 1/2.
  // The series of e^(f ln 2); the next term is below 1.3e-7 relative.
  Vf p = hn::Set(d, 1.5403530e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.33335581e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.61812911e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.55041087e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.40226507e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.93147181e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto power = hn::ShiftLeft<23>(hn::Add(whole, hn::Set(di, 127)));
  return hn::IfThenElseZero(hn::Gt(x, hn::Set(d, -126.0f)), hn::Mul(p, hn::BitCast(d, power)));
}

// tanh(x), absolute error 1e-7.
HWY_INLINE Vf Tanh(Vf x) {
  const Df d;
  // 1 - 2 e^-2|x| / (1 + e^-2|x|), with the sign of x.
  const Vf e = Exp2(hn::Mul(hn::Abs(x), hn::Set(d, -2.88539008f)));  // -2 / ln 2.
  const Vf one = hn::Set(d, 1.0f);
  const Vf magnitude = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  return hn::CopySign(magnitude, x);
}

HWY_INLINE float SumOf(Vf v) { return hn::GetLane(hn::SumOfLanes(Df(), v)); }

// fp16 from the record to fp32.
HWY_INLINE void LoadScales(const std::byte* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    hn::Store(HalfToFloat<DType::kFloat16>(LoadHalf(from + 2 * i)), Df(), to + i);
  }
}

// folded = row * scale; returns row · zero.
HWY_INLINE float FoldRow(const float* HWY_RESTRICT row, const float* HWY_RESTRICT scale,
                         const float* HWY_RESTRICT zero, std::size_t count,
                         float* HWY_RESTRICT folded) {
  const Df d;
  Vf even = hn::Zero(d);
  Vf odd = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += 2 * kLanes) {
    const Vf a = hn::Load(d, row + i);
    const Vf b = hn::Load(d, row + i + kLanes);
    hn::Store(hn::Mul(a, hn::Load(d, scale + i)), d, folded + i);
    hn::Store(hn::Mul(b, hn::Load(d, scale + i + kLanes)), d, folded + i + kLanes);
    even = hn::MulAdd(a, hn::Load(d, zero + i), even);
    odd = hn::MulAdd(b, hn::Load(d, zero + i + kLanes), odd);
  }
  return SumOf(hn::Add(even, odd));
}

// Logits in place: (product + bias) * across * scale, capped; those outside of `seen` are
// -infinity. `across` may be null. Returns the largest.
HWY_INLINE float LogitsOfRow(float* HWY_RESTRICT row, float bias, const float* HWY_RESTRICT across,
                             std::size_t count, const LogitRule& rule, TokenSpan seen) {
  const Df d;
  const Vf nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
  const Vf bias_v = hn::Set(d, bias);
  const Vf scale = hn::Set(d, rule.scale);
  Vf largest = nothing;
  const bool all = seen.begin == 0 && seen.end >= count;
  for (std::size_t i = 0; i < count; i += kLanes) {
    Vf x = hn::Mul(hn::Add(hn::Load(d, row + i), bias_v), scale);
    if (across != nullptr) x = hn::Mul(x, hn::Load(d, across + i));
    if (rule.cap > 0) {
      x = hn::Mul(Tanh(hn::Mul(x, hn::Set(d, rule.cap_inverse))), hn::Set(d, rule.cap_of_log2));
    }
    if (!all) {
      const Di32 di;
      const auto token = hn::Add(hn::Iota(di, 0), hn::Set(di, static_cast<std::int32_t>(i)));
      const auto before = hn::Lt(token, hn::Set(di, static_cast<std::int32_t>(seen.begin)));
      const auto inside = hn::Lt(token, hn::Set(di, static_cast<std::int32_t>(seen.end)));
      x = hn::IfThenElse(hn::RebindMask(d, inside), x, nothing);
      x = hn::IfThenElse(hn::RebindMask(d, before), nothing, x);
    }
    hn::Store(x, d, row + i);
    largest = hn::Max(largest, x);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// Weights p = 2^(logit - largest), in place, and their sum, lane by lane, into `total` (16 floats).
HWY_INLINE void WeightsOfRow(float* HWY_RESTRICT row, float largest, std::size_t count,
                             float correction, float* HWY_RESTRICT total) {
  const Df d;
  const Vf shift = hn::Set(d, largest);
  Vf sum = hn::Mul(hn::Load(d, total), hn::Set(d, correction));
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf p = Exp2(hn::Sub(hn::Load(d, row + i), shift));
    sum = hn::Add(sum, p);
    hn::Store(p, d, row + i);
  }
  hn::Store(sum, d, total);
}

// to = to * correction + (product + bias) * across.
HWY_INLINE void AddRow(const float* HWY_RESTRICT product, float bias,
                       const float* HWY_RESTRICT across, std::size_t count, float correction,
                       float* HWY_RESTRICT to) {
  const Df d;
  const Vf bias_v = hn::Set(d, bias);
  const Vf keep = hn::Set(d, correction);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf x = hn::Mul(hn::Add(hn::Load(d, product + i), bias_v), hn::Load(d, across + i));
    hn::Store(hn::MulAdd(hn::Load(d, to + i), keep, x), d, to + i);
  }
}

HWY_INLINE void ScaleRow(std::size_t count, float factor, float* HWY_RESTRICT row) {
  const Df d;
  const Vf f = hn::Set(d, factor);
  for (std::size_t i = 0; i < count; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, row + i), f), d, row + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_ATTENTION_ROWS_INL_H_
