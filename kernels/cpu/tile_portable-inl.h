// The portable product with codes (see tile_method.h): codes become fp32, eight or sixteen at a
// time. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_TILE_PORTABLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_TILE_PORTABLE_INL_H_
#undef KVMILL_KERNELS_CPU_TILE_PORTABLE_INL_H_
#else
#define KVMILL_KERNELS_CPU_TILE_PORTABLE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/tile_method.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// The columns of kLanes bytes of each row of codes, for kRows rows. Code m of a byte is taken out
// by a mask alone, without a shift: it counts 2^(m * bits) times too much, which the end takes
// back.
template <std::uint32_t kBits, std::size_t kRows>
HWY_INLINE void MultiplyColumns(const CodeMatrix& matrix, std::size_t first_byte,
                                const float* HWY_RESTRICT rows, float* HWY_RESTRICT out) {
  const Df d;
  const Du32 du;
  const Di32 di;
  const hn::Rebind<std::uint8_t, Df> d8;
  constexpr std::size_t kPerByte = 8 / kBits;
  constexpr std::uint32_t kMask = (1u << kBits) - 1u;
  const std::size_t row_bytes = matrix.columns * kBits / 8;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(matrix.codes) + first_byte;
  Vf sum[kRows][kPerByte];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t m = 0; m < kPerByte; ++m) sum[r][m] = hn::Zero(d);
  }
  for (std::size_t k = 0; k < matrix.rows; ++k, codes += row_bytes) {
    const auto bytes = hn::PromoteTo(du, hn::LoadU(d8, codes));
    Vf code[kPerByte];
    for (std::size_t m = 0; m < kPerByte; ++m) {
      const auto masked = hn::And(bytes, hn::Set(du, kMask << (m * kBits)));
      code[m] = hn::ConvertTo(d, hn::BitCast(di, masked));
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vf x = hn::Set(d, rows[r * matrix.rows + k]);
      for (std::size_t m = 0; m < kPerByte; ++m) sum[r][m] = hn::MulAdd(x, code[m], sum[r][m]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t m = 0; m < kPerByte; ++m) {
      sum[r][m] = hn::Mul(sum[r][m], hn::Set(d, 1.0f / static_cast<float>(1u << (m * kBits))));
    }
    float* to = out + r * matrix.columns + first_byte * kPerByte;
    if constexpr (kPerByte == 2) {
      hn::StoreInterleaved2(sum[r][0], sum[r][1], d, to);
    } else {
      hn::StoreInterleaved4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], d, to);
    }
  }
}

template <std::uint32_t kBits>
HWY_INLINE void MultiplyCodesOf(const CodeMatrix& matrix, const float* HWY_RESTRICT rows,
                                std::size_t row_count, float* HWY_RESTRICT out) {
  constexpr std::size_t kRows = kBits == 4 ? 4 : 2;  // Eight sums in registers.
  for (std::size_t byte = 0; byte < matrix.columns * kBits / 8; byte += kLanes) {
    std::size_t r = 0;
    for (; r + kRows <= row_count; r += kRows) {
      MultiplyColumns<kBits, kRows>(matrix, byte, rows + r * matrix.rows, out + r * matrix.columns);
    }
    for (; r < row_count; ++r) {
      MultiplyColumns<kBits, 1>(matrix, byte, rows + r * matrix.rows, out + r * matrix.columns);
    }
  }
}

HWY_INLINE void MultiplyCodes(const CodeMatrix& matrix, const float* HWY_RESTRICT rows,
                              std::size_t row_count, float* HWY_RESTRICT out) {
  if (matrix.bits == 4) {
    MultiplyCodesOf<4>(matrix, rows, row_count, out);
  } else {
    MultiplyCodesOf<2>(matrix, rows, row_count, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_TILE_PORTABLE_INL_H_
