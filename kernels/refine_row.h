// Least squares for one row of a tile, for both implementations of refine.
#ifndef KVMILL_KERNELS_REFINE_ROW_H_
#define KVMILL_KERNELS_REFINE_ROW_H_

#include <cstdint>

#include "kernels/float16.h"

namespace kvmill {

// Sums over a row of codes q, scales across T and values x; a value's weight is w = T^2.
struct RowSums {
  double w = 0;    // T^2
  double wq = 0;   // T^2 q
  double wqq = 0;  // T^2 q^2
  double wx = 0;   // T x: of T^2 times what q S + Z should be.
  double wqx = 0;  // T x q
};

// S and Z, fp16 bits.
struct RowScale {
  std::uint16_t scale = 0, zero = 0;
};

// The S and Z of least squares in place of `row`. False, and nothing changes, when the codes are
// all the same, or fp16 cannot hold S or Z.
inline bool FitRow(const RowSums& s, RowScale& row) {
  const double determinant = s.w * s.wqq - s.wq * s.wq;
  // One code of 128 that is off by one leaves 3e-5 of it; sums in fp32 leave 1e-7 of rounding.
  if (!(determinant > 1e-6 * s.w * s.wqq)) return false;
  const RowScale fitted{
      FloatToFloat16(static_cast<float>((s.w * s.wqx - s.wq * s.wx) / determinant)),
      FloatToFloat16(static_cast<float>((s.wqq * s.wx - s.wq * s.wqx) / determinant))};
  // Codes grow with values, so S is positive unless it is too small for fp16.
  constexpr std::uint16_t kInfinity = 0x7C00;
  const bool fits =
      fitted.scale > 0 && fitted.scale < kInfinity && (fitted.zero & 0x7FFF) < kInfinity;
  if (fits) row = fitted;
  return fits;
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_REFINE_ROW_H_
