// int16: vpmaddwd adds two products of a code and a 15-bit number into one int32 lane.
//
// The packed codes of two rows are interleaved by 16-bit words, so that masks give pairs of codes:
//
//   word of row k:    c0 c1 c2 c3 (4 bits each)       dword: c0 c1 c2 c3 | d0 d1 d2 d3
//   word of row k+1:  d0 d1 d2 d3                     & 0x000F000F: the pair c0, d0
//
// Code m of a byte stays where it is in the byte and so counts 2^(m * bits) times too much, at most
// 240; sums stay below 256 rows * 32767 * 240 = 2.01e9 < 2^31.
#include "kernels/cpu/tile_method.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#define KVMILL_TARGET __attribute__((target("avx2,fma")))
#define KVMILL_INLINE __attribute__((always_inline, target("avx2,fma"))) inline

namespace kvmill {
namespace {

constexpr float kNumberMax = 32767.0f;

// Rows to fixed point; units[r] is what 1 stands for.
KVMILL_TARGET void FixRows(const float* rows, std::size_t row_count, std::size_t length,
                           std::int16_t* fixed, float* units) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  for (std::size_t r = 0; r < row_count; ++r, rows += length, fixed += length) {
    __m256 largest = _mm256_setzero_ps();
    for (std::size_t i = 0; i < length; i += 8) {
      largest = _mm256_max_ps(largest, _mm256_and_ps(_mm256_load_ps(rows + i), magnitude));
    }
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    half = _mm_max_ss(half, _mm_movehdup_ps(half));
    units[r] = _mm_cvtss_f32(half) * (1 / kNumberMax);
    // An inverse that overflows belongs to numbers that are 0 for every purpose.
    float inverse = 1 / units[r];
    if (!std::isfinite(inverse)) inverse = 0;
    const __m256 scale = _mm256_set1_ps(inverse);
    for (std::size_t i = 0; i < length; i += 16) {
      const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(rows + i), scale));
      const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(rows + i + 8), scale));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
      _mm256_store_si256(reinterpret_cast<__m256i*>(fixed + i), packed);
    }
  }
}

// 16 bytes of each of two rows, interleaved by words.
KVMILL_INLINE __m256i InterleaveRows(const std::byte* a, const std::byte* b) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(x, y)),
                                 _mm_unpackhi_epi16(x, y), 1);
}

// A slab is the columns of 16 bytes of every row: kVectors vectors of 8 columns, vector m holding
// code m of each word. slab[(k / 2 * kVectors + m) * 16], in int16.
template <std::uint32_t kBits>
KVMILL_TARGET void UnpackSlab(const CodeMatrix& matrix, std::size_t first_byte,
                              std::int16_t* slab) {
  constexpr std::size_t kPerByte = 8 / kBits;
  const std::size_t row_bytes = matrix.columns * kBits / 8;
  const std::byte* codes = matrix.codes + first_byte;
  auto* to = reinterpret_cast<__m256i*>(slab);
  for (std::size_t k = 0; k < matrix.rows; k += 2, codes += 2 * row_bytes) {
    const __m256i low = InterleaveRows(codes, codes + row_bytes);
    const __m256i high = _mm256_srli_epi16(low, 8);
    for (const __m256i& bytes : {low, high}) {
      for (std::size_t m = 0; m < kPerByte; ++m) {
        const int mask = ((1 << kBits) - 1) << (m * kBits);
        _mm256_store_si256(to++,
                           _mm256_and_si256(bytes, _mm256_set1_epi16(static_cast<short>(mask))));
      }
    }
  }
}

// out[4 * i + j] of each 128-bit lane: lane i of vector j.
KVMILL_INLINE void Transpose4(__m256* v) {
  const __m256 a = _mm256_unpacklo_ps(v[0], v[1]);
  const __m256 b = _mm256_unpackhi_ps(v[0], v[1]);
  const __m256 c = _mm256_unpacklo_ps(v[2], v[3]);
  const __m256 e = _mm256_unpackhi_ps(v[2], v[3]);
  v[0] = _mm256_shuffle_ps(a, c, 0x44);
  v[1] = _mm256_shuffle_ps(a, c, 0xEE);
  v[2] = _mm256_shuffle_ps(b, e, 0x44);
  v[3] = _mm256_shuffle_ps(b, e, 0xEE);
}

// Sums of one row in two vectors of columns. Not an array, and of the type that is added: GCC 12
// otherwise copies them from register to register at every step.
using Sums = int __attribute__((vector_size(32)));
struct RowSums {
  Sums first, second;
};

KVMILL_INLINE void AddPair(__m256i x, __m256i y, const std::int16_t* pair, RowSums& sums) {
  const __m256i q = _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(pair)));
  sums.first += reinterpret_cast<Sums>(_mm256_madd_epi16(x, q));
  sums.second += reinterpret_cast<Sums>(_mm256_madd_epi16(y, q));
}

