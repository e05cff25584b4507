// What the int8 products (VNNI, AMX) share: rows as two planes of int8, codes as quads of uint8.
//
// A number of a row becomes q = 256 * high + low with high and low in int8, so that two products of
// int8 and uint8 give one of 15 bits and a sign: an error of at most 2^-16 of the largest number of
// the row. The codes of four rows of the matrix are brought together,
//
//   row k:    a0 a1 ... a15 (bytes, each 8 / bits codes)      a0 b0 c0 d0 a1 b1 c1 d1 ...
//   row k+1:  b0 ...              one byte permutation        & 0x0F..: code 0 of every byte
//   row k+2:  c0 ...                                          & 0xF0..: code 1, times 16
//   row k+3:  d0 ...
//
// which are 16 columns of four uint8 each: what vpdpbusd and tdpbsud multiply. Code m of a byte
// stays where it is in the byte and counts 2^(m * bits) times too much, at most 240; the sums of a
// plane stay below 256 rows * 128 * 240 = 7.9e6, and 256 * high + low below 2.02e9 < 2^31.
#ifndef KVMILL_KERNELS_CPU_CODE_PLANES_AVX512_H_
#define KVMILL_KERNELS_CPU_CODE_PLANES_AVX512_H_

// GCC 12 takes the undefined registers that its own intrinsics start from for mistakes (GCC
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/code_product.h"

#define KVMILL_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"
#define KVMILL_AVX512_INLINE __attribute__((always_inline, target(KVMILL_AVX512))) inline

namespace kvmill {

inline bool HasAvx512ForCodes() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0;
}

// Rows to planes: planes[(2 * r) * length ...] is the high plane of row r, the next one the low.
// units[r] is what 1 stands for.
KVMILL_AVX512_INLINE void SplitRows(const float* rows, std::size_t row_count, std::size_t length,
                                    std::int8_t* planes, float* units) {
  // Of two vectors of int32: byte 1 of each, then byte 0 of each.
  alignas(64) static constexpr std::uint8_t kBytes[64] = {
      1,  5,  9,  13, 17, 21, 25, 29, 33, 37,  41,  45,  49,  53,  57,  61,
      65, 69, 73, 77, 81, 85, 89, 93, 97, 101, 105, 109, 113, 117, 121, 125,
      0,  4,  8,  12, 16, 20, 24, 28, 32, 36,  40,  44,  48,  52,  56,  60,
      64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
  const __m512i bytes = _mm512_load_si512(kBytes);
  // 128 more make low, taken as unsigned, 128 more: flipping its top bit takes them back.
  const __m512i flip = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(-128), 1);
  const __m512 offset = _mm512_set1_ps(128.0f);
  for (std::size_t r = 0; r < row_count; ++r, rows += length, planes += 2 * length) {
    __m512 largest = _mm512_setzero_ps();
    for (std::size_t i = 0; i < length; i += 16) {
      largest = _mm512_range_ps(largest, _mm512_load_ps(rows + i), 0xB);  // max(|a|, |b|).
    }
    units[r] = _mm512_reduce_max_ps(largest) * (1 / 32512.0f);  // 127 * 256.
    // An inverse that overflows belongs to numbers that are 0 for every purpose.
    float inverse = 1 / units[r];
    if (!std::isfinite(inverse)) inverse = 0;
    const __m512 scale = _mm512_set1_ps(inverse);
    for (std::size_t i = 0; i < length; i += 32) {
      const __m512i a =
          _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(rows + i), scale, offset));
      const __m512i b =
          _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(rows + i + 16), scale, offset));
      const __m512i split = _mm512_xor_si512(_mm512_permutex2var_epi8(a, bytes, b), flip);
      _mm256_store_si256(reinterpret_cast<__m256i*>(planes + i), _mm512_castsi512_si256(split));
      _mm256_store_si256(reinterpret_cast<__m256i*>(planes + length + i),
                         _mm512_extracti64x4_epi64(split, 1));
    }
  }
}

