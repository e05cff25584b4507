// The rotation along the head dimension: row · H, with H the Sylvester Hadamard matrix / sqrt(dim).
//
// H[i][j] = (-1)^popcount(i & j) / sqrt(dim); it is symmetric and its own inverse, so the same call
// rotates and un-rotates, and a double rotation silently gives back the model's frame: callers keep
// the frame in a Frame (kernels/encode.h), never in mind. Scores need no un-rotated keys:
// (q·H)·(k·H) = q·k.
//
// Thread-safe, no allocation.
#ifndef KVMILL_KERNELS_HADAMARD_H_
#define KVMILL_KERNELS_HADAMARD_H_

#include <cstddef>

namespace kvmill {

// In place over `row_count` rows of `dim` floats, rows `dim` floats apart; any alignment. `dim` is
// a power of two, 16 to 256. Reference: sums in fp64, rounded to fp32 once. Cpu: fp32 butterflies;
// differs from the reference by at most 1e-6 of the largest value of the row.
void RotateRowsReference(float* rows, std::size_t row_count, std::size_t dim);
void RotateRowsCpu(float* rows, std::size_t row_count, std::size_t dim);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_HADAMARD_H_
