// From engine pages to a rotated fp32 tile. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_GATHER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_GATHER_INL_H_
#undef KVMILL_KERNELS_CPU_GATHER_INL_H_
#else
#define KVMILL_KERNELS_CPU_GATHER_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/rotate-inl.h"
#include "kernels/cpu/row_walk.h"
#include "kernels/cpu/vectors-inl.h"
#include "kernels/engine_pages.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// Loads and converts vector i of a row of 16-bit values, and keeps the largest magnitude bits that
// it saw.
template <DType kDType>
class HalfRow {
 public:
  using Di16 = hn::RebindToSigned<Du16>;
  using Vi16 = hn::Vec<Di16>;

  HWY_INLINE HalfRow(const std::byte* row, Vi16& largest) : row_(row), largest_(largest) {}

  HWY_INLINE Vf operator()(std::size_t i) const {
    const Di16 di;
    const Vu16 bits = LoadHalf(row_ + 2 * kLanes * i);
    largest_ = hn::Max(largest_, hn::And(hn::BitCast(di, bits), hn::Set(di, 0x7FFF)));
    return HalfToFloat<kDType>(bits);
  }

 private:
  const std::byte* row_;
  Vi16& largest_;
};

// kRows rows into `tile`, [kRows][kDim]. Returns the largest magnitude of the input, as bits of its
// type: infinities and NaN compare above every number.
template <std::size_t kDim, std::size_t kRows, DType kDType>
HWY_INLINE std::uint16_t GatherRows(RowWalk<const std::byte>& walk,
                                    std::ptrdiff_t channel_stride_bytes, bool rotate, bool more,
                                    float* HWY_RESTRICT tile) {
  const Df d;
  const hn::RebindToSigned<Du16> di;
  auto largest = hn::Zero(di);
  const InVectorButterflies in_vector;
  const Vf norm = hn::Set(d, RotationNorm<kDim>());
  alignas(64) std::byte adjacent[2 * kDim];
  for (std::size_t t = 0; t < kRows; ++t, tile += kDim) {
    const std::byte* row = walk.Next(more || t + 1 < kRows);
    if (channel_stride_bytes != 2) {
      for (std::size_t i = 0; i < kDim; ++i) {
        std::memcpy(adjacent + 2 * i, row + static_cast<std::ptrdiff_t>(i) * channel_stride_bytes,
                    2);
      }
      row = adjacent;
    }
    const HalfRow<kDType> load(row, largest);
    if (rotate) {
      RotateRow<kDim>(in_vector, norm, tile, load, StoreAligned{tile});
    } else {
      for (std::size_t i = 0; i < kDim / kLanes; ++i) hn::Store(load(i), d, tile + i * kLanes);
    }
  }
  alignas(64) std::int16_t lanes[kLanes];
  hn::Store(largest, di, lanes);
  std::int16_t result = 0;
  for (const std::int16_t lane : lanes) result = lane > result ? lane : result;
  return static_cast<std::uint16_t>(result);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_GATHER_INL_H_
