// The fast Hadamard transform of one row. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_ROTATE_INL_H_
#undef KVMILL_KERNELS_CPU_ROTATE_INL_H_
#else
#define KVMILL_KERNELS_CPU_ROTATE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// +1 where bit `distance` of the lane number is clear, -1 where it is set.
HWY_INLINE Vf ButterflySigns(std::int32_t distance) {
  const Di32 di;
  const auto bit = hn::And(hn::Iota(di, 0), hn::Set(di, distance));
  const auto is_upper = hn::Eq(bit, hn::Set(di, distance));
  return hn::IfThenElse(hn::RebindMask(Df(), is_upper), hn::Set(Df(), -1.0f), hn::Set(Df(), 1.0f));
}

// The stages inside a vector: lane i and i ^ distance become their sum and difference. Multiplying
// by +-1 is exact, so one fused multiply-add is one rounded addition.
class InVectorButterflies {
 public:
  HWY_INLINE InVectorButterflies()
      : signs1_(ButterflySigns(1)),
        signs2_(ButterflySigns(2)),
        signs4_(ButterflySigns(4)),
        signs8_(ButterflySigns(8)) {}

  HWY_INLINE Vf operator()(Vf v) const {
    v = hn::MulAdd(v, signs1_, hn::Shuffle2301(v));
    v = hn::MulAdd(v, signs2_, hn::Shuffle1032(v));
    if constexpr (kLanes >= 8) v = hn::MulAdd(v, signs4_, hn::SwapAdjacentBlocks(v));
    if constexpr (kLanes >= 16) v = hn::MulAdd(v, signs8_, hn::ConcatLowerUpper(Df(), v, v));
    return v;
  }

 private:
  Vf signs1_, signs2_, signs4_, signs8_;
};

// The stages between vectors i and i + distance of `v`.
template <std::size_t kCount>
HWY_INLINE void Butterflies(Vf* v) {
  for (std::size_t distance = 1; distance < kCount; distance *= 2) {
    for (std::size_t start = 0; start < kCount; start += 2 * distance) {
      for (std::size_t i = start; i < start + distance; ++i) {
        const Vf a = v[i];
        const Vf b = v[i + distance];
        v[i] = hn::Add(a, b);
        v[i + distance] = hn::Sub(a, b);
      }
    }
  }
}

// One row times H. `load(i)` gives vector i of the input; `store(i, v)` takes vector i of the
// result, in no particular order and after every load. `row` holds kDim values meanwhile, aligned;
// loads and stores may go there too.
template <std::size_t kDim, class Load, class Store>
HWY_INLINE void RotateRow(const InVectorButterflies& in_vector, Vf norm, float* row,
                          const Load& load, const Store& store) {
  const Df d;
  constexpr std::size_t kVectors = kDim / kLanes;
  constexpr std::size_t kFirst = kVectors < 8 ? kVectors : 8;  // As many as the registers hold.
  constexpr std::size_t kSecond = kVectors / kFirst;
  for (std::size_t start = 0; start < kVectors; start += kFirst) {
    Vf v[kFirst];
    for (std::size_t i = 0; i < kFirst; ++i) v[i] = in_vector(load(start + i));
    Butterflies<kFirst>(v);
    for (std::size_t i = 0; i < kFirst; ++i) {
      if constexpr (kSecond == 1) {
        store(i, hn::Mul(v[i], norm));
      } else {
        hn::Store(v[i], d, row + (start + i) * kLanes);
      }
    }
  }
  if constexpr (kSecond > 1) {
    for (std::size_t start = 0; start < kFirst; ++start) {
      Vf v[kSecond];
      for (std::size_t i = 0; i < kSecond; ++i) {
        v[i] = hn::Load(d, row + (start + i * kFirst) * kLanes);
      }
      Butterflies<kSecond>(v);
      for (std::size_t i = 0; i < kSecond; ++i) store(start + i * kFirst, hn::Mul(v[i], norm));
    }
  }
}

// Where a row of floats is and goes.
struct LoadAligned {
  const float* from;
  HWY_INLINE Vf operator()(std::size_t i) const { return hn::Load(Df(), from + i * kLanes); }
};
struct StoreAligned {
  float* to;
  HWY_INLINE void operator()(std::size_t i, Vf v) const { hn::Store(v, Df(), to + i * kLanes); }
};

// 1 / sqrt(kDim).
template <std::size_t kDim>
constexpr float RotationNorm() {
  static_assert(kDim == 16 || kDim == 32 || kDim == 64 || kDim == 128 || kDim == 256);
  constexpr float kSqrtHalf = 0.707106781f;
  return kDim == 16    ? 0.25f
         : kDim == 32  ? 0.25f * kSqrtHalf
         : kDim == 64  ? 0.125f
         : kDim == 128 ? 0.125f * kSqrtHalf
                       : 0.0625f;
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_ROTATE_INL_H_
