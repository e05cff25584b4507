#include <cmath>

#include "kernels/hadamard.h"
#include "kernels/tile_format.h"

namespace kvmill {

void RotateRowsReference(float* rows, std::size_t row_count, std::size_t dim) {
  const double norm = 1.0 / std::sqrt(static_cast<double>(dim));
  for (std::size_t r = 0; r < row_count; ++r) {
    float* row = rows + r * dim;
    double x[kHeadDimMax];
    for (std::size_t i = 0; i < dim; ++i) x[i] = static_cast<double>(row[i]);
    for (std::size_t half = 1; half < dim; half *= 2) {
      for (std::size_t start = 0; start < dim; start += 2 * half) {
        for (std::size_t i = start; i < start + half; ++i) {
          const double a = x[i];
          const double b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
      }
    }
    for (std::size_t i = 0; i < dim; ++i) row[i] = static_cast<float>(x[i] * norm);
  }
}

}  // namespace kvmill
