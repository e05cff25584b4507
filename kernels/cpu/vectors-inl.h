// Vector types of the cpu kernels, sums across lanes, and conversions between fp32 and the 16-bit
// types. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_VECTORS_INL_H_
#undef KVMILL_KERNELS_CPU_VECTORS_INL_H_
#else
#define KVMILL_KERNELS_CPU_VECTORS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/float16.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 512 bits: the blocks below divide every head_dim and group.
using Df = hn::CappedTag<float, 16>;
using Vf = hn::Vec<Df>;
using Di32 = hn::RebindToSigned<Df>;
using Du32 = hn::RebindToUnsigned<Df>;
using Du16 = hn::Rebind<std::uint16_t, Df>;  // As many lanes as Df, half the bytes.
using Vu16 = hn::Vec<Du16>;
inline constexpr std::size_t kLanes = hn::MaxLanes(Df());
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16);

// ---- Many vectors to one: vector j of the input, reduced, becomes lane j of the output. ----

struct AddOp {
  HWY_INLINE Vf operator()(Vf a, Vf b) const { return hn::Add(a, b); }
};
struct MinOp {
  HWY_INLINE Vf operator()(Vf a, Vf b) const { return hn::Min(a, b); }
};
struct MaxOp {
  HWY_INLINE Vf operator()(Vf a, Vf b) const { return hn::Max(a, b); }
};

// Four vectors to one. In each 128-bit block lane j holds what that block of vector j reduces to.
template <class Op>
HWY_INLINE Vf ReduceBlocks4(Vf a, Vf b, Vf c, Vf e) {
  const Df d;
  const Op op;
  const Vf ac = op(hn::InterleaveLower(d, a, c), hn::InterleaveUpper(d, a, c));
  const Vf be = op(hn::InterleaveLower(d, b, e), hn::InterleaveUpper(d, b, e));
  return op(hn::InterleaveLower(d, ac, be), hn::InterleaveUpper(d, ac, be));
}

// `quads`: kLanes / 4 results of ReduceBlocks4, for the vectors 0..3, 4..7, ... Returns kLanes
// results in order.
template <class Op>
HWY_INLINE Vf ReduceQuads(const Vf* quads) {
  const Df d;
  const Op op;
  if constexpr (kLanes == 4) {
    return quads[0];
  } else if constexpr (kLanes == 8) {
    return op(hn::ConcatLowerLower(d, quads[1], quads[0]),
              hn::ConcatUpperUpper(d, quads[1], quads[0]));
  } else {
    // Blocks [0 0 2 2] and [1 1 3 3], half done; the neighbour block finishes each.
    const Vf even = op(hn::ConcatLowerLower(d, quads[2], quads[0]),
                       hn::ConcatUpperUpper(d, quads[2], quads[0]));
    const Vf odd = op(hn::ConcatLowerLower(d, quads[3], quads[1]),
                      hn::ConcatUpperUpper(d, quads[3], quads[1]));
    return hn::OddEvenBlocks(op(odd, hn::SwapAdjacentBlocks(odd)),
                             op(even, hn::SwapAdjacentBlocks(even)));
  }
}

// ---- 16-bit types. ----

// Any alignment.
HWY_INLINE Vu16 LoadHalf(const std::byte* from) {
  const hn::Repartition<std::uint8_t, Du16> du8;
  return hn::BitCast(Du16(), hn::LoadU(du8, reinterpret_cast<const std::uint8_t*>(from)));
}
HWY_INLINE void StoreHalf(Vu16 v, std::byte* to) {
  const hn::Repartition<std::uint8_t, Du16> du8;
  hn::StoreU(hn::BitCast(du8, v), du8, reinterpret_cast<std::uint8_t*>(to));
}

// Finite values only: infinities and NaN come out as something else on targets without the
// instruction.
template <DType kDType>
HWY_INLINE Vf HalfToFloat(Vu16 bits) {
  if constexpr (kDType == DType::kFloat16) {
    return hn::PromoteTo(Df(), hn::BitCast(hn::Rebind<hwy::float16_t, Df>(), bits));
  } else {
    return hn::BitCast(Df(), hn::ShiftLeft<16>(hn::PromoteTo(Du32(), bits)));
  }
}

// To nearest, ties to even, also where Highway's own demotion truncates (bfloat16 everywhere,
// float16 before F16C). No NaN; beyond the range of fp16 the result is infinite.
template <DType kDType>
HWY_INLINE Vu16 FloatToHalf(Vf v) {
  const Du32 du;
  if constexpr (kDType == DType::kBFloat16) {
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
    return hn::TruncateTo(Du16(), hn::ShiftRight<16>(rounded));
  } else {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
    return hn::BitCast(Du16(), hn::DemoteTo(hn::Rebind<hwy::float16_t, Df>(), v));
#else
    // The arithmetic of FloatToFloat16 (kernels/float16.h), lane by lane.
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto normal = hn::ShiftRight<13>(
        hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000)), hn::Add(odd, hn::Set(du, 0xFFF))));
    const auto shifted = hn::Add(hn::BitCast(Df(), magnitude), hn::Set(Df(), 0.5f));
    const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3F000000));
    const Di32 di;  // Magnitudes are non-negative: signed comparisons, which every target has.
    const auto is_subnormal = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 0x38800000));
    const auto is_infinite = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x477FEFFF));
    const auto finite = hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
    const auto result =
        hn::IfThenElse(hn::RebindMask(du, is_infinite), hn::Set(du, 0x7C00), finite);
    return hn::TruncateTo(Du16(), hn::Or(sign, result));
#endif
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_VECTORS_INL_H_