// Quads of codes of the whole matrix: vector v of quad k / 4 at quads[(v * rows / 4 + k / 4) * 64].
// Vectors 8 / bits * b + m for m = 0, 1, ... hold code m of the 16 bytes from 16 * b on.
template <std::uint32_t kBits>
KVMILL_AVX512_INLINE void UnpackQuads(const CodeMatrix& matrix, std::uint8_t* quads) {
  constexpr std::size_t kPerByte = 8 / kBits;
  alignas(64) static constexpr std::uint8_t kTranspose[64] = {
      0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
      37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
      11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  const __m512i transpose = _mm512_load_si512(kTranspose);
  const std::size_t row_bytes = matrix.columns / kPerByte;
  const std::size_t vector_bytes = matrix.rows * 16;
  for (std::size_t k = 0; k < matrix.rows; k += 4) {
    const std::byte* row = matrix.codes + k * row_bytes;
    std::uint8_t* to = quads + k * 16;
    for (std::size_t b = 0; b < row_bytes; b += 16) {
      const auto* from = reinterpret_cast<const __m128i*>(row + b);
      const auto* from1 = reinterpret_cast<const __m128i*>(row + row_bytes + b);
      const auto* from2 = reinterpret_cast<const __m128i*>(row + 2 * row_bytes + b);
      const auto* from3 = reinterpret_cast<const __m128i*>(row + 3 * row_bytes + b);
      __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(from));
      v = _mm512_inserti32x4(v, _mm_loadu_si128(from1), 1);
      v = _mm512_inserti32x4(v, _mm_loadu_si128(from2), 2);
      v = _mm512_inserti32x4(v, _mm_loadu_si128(from3), 3);
      v = _mm512_permutexvar_epi8(transpose, v);
      for (std::size_t m = 0; m < kPerByte; ++m, to += vector_bytes) {
        const int mask = ((1 << kBits) - 1) << (m * kBits);
        _mm512_store_si512(to, _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask))));
      }
    }
  }
}

// The 8 / bits vectors of 16 bytes to floats in the order of columns: 128 / bits of them.
template <std::uint32_t kBits>
KVMILL_AVX512_INLINE void StoreColumns(const __m512i* high, const __m512i* low, float unit,
                                       float* out) {
  constexpr std::size_t kPerByte = 8 / kBits;
  __m512 v[kPerByte];
  for (std::size_t m = 0; m < kPerByte; ++m) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]);
    v[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum),
                         _mm512_set1_ps(unit / static_cast<float>(1u << (m * kBits))));
  }
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const __m512 a = _mm512_permutex2var_ps(v[0], first, v[1]);
  const __m512 b = _mm512_permutex2var_ps(v[0], second, v[1]);
  if constexpr (kPerByte == 2) {
    _mm512_store_ps(out, a);
    _mm512_store_ps(out + 16, b);
  } else {
    const __m512i first2 = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i second2 = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    const __m512d c = _mm512_castps_pd(_mm512_permutex2var_ps(v[2], first, v[3]));
    const __m512d d = _mm512_castps_pd(_mm512_permutex2var_ps(v[2], second, v[3]));
    const __m512d ad = _mm512_castps_pd(a);
    const __m512d bd = _mm512_castps_pd(b);
    auto* to = reinterpret_cast<double*>(out);
    _mm512_store_pd(to, _mm512_permutex2var_pd(ad, first2, c));
    _mm512_store_pd(to + 8, _mm512_permutex2var_pd(ad, second2, c));
    _mm512_store_pd(to + 16, _mm512_permutex2var_pd(bd, first2, d));
    _mm512_store_pd(to + 24, _mm512_permutex2var_pd(bd, second2, d));
  }
}

// Where the parts of a product's scratch are.
struct PlaneScratch {
  std::uint8_t* quads;  // rows * columns bytes.
  std::int8_t* planes;  // 2 * kCodeProductRowsMax rows.
  explicit PlaneScratch(std::byte* scratch)
      : quads(reinterpret_cast<std::uint8_t*>(scratch)),
        planes(reinterpret_cast<std::int8_t*>(scratch) + std::size_t{kHeadDimMax} * kGroupMax) {}
};

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_CODE_PLANES_AVX512_H_
