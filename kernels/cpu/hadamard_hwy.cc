#include <cstddef>

#include "kernels/cpu/targets.h"
#include "kernels/hadamard.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/hadamard_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/rotate-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void RotateRows(float* rows, std::size_t row_count, std::size_t dim) {
  RotateRowsReference(rows, row_count, dim);
}

#else

struct LoadAnywhere {
  const float* from;
  HWY_INLINE Vf operator()(std::size_t i) const { return hn::LoadU(Df(), from + i * kLanes); }
};
struct StoreAnywhere {
  float* to;
  HWY_INLINE void operator()(std::size_t i, Vf v) const { hn::StoreU(v, Df(), to + i * kLanes); }
};

template <std::size_t kDim>
void RotateRowsOf(float* rows, std::size_t row_count) {
  const InVectorButterflies in_vector;
  const Vf norm = hn::Set(Df(), RotationNorm<kDim>());
  alignas(64) float between[kDim];
  for (float* row = rows; row != rows + row_count * kDim; row += kDim) {
    RotateRow<kDim>(in_vector, norm, between, LoadAnywhere{row}, StoreAnywhere{row});
  }
}

void RotateRows(float* rows, std::size_t row_count, std::size_t dim) {
  const auto rotate = dim == 16    ? RotateRowsOf<16>
                      : dim == 32  ? RotateRowsOf<32>
                      : dim == 64  ? RotateRowsOf<64>
                      : dim == 128 ? RotateRowsOf<128>
                                   : RotateRowsOf<256>;
  rotate(rows, row_count);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(RotateRows);

void RotateRowsCpu(float* rows, std::size_t row_count, std::size_t dim) {
  HWY_DYNAMIC_DISPATCH(RotateRows)(rows, row_count, dim);
}

}  // namespace kvmill
#endif  // HWY_ONCE
