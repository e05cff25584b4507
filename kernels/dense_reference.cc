#include <algorithm>
#include <cmath>

#include "kernels/dense.h"

namespace kvmill {

void MultiplyReference(const ProductArgs& args) {
  for (std::size_t i = 0; i < args.rows; ++i) {
    for (std::size_t j = 0; j < args.columns; ++j) {
      double sum = 0;
      for (std::size_t c = 0; c < args.depth; ++c) {
        sum += static_cast<double>(args.a[i * args.a_stride + c]) *
               static_cast<double>(args.b[c * args.b_stride + j]);
      }
      args.out[i * args.out_stride + j] = static_cast<float>(sum);
    }
  }
}

void SoftmaxReference(float* row, std::size_t count, std::size_t width, float scale) {
  const double most = static_cast<double>(*std::max_element(row, row + count));
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += std::exp(static_cast<double>(scale) * (static_cast<double>(row[i]) - most));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(scale) * (static_cast<double>(row[i]) - most);
    row[i] = static_cast<float>(std::exp(x) / sum);
  }
  std::fill(row + count, row + width, 0.0f);
}

void GateReference(const float* gate, const float* up, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto x = static_cast<double>(gate[i]);
    out[i] = static_cast<float>(x / (1 + std::exp(-x)) * static_cast<double>(up[i]));
  }
}

}  // namespace kvmill