KVMILL_INLINE void Store(const RowSums& sums, std::int32_t (*to)[8]) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to[0]), reinterpret_cast<__m256i>(sums.first));
  _mm256_store_si256(reinterpret_cast<__m256i*>(to[1]), reinterpret_cast<__m256i>(sums.second));
}

// kRows rows, 1, 2 or 4, times one slab, into out[r * columns ...].
template <std::uint32_t kBits, std::size_t kRows>
KVMILL_TARGET void MultiplySlab(const std::int16_t* slab, const std::int16_t* fixed,
                                const float* units, std::size_t length, std::size_t columns,
                                float* out) {
  constexpr std::size_t kPerByte = 8 / kBits;
  constexpr std::size_t kVectors = 2 * kPerByte;
  alignas(32) std::int32_t sums[kRows][kVectors][8];
  for (std::size_t first = 0; first < kVectors; first += 2) {
    const auto* codes = reinterpret_cast<const __m256i*>(slab) + first;
    RowSums row0{};
    RowSums row1{};
    RowSums row2{};
    RowSums row3{};
    for (std::size_t k = 0; k < length; k += 2, codes += kVectors) {
      const __m256i x = _mm256_load_si256(codes);
      const __m256i y = _mm256_load_si256(codes + 1);
      AddPair(x, y, fixed + k, row0);
      if constexpr (kRows > 1) AddPair(x, y, fixed + length + k, row1);
      if constexpr (kRows > 2) AddPair(x, y, fixed + 2 * length + k, row2);
      if constexpr (kRows > 2) AddPair(x, y, fixed + 3 * length + k, row3);
    }
    Store(row0, &sums[0][first]);
    if constexpr (kRows > 1) Store(row1, &sums[1][first]);
    if constexpr (kRows > 2) Store(row2, &sums[2][first]);
    if constexpr (kRows > 2) Store(row3, &sums[3][first]);
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    // Word i of the slab has the columns kVectors * i + 0 .. kVectors - 1.
    for (std::size_t first = 0; first < kVectors; first += 4) {
      __m256 v[4];
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t m = (first + j) % kPerByte;
        const float unit = units[r] / static_cast<float>(1u << (m * kBits));
        v[j] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_load_si256(
                                 reinterpret_cast<const __m256i*>(sums[r][first + j]))),
                             _mm256_set1_ps(unit));
      }
      Transpose4(v);
      for (std::size_t i = 0; i < 4; ++i) {
        float* to = out + r * columns + first;
        _mm_store_ps(to + kVectors * i, _mm256_castps256_ps128(v[i]));
        _mm_store_ps(to + kVectors * (i + 4), _mm256_extractf128_ps(v[i], 1));
      }
    }
  }
}

template <std::uint32_t kBits>
KVMILL_TARGET void MultiplyOf(const CodeMatrix& matrix, const std::int16_t* fixed,
                              const float* units, std::size_t row_count, float* out,
                              std::int16_t* slab) {
  constexpr std::size_t kPerByte = 8 / kBits;
  const std::size_t length = matrix.rows;
  for (std::size_t byte = 0; byte < matrix.columns / kPerByte; byte += 16) {
    UnpackSlab<kBits>(matrix, byte, slab);
    float* to = out + byte * kPerByte;
    std::size_t r = 0;
    for (; r + 4 <= row_count; r += 4) {
      MultiplySlab<kBits, 4>(slab, fixed + r * length, units + r, length, matrix.columns,
                             to + r * matrix.columns);
    }
    for (; r + 2 <= row_count; r += 2) {
      MultiplySlab<kBits, 2>(slab, fixed + r * length, units + r, length, matrix.columns,
                             to + r * matrix.columns);
    }
    if (r < row_count) {
      MultiplySlab<kBits, 1>(slab, fixed + r * length, units + r, length, matrix.columns,
                             to + r * matrix.columns);
    }
  }
}

KVMILL_TARGET void Multiply(const CodeMatrix& matrix, const float* rows, std::size_t row_count,
                            float* out, std::byte* scratch) {
  alignas(32) float units[kUnitRowsMax];
  auto* fixed = reinterpret_cast<std::int16_t*>(scratch);
  std::int16_t* slab = fixed + kUnitRowsMax * kHeadDimMax;
  FixRows(rows, row_count, matrix.rows, fixed, units);
  if (matrix.bits == 4) {
    MultiplyOf<4>(matrix, fixed, units, row_count, out, slab);
  } else {
    MultiplyOf<2>(matrix, fixed, units, row_count, out, slab);
  }
}

bool IsSupported() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

void Nothing() {}

}  // namespace

const TileMethod kTileAvx2 = {"AVX2",   IsSupported, Nothing, Nothing,
                              Multiply, nullptr,     nullptr, nullptr};

}  // namespace kvmill
#endif  // __x86_64__
