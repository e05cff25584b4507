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
void Gate(const float* gate, const float* up, std::size_t count, float* out) {
  GateReference(gate, up, count, out);
}

#else

// Some rows of `b`, of a few columns.
struct Panel {
  const float* b;      // Of row `first`.
  std::size_t stride;  // Floats from row to row.
  std::size_t first, depth;
};

// Rows of a panel that is copied: with two vectors of columns 16 KiB, half of the first cache.
constexpr std::size_t kPanelColumns = 2 * kLanes;
constexpr std::size_t kPanelDepth = 4096 / kPanelColumns;
// From here on copying a panel costs less than what it saves.
constexpr std::size_t kRowsToCopyFor = 12;

// kRows rows of `a` from row i on times kVectors vectors of columns from column j on, in registers;
// sums go on where the panel before this one left them.
template <std::size_t kRows, std::size_t kVectors>
HWY_INLINE void MultiplyTile(const ProductArgs& args, const Panel& panel, std::size_t i,
                             std::size_t j) {
  const Df d;
  Vf sums[kRows][kVectors];
  float* const out = args.out + i * args.out_stride + j;
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      sums[r][v] =
          panel.first == 0 ? hn::Zero(d) : hn::LoadU(d, out + r * args.out_stride + v * kLanes);
    }
  }
  const float* a = args.a + i * args.a_stride + panel.first;
  const float* b = panel.b;
  for (std::size_t c = 0; c < panel.depth; ++c, b += panel.stride) {
    Vf columns[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + v * kLanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vf x = hn::Set(d, a[r * args.a_stride + c]);
      for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(x, columns[v], sums[r][v]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      hn::StoreU(sums[r][v], d, out + r * args.out_stride + v * kLanes);
    }
  }
}

// All rows times the same columns. 12 sums, the vectors of columns and a value of `a` fill the 16
// registers of AVX2.
template <std::size_t kVectors>
HWY_INLINE void MultiplyRows(const ProductArgs& args, const Panel& panel, std::size_t j) {
  std::size_t i = 0;
  for (; i + 6 <= args.rows; i += 6) MultiplyTile<6, kVectors>(args, panel, i, j);
  for (; i + 2 <= args.rows; i += 2) MultiplyTile<2, kVectors>(args, panel, i, j);
  if (i < args.rows) MultiplyTile<1, kVectors>(args, panel, i, j);
}

template <std::size_t kVectors>
HWY_INLINE void MultiplyColumns(const ProductArgs& args, std::size_t j) {
  if (args.rows < kRowsToCopyFor) {
    MultiplyRows<kVectors>(args, {args.b + j, args.b_stride, 0, args.depth}, j);
    return;
  }
  // Rows of `b` lie kilobytes apart, mostly at multiples of 512 or 1,024 bytes, which share a few
  // sets of the first cache: as they are, a panel would not stay there from one tile to the next.
  const Df d;
  alignas(64) float copy[kPanelDepth * kPanelColumns];
  for (std::size_t first = 0; first < args.depth; first += kPanelDepth) {
    const std::size_t left = args.depth - first;
    const Panel panel{copy, kVectors * kLanes, first, left < kPanelDepth ? left : kPanelDepth};
    const float* from = args.b + first * args.b_stride + j;
    float* to = copy;
    for (std::size_t c = 0; c < panel.depth; ++c, from += args.b_stride, to += panel.stride) {
      for (std::size_t v = 0; v < kVectors; ++v) {
        hn::Store(hn::LoadU(d, from + v * kLanes), d, to + v * kLanes);
      }
    }
    MultiplyRows<kVectors>(args, panel, j);
  }
}

void Multiply(const ProductArgs& args) {
  std::size_t j = 0;
  if (args.rows == 1) {  // A vector times a matrix: as wide as a few lines of the matrix.
    for (; j + 8 * kLanes <= args.columns; j += 8 * kLanes) {
      MultiplyTile<1, 8>(args, {args.b + j, args.b_stride, 0, args.depth}, 0, j);
    }
  }
  for (; j + 2 * kLanes <= args.columns; j += 2 * kLanes) MultiplyColumns<2>(args, j);
  for (; j < args.columns; j += kLanes) MultiplyColumns<1>(args, j);
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

void Gate(const float* gate, const float* up, std::size_t count, float* out) {
  const Df d;
  const Vf one = hn::Set(d, 1.0f);
  for (std::size_t i = 0; i < count; i += kLanes) {
    const Vf x = hn::LoadU(d, gate + i);
    // 1 / (1 + e^-x), with an exponent that is not positive: for x < 0 it is e^x / (1 + e^x).
    const Vf e = Exp2(hn::Mul(hn::Abs(x), hn::Set(d, -1.44269504f)));
    const Vf above = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
    const Vf share = hn::Div(above, hn::Add(one, e));
    hn::StoreU(hn::Mul(hn::Mul(x, share), hn::LoadU(d, up + i)), d, out + i);
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
HWY_EXPORT(Gate);

void MultiplyCpu(const ProductArgs& args) { HWY_DYNAMIC_DISPATCH(Multiply)(args); }

void SoftmaxCpu(float* row, std::size_t count, std::size_t width, float scale) {
  HWY_DYNAMIC_DISPATCH(Softmax)(row, count, width, scale);
}

void GateCpu(const float* gate, const float* up, std::size_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(Gate)(gate, up, count, out);
}

}  // namespace kvmill
#endif  // HWY_ONCE
