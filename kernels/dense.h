// What a dense layer of a decoder needs besides attention over tiles: products of matrices,
// softmax, and the gate of SwiGLU, in fp32. For the small model that quality is measured with
// (client/eval); engines have their own.
//
// Pure functions over the caller's memory: thread-safe, no allocation, no global state.
#ifndef KVMILL_KERNELS_DENSE_H_
#define KVMILL_KERNELS_DENSE_H_

#include <cstddef>

namespace kvmill {

// Columns of products, widths of softmax rows and counts of gates are multiples of it: the widest
// vector.
inline constexpr std::size_t kDenseColumns = 16;

struct ProductArgs {
  const float* a = nullptr;  // [rows][depth], rows a_stride floats apart. Any alignment, as below.
  const float* b = nullptr;  // [depth][columns], b_stride apart.
  float* out = nullptr;      // [rows][columns], out_stride apart; overlaps neither a nor b.
  std::size_t rows = 0, depth = 0, columns = 0;  // columns: a multiple of kDenseColumns.
  std::size_t a_stride = 0, b_stride = 0, out_stride = 0;
};

// out = a · b. Reference: sums in fp64, rounded once. Cpu: fp32 sums; differs from the reference by
// at most 4e-7 * sqrt(depth) of |row of a| * |column of b|.
void MultiplyReference(const ProductArgs& args);
void MultiplyCpu(const ProductArgs& args);

// In place: the first `count` of `width` values become exp(scale * x) / sum of those, the rest 0.
// 1 <= count <= width < 2^24, width a multiple of kDenseColumns, scale > 0, finite values.
// Reference: fp64 inside. Cpu: within 2e-6 of the reference, absolute.
void SoftmaxReference(float* row, std::size_t count, std::size_t width, float scale);
void SoftmaxCpu(float* row, std::size_t count, std::size_t width, float scale);

// out = gate / (1 + exp(-gate)) * up, element by element. `count`: a multiple of kDenseColumns;
// finite values. Reference: fp64 inside. Cpu: within 2e-6 of |gate * up| of the reference. `out`
// may be `gate` or `up`.
void GateReference(const float* gate, const float* up, std::size_t count, float* out);
void GateCpu(const float* gate, const float* up, std::size_t count, float* out);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_DENSE_H_
