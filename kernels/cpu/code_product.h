// The one product that attention over tiles is made of: rows of numbers times a matrix of codes.
//
//   out[r][n] = sum_k rows[r][k] * code[k][n]
//
// Scores are the folded queries times the codes of K (k: channels, n: tokens); outputs are the
// folded probabilities times the codes of V (k: tokens, n: channels). Both halves of a record lie
// the same way: row k holds its codes one after the other along n. Every implementation unpacks a
// code once and uses it for all rows; they differ in the arithmetic, and an integer one first turns
// each row into fixed point of its own unit, with 15 bits and a sign: an error of at most 2^-16 of
// the largest number of the row, far below what 4-bit codes cost.
#ifndef KVMILL_KERNELS_CPU_CODE_PRODUCT_H_
#define KVMILL_KERNELS_CPU_CODE_PRODUCT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/tile_format.h"

namespace kvmill {

struct CodeMatrix {
  const std::byte* codes = nullptr;  // Any alignment.
  std::uint32_t bits = 4;            // 2 or 4.
  std::size_t rows = 0;              // k: 64, 128 or 256.
  std::size_t columns = 0;           // n: the same.
};

// One way to multiply. `rows` and `out` are aligned to 64 bytes, without gaps; rows are finite.
// `scratch` is one thread's, kCodeProductScratchBytes, aligned to 64.
struct CodeProduct {
  const char* name;
  bool (*is_supported)();  // By this CPU and operating system. Any thread.
  // Around any number of calls of `multiply` on one thread.
  void (*open)();
  void (*close)();
  void (*multiply)(const CodeMatrix& matrix, const float* rows, std::size_t row_count, float* out,
                   std::byte* scratch);
};

// Rows that are multiplied together at most.
inline constexpr std::size_t kCodeProductRowsMax = 32;

// Unpacked codes, 16 bits each, of the largest half (256 x 128), and as many numbers of fixed point
// as rows have.
inline constexpr std::size_t kCodeProductScratchBytes =
    std::size_t{2} * kHeadDimMax * kGroupMax + std::size_t{2} * kCodeProductRowsMax * kHeadDimMax +
    4096;

#if defined(__x86_64__)
extern const CodeProduct kCodeProductAmx;
extern const CodeProduct kCodeProductVnni;
extern const CodeProduct kCodeProductAvx2;
#endif

// The one to use, for the level in use and what was forced; null for the portable one, which is
// part of the kernel of each level.
const CodeProduct* ChosenCodeProduct();

// Whether the level in use is more than "SCALAR".
bool LevelHasVectors();

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_CODE_PRODUCT_H_
