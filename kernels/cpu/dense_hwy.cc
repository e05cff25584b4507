#include <cstddef>
#include <limits>

#include "kernels/cpu/targets.h"
#include "kernels/dense.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense_hwy.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"         // After foreach_target.h.

// After highway.h.
#if HWY_TARGET != HWY_SCALAR
#include "kernels/cpu/attention_rows-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void Multiply(const ProductArgs& args) { MultiplyReference(args); }
void Softmax(float* row, std::size_t count, std::size_t width, float scale) {
  SoftmaxReference(row, count, width, scale);
}

#else

// kRows rows of `a` from row i on times kVectors vectors of columns from column j on, in registers.
template <std::size_t kRows, std::size_t kVectors>
HWY_INLINE void MultiplyTile(const ProductArgs& args, std::size_t i, std::size_t j) {
  const Df d;
  Vf sums[kRows][kVectors];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  }
  const float* a = args.a + i * args.a_stride;
  const float* b = args.b + j;
  for (std::size_t c = 0; c < args.depth; ++c, b += args.b_stride) {
    Vf columns[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + v * kLanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vf x = hn::Set(d, a[r * args.a_stride + c]);
      for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(x, columns[v], sums[r][v]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    float* out = args.out + (i + r) * args.out_stride + j;
    for (std::size_t v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, out + v * kLanes);
  }
}

// All rows times the same columns, which stay in the first cache. 12 sums, the vectors of columns
// and a value of `a` fill the 16 registers of AVX2.
template <std::size_t kVectors>
HWY_INLINE void MultiplyPanel(const ProductArgs& args, std::size_t j) {
  std::size_t i = 0;
  for (; i + 6 <= args.rows; i += 6) MultiplyTile<6, kVectors>(args, i, j);
  for (; i + 2 <= args.rows; i += 2) MultiplyTile<2, kVectors>(args, i, j);
  if (i < args.rows) MultiplyTile<1, kVectors>(args, i, j);
}

void Multiply(const ProductArgs& args) {
  std::size_t j = 0;
  if (args.rows == 1) {  // A vector times a matrix: as wide as a few lines of the matrix.
    for (; j + 8 * kLanes <= args.columns; j += 8 * kLanes) MultiplyTile<1, 8>(args, 0, j);
  }
  for (; j + 2 * kLanes <= args.columns; j += 2 * kLanes) MultiplyPanel<2>(args, j);
  for (; j < args.columns; j += kLanes) MultiplyPanel<1>(args, j);
}

// The values from place i on, those from `end` on replaced by the lowest.
HWY_INLINE Vf LoadBefore(Vf end, const float* row, std::size_t i) {
  const Df d;
  const Vf lowest = hn::Set(d, std::numeric_limits<float>::lowest());
  const Vf at = hn::Iota(d, static_cast<float>(i));
  return hn::IfThenElse(hn::Lt(at, end), hn::LoadU(d, row + i), lowest);
}

void Softmax(float* row, std::size_t count, std::size_t width, float scale) {
  const Df d;
  const Vf end = hn::Set(d, static_cast<float>(count));
  Vf most = hn::Set(d, std::numeric_limits<float>::lowest());
  for (std::size_t i = 0; i < count; i += kLanes) most = hn::Max(most, LoadBefore(end, row, i));
  most = hn::MaxOfLanes(d, most);
  const Vf to_exponent = hn::Set(d, scale * 1.44269504f);  // exp(x) = 2^(x / ln 2).
  Vf sum = hn::Zero(d);
  std::size_t i = 0;
  for (; i < count; i += kLanes) {
    const Vf p = Exp2(hn::Mul(hn::Sub(LoadBefore(end, row, i), most), to_exponent));
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, row + i);
  }
  for (; i < width; i += kLanes) hn::StoreU(hn::Zero(d), d, row + i);
  const Vf share = hn::Set(d, 1.0f / SumOf(sum));
  for (i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, row + i), share), d, row + i);
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvmill {

HWY_EXPORT(Multiply);
HWY_EXPORT(Softmax);

void MultiplyCpu(const ProductArgs& args) { HWY_DYNAMIC_DISPATCH(Multiply)(args); }

void SoftmaxCpu(float* row, std::size_t count, std::size_t width, float scale) {
  HWY_DYNAMIC_DISPATCH(Softmax)(row, count, width, scale);
}

}  // namespace kvmill
#endif  // HWY_ONCE
