// A whole tile with AVX-512, for the methods that multiply int8 (VNNI, AMX).
//
// A number of a row becomes q = 256 * high + low with high and low in int8, so that two products of
// int8 and uint8 give one of 15 bits and a sign: an error of at most 2^-16 of the unit's range. The
// codes of four rows of the matrix are brought together,
//
//   row k:    a0 a1 ... a15 (bytes, each 8 / bits codes)      a0 b0 c0 d0 a1 b1 c1 d1 ...
//   row k+1:  b0 ...              one byte permutation        & 0x0F..: code 0 of every byte
//   row k+2:  c0 ...                                          & 0xF0..: code 1, times 16
//   row k+3:  d0 ...
//
// into quads: 16 columns of four uint8, what vpdpbusd and tdpbsud multiply. Code m of a byte stays
// where it is in the byte and counts 2^(m * bits) times too much, at most 240; the sums of a plane
// stay below 256 rows * 128 * 240 = 7.9e6, and 256 * high + low below 2.02e9 < 2^31.
//
// Columns come out in plane order (tile_method.h). Nothing puts them back: T, S and Z are brought
// into plane order instead, once for all rows; rows of V are taken in the order in which the tokens
// of K came out; and the sums of V stay in it until the unit ends.
#ifndef KVMILL_KERNELS_CPU_TILE_AVX512_H_
#define KVMILL_KERNELS_CPU_TILE_AVX512_H_

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
#include <limits>

#include "kernels/cpu/tile_method.h"

#define KVMILL_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"
#define KVMILL_AVX512_TARGET __attribute__((target(KVMILL_AVX512)))
#define KVMILL_AVX512_INLINE __attribute__((always_inline, target(KVMILL_AVX512))) inline

namespace kvmill {

inline bool HasAvx512ForTiles() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0;
}

// ---- The operands and the result of a product. ----

// Rows that share a block of sums: their planes are the 16 rows of a tile register.
inline constexpr std::size_t kBlockRows = 8;

// Where things are in TileStep::scratch.
struct Avx512Scratch {
  std::uint8_t* quads;  // matrix.rows * matrix.columns bytes: vector v of quad q at
                        // (v * matrix.rows / 4 + q) * 64.
  std::int8_t* planes;  // [2 * rows][matrix.rows]: the high plane of a row, then the low one.
  std::int32_t* sums;   // [rows / kBlockRows][vectors][2 * kBlockRows][16]
  float* scales;        // [6][kHeadDimMax]

  explicit Avx512Scratch(std::byte* scratch)
      : quads(reinterpret_cast<std::uint8_t*>(scratch)),
        planes(reinterpret_cast<std::int8_t*>(quads + std::size_t{kHeadDimMax} * kGroupMax)),
        sums(reinterpret_cast<std::int32_t*>(planes + 2 * kUnitRowsMax * kHeadDimMax)),
        scales(reinterpret_cast<float*>(sums + 2 * kUnitRowsMax * kHeadDimMax)) {}
};
static_assert(kTileScratchBytes >= std::size_t{kHeadDimMax} * kGroupMax +
                                       2 * kUnitRowsMax * kHeadDimMax +
                                       8 * kUnitRowsMax * kHeadDimMax + 24 * kHeadDimMax);

// A product: `planes` times `matrix` into `sums`. Row k of the product is row PlaneColumn(k,
// row_order_bits) of the matrix; 8 bits mean their own order.
struct Avx512Product {
  CodeMatrix matrix;
  std::uint32_t row_order_bits;
  std::size_t row_count;
  std::uint8_t* quads;
  const std::int8_t* planes;
  std::int32_t* sums;
  const std::byte* next_codes;  // Of the same matrix of the next record.
};

// kApart: rows between those of a quad. Quads of the 16 bytes from `byte` on of every row: 8 /
// kBits vectors from `quads` on, each matrix.rows / 4 quads.
template <std::uint32_t kBits, std::size_t kApart>
KVMILL_AVX512_INLINE void UnpackQuadsApart(const Avx512Product& product, std::size_t byte,
                                           std::uint8_t* quads) {
  constexpr std::size_t kPlanes = 8 / kBits;
  alignas(64) static constexpr std::uint8_t kTranspose[64] = {
      0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
      37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
      11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
  const __m512i transpose = _mm512_load_si512(kTranspose);
  __m512i mask[kPlanes];
  for (std::size_t m = 0; m < kPlanes; ++m) {
    mask[m] = _mm512_set1_epi8(static_cast<char>(((1 << kBits) - 1) << (m * kBits)));
  }
  const std::size_t row_bytes = product.matrix.columns / kPlanes;
  const std::size_t length = product.matrix.rows;
  const std::byte* codes = product.matrix.codes + byte;
  // As many bytes of the matrix that comes next are asked for as are read here: four lines for each
  // 16 rows of 16 bytes.
  const std::byte* next = product.next_codes + byte * length;
  for (std::size_t first = 0; first < length; first += 16 * kApart) {
    for (std::size_t m = 0; m < kApart; ++m) {
      const std::byte* row = codes + (first + m) * row_bytes;
      const std::size_t step = kApart * row_bytes;
      for (std::size_t i = 0; i < 4; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      for (std::size_t i = 0; i < 4; ++i, row += 4 * step, quads += 64) {
        __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
        v = _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + step)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * step)),
                               2);
        v = _mm512_inserti32x4(v, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 3 * step)),
                               3);
        v = _mm512_permutexvar_epi8(transpose, v);
        for (std::size_t n = 0; n < kPlanes; ++n) {
          _mm512_store_si512(quads + n * length * 16, _mm512_and_si512(v, mask[n]));
        }
      }
    }
  }
}

template <std::uint32_t kBits>
KVMILL_AVX512_INLINE void UnpackQuads(const Avx512Product& product, std::size_t byte,
                                      std::uint8_t* quads) {
  switch (product.row_order_bits) {
    case 2:
      return UnpackQuadsApart<kBits, 4>(product, byte, quads);
    case 4:
      return UnpackQuadsApart<kBits, 2>(product, byte, quads);
    default:
      return UnpackQuadsApart<kBits, 1>(product, byte, quads);
  }
}

// 32 numbers to both planes. `scale` is 1 / unit.
KVMILL_AVX512_INLINE void StorePlanes(__m512 a, __m512 b, __m512 scale, std::int8_t* high,
                                      std::int8_t* low) {
  // Of two vectors of int32: byte 1 of each, then byte 0 of each.
  alignas(64) static constexpr std::uint8_t kBytes[64] = {
      1,  5,  9,  13, 17, 21, 25, 29, 33, 37,  41,  45,  49,  53,  57,  61,
      65, 69, 73, 77, 81, 85, 89, 93, 97, 101, 105, 109, 113, 117, 121, 125,
      0,  4,  8,  12, 16, 20, 24, 28, 32, 36,  40,  44,  48,  52,  56,  60,
      64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
  // 128 more round the high byte to nearest and leave the low one, taken as unsigned, 128 too high:
  // flipping its top bit takes them back.
  const __m512 offset = _mm512_set1_ps(128.0f);
  const __m512i flip = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi8(-128), 1);
  const __m512i x = _mm512_cvtps_epi32(_mm512_fmadd_ps(a, scale, offset));
  const __m512i y = _mm512_cvtps_epi32(_mm512_fmadd_ps(b, scale, offset));
  const __m512i split =
      _mm512_xor_si512(_mm512_permutex2var_epi8(x, _mm512_load_si512(kBytes), y), flip);
  _mm256_store_si256(reinterpret_cast<__m256i*>(high), _mm512_castsi512_si256(split));
  _mm256_store_si256(reinterpret_cast<__m256i*>(low), _mm512_extracti64x4_epi64(split, 1));
}

// The unit of fixed point for numbers up to `largest`, and its inverse; an inverse that overflows
// belongs to numbers that are 0 for every purpose.
struct FixedUnit {
  float unit;
  float inverse;
};
inline FixedUnit UnitFor(float largest) {
  const float unit = largest * (1 / 32512.0f);  // 127 * 256.
  const float inverse = 1 / unit;
  return {unit, inverse <= std::numeric_limits<float>::max() ? inverse : 0};
}

// Where the sums of row r begin; those of its next vector are kVectorSums further on.
inline constexpr std::size_t kVectorSums = 2 * kBlockRows * 16;
inline const std::int32_t* SumsOfRow(const std::int32_t* sums, std::size_t vector_count,
                                     std::size_t r) {
  return sums + r / kBlockRows * vector_count * kVectorSums + r % kBlockRows * 32;
}

KVMILL_AVX512_INLINE __m512 LoadSum(const std::int32_t* at) {
  return _mm512_cvtepi32_ps(
      _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(at), 8), _mm512_load_si512(at + 16)));
}

// ---- Scales. ----

// Asks for part `r` of `count` of the bytes.
inline void AskFor(const std::byte* first, std::size_t bytes, std::size_t r, std::size_t count) {
  constexpr std::size_t kLineBytes = 64;
  const std::size_t lines = (bytes + kLineBytes - 1) / kLineBytes;
  for (std::size_t i = lines * r / count; i < lines * (r + 1) / count; ++i) {
    __builtin_prefetch(first + i * kLineBytes, 0, 2);
  }
}

KVMILL_AVX512_INLINE __m512 HalfToFloat(__m256i half) { return _mm512_cvtph_ps(half); }

KVMILL_AVX512_INLINE void LoadScales(const std::byte* from, std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; i += 16) {
    _mm512_store_ps(
        to + i, HalfToFloat(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i))));
  }
}

// The same into plane order, times `factor`.
KVMILL_AVX512_TARGET inline void LoadScalesInPlaneOrder(const std::byte* from, std::size_t count,
                                                        std::uint32_t bits, float factor,
                                                        float* to) {
  const __m512 by = _mm512_set1_ps(factor);
  if (bits == 4) {
    // 32 halves: the even ones, then the odd ones.
    const __m512i order =
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (std::size_t i = 0; i < count; i += 32) {
      const __m512i halves = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(from + 2 * i));
      const __m512 a = HalfToFloat(_mm512_castsi512_si256(halves));
      const __m512 b = HalfToFloat(_mm512_extracti64x4_epi64(halves, 1));
      _mm512_store_ps(to + i, _mm512_mul_ps(a, by));
      _mm512_store_ps(to + i + 16, _mm512_mul_ps(b, by));
    }
  } else {
    // 64 halves: 0, 4, 8, ... and 1, 5, 9, ..., then the other two.
    alignas(64) static constexpr std::uint16_t kFirst[32] = {
        0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
        1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61};
    const __m512i first = _mm512_load_si512(kFirst);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(2));
    for (std::size_t i = 0; i < count; i += 64) {
      const __m512i x = _mm512_loadu_si512(from + 2 * i);
      const __m512i y = _mm512_loadu_si512(from + 2 * i + 64);
      const __m512i low = _mm512_permutex2var_epi16(x, first, y);
      const __m512i high = _mm512_permutex2var_epi16(x, second, y);
      const __m512 v[4] = {HalfToFloat(_mm512_castsi512_si256(low)),
                           HalfToFloat(_mm512_extracti64x4_epi64(low, 1)),
                           HalfToFloat(_mm512_castsi512_si256(high)),
                           HalfToFloat(_mm512_extracti64x4_epi64(high, 1))};
      for (std::size_t m = 0; m < 4; ++m) {
        _mm512_store_ps(to + i + 16 * m, _mm512_mul_ps(v[m], by));
      }
    }
  }
}

// ---- The softmax. ----

// 2^x for x <= 0, -infinity included. Relative error 1e-7.
KVMILL_AVX512_INLINE __m512 Exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x09);  // x - floor(x); 0 of an infinity.
  // Interpolates 2^f at the Chebyshev points of [0, 1].
  __m512 p = _mm512_set1_ps(1.8937541e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.9495904e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5860337e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4014182e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315449e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999990e-1f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x).
}

// cap * tanh(x / cap) / ln 2.
KVMILL_AVX512_INLINE __m512 Capped(__m512 x, const LogitRule& rule) {
  const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(rule.cap_inverse));
  // (1 - e) / (1 + e) with e = e^-2|y|, and the sign of y.
  const __m512 e = Exp2(_mm512_mul_ps(_mm512_abs_ps(y), _mm512_set1_ps(-2.88539008f)));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 sign = _mm512_and_ps(y, _mm512_set1_ps(-0.0f));
  return _mm512_mul_ps(_mm512_or_ps(t, sign), _mm512_set1_ps(rule.cap_of_log2));
}

// ---- The three passes over the rows. Scales of a tile, as the passes want them. ----

struct Avx512Scales {
  const float* k_scale;  // By channel.
  const float* k_zero;
  const float* k_token;  // By token in the plane order of K, and so the next two. T, scaled.
  const float* v_scale;
  const float* v_zero;
  const float* v_channel;  // In the plane order of V.
};

// A row's numbers in fixed point and what a product of them has to be corrected by.
struct FixedRow {
  float unit;
  float bias;
};

// The query times S of K; bias: the query times Z.
template <std::size_t kDim>
KVMILL_AVX512_TARGET FixedRow FixQuery(const float* query, const Avx512Scales& scales,
                                       std::int8_t* planes) {
  constexpr std::size_t kVectors = kDim / 16;
  __m512 folded[kVectors];
  __m512 largest = _mm512_setzero_ps();
  __m512 bias = _mm512_setzero_ps();
  for (std::size_t i = 0; i < kVectors; ++i) {
    const __m512 q = _mm512_load_ps(query + 16 * i);
    folded[i] = _mm512_mul_ps(q, _mm512_load_ps(scales.k_scale + 16 * i));
    bias = _mm512_fmadd_ps(q, _mm512_load_ps(scales.k_zero + 16 * i), bias);
    largest = _mm512_range_ps(largest, folded[i], 0xB);  // max(|a|, |b|).
  }
  const FixedUnit fixed = UnitFor(_mm512_reduce_max_ps(largest));
  const __m512 scale = _mm512_set1_ps(fixed.inverse);
  for (std::size_t i = 0; i < kVectors; i += 2) {
    StorePlanes(folded[i], folded[i + 1], scale, planes + 16 * i, planes + kDim + 16 * i);
  }
  return {fixed.unit, _mm512_reduce_add_ps(bias)};
}

// Products to logits, to weights, to weights times S of V; bias: the weights times Z.
template <std::size_t kGroup, std::uint32_t kBits>
KVMILL_AVX512_TARGET FixedRow FixWeights(const TileStep& step, const Avx512Scales& scales,
                                         const std::int32_t* sums, FixedRow product, std::size_t r,
                                         std::int8_t* planes) {
  constexpr std::size_t kVectors = kGroup / 16;
  constexpr std::size_t kPlanes = 8 / kBits;
  const LogitRule& rule = *step.rule;
  const TokenSpan seen = step.spans[r];
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512 bias = _mm512_set1_ps(product.bias);
  __m512 unit[kPlanes];
  for (std::size_t m = 0; m < kPlanes; ++m) {
    unit[m] = _mm512_set1_ps(product.unit * (1.0f / static_cast<float>(1u << (m * kBits))));
  }
  const std::int32_t* sum_at = SumsOfRow(sums, kVectors, r);
  __m512 weight[kVectors];
  __m512 largest = nothing;
  for (std::size_t i = 0; i < kVectors; ++i) {
    const __m512 x = _mm512_fmadd_ps(LoadSum(sum_at + i * kVectorSums), unit[i % kPlanes], bias);
    weight[i] = _mm512_mul_ps(x, _mm512_load_ps(scales.k_token + 16 * i));
  }
  if (rule.cap > 0) {
    for (std::size_t i = 0; i < kVectors; ++i) weight[i] = Capped(weight[i], rule);
  }
  if (seen.begin != 0 || seen.end < kGroup) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i begin = _mm512_set1_epi32(static_cast<int>(seen.begin));
    const __m512i end = _mm512_set1_epi32(static_cast<int>(seen.end));
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m512i token =
          _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(kPlanes))),
                           _mm512_set1_epi32(static_cast<int>(PlaneColumn(16 * i, kBits))));
      const __mmask16 inside =
          _mm512_kand(_mm512_cmpge_epi32_mask(token, begin), _mm512_cmplt_epi32_mask(token, end));
      weight[i] = _mm512_mask_mov_ps(nothing, inside, weight[i]);
    }
  }
  for (std::size_t i = 0; i < kVectors; ++i) largest = _mm512_max_ps(largest, weight[i]);
  const float here = _mm512_reduce_max_ps(largest);
  const float before = step.softmax.largest[r];
  const float now = here > before ? here : before;
  // While nothing was seen, any shift will do: all weights and sums are 0.
  const float shift = now == -std::numeric_limits<float>::infinity() ? 0 : now;
  const float change = _mm512_cvtss_f32(Exp2(_mm512_set1_ps(before - shift)));
  const float correction = now == before ? 1 : change;
  step.softmax.largest[r] = now;
  step.softmax.correction[r] = correction;

  const __m512 down = _mm512_set1_ps(shift);
  float* total = step.softmax.total + 16 * r;
  __m512 sum = _mm512_mul_ps(_mm512_load_ps(total), _mm512_set1_ps(correction));
  __m512 zeros = _mm512_setzero_ps();
  __m512 largest_folded = _mm512_setzero_ps();
  for (std::size_t i = 0; i < kVectors; ++i) {
    const __m512 p = Exp2(_mm512_sub_ps(weight[i], down));
    sum = _mm512_add_ps(sum, p);
    zeros = _mm512_fmadd_ps(p, _mm512_load_ps(scales.v_zero + 16 * i), zeros);
    weight[i] = _mm512_mul_ps(p, _mm512_load_ps(scales.v_scale + 16 * i));
    largest_folded = _mm512_range_ps(largest_folded, weight[i], 0xB);
  }
  const FixedUnit fixed = UnitFor(_mm512_reduce_max_ps(largest_folded));
  const __m512 scale = _mm512_set1_ps(fixed.inverse);
  for (std::size_t i = 0; i < kVectors; i += 2) {
    StorePlanes(weight[i], weight[i + 1], scale, planes + 16 * i, planes + kGroup + 16 * i);
  }
  _mm512_store_ps(total, sum);
  return {fixed.unit, _mm512_reduce_add_ps(zeros)};
}

// Products to outputs, added to what there is.
template <std::uint32_t kBits>
KVMILL_AVX512_TARGET void AddOutputs(const TileStep& step, const Avx512Scales& scales,
                                     const std::int32_t* sums, FixedRow product, std::size_t r) {
  constexpr std::size_t kPlanes = 8 / kBits;
  const std::size_t dim = step.format->head_dim;
  const __m512 bias = _mm512_set1_ps(product.bias);
  const __m512 correction = _mm512_set1_ps(step.softmax.correction[r]);
  __m512 unit[kPlanes];
  for (std::size_t m = 0; m < kPlanes; ++m) {
    unit[m] = _mm512_set1_ps(product.unit * (1.0f / static_cast<float>(1u << (m * kBits))));
  }
  const std::int32_t* sum_at = SumsOfRow(sums, dim / 16, r);
  const float* across = scales.v_channel;
  float* to = step.from_tiles + r * dim;
  for (float* const end = to + dim; to != end; to += 16 * kPlanes, across += 16 * kPlanes) {
    for (std::size_t m = 0; m < kPlanes; ++m, sum_at += kVectorSums) {
      const __m512 x = _mm512_fmadd_ps(LoadSum(sum_at), unit[m], bias);
      const __m512 kept = _mm512_mul_ps(_mm512_load_ps(to + 16 * m), correction);
      _mm512_store_ps(to + 16 * m, _mm512_fmadd_ps(x, _mm512_load_ps(across + 16 * m), kept));
    }
  }
}

// The tile. `multiply` computes the sums of an Avx512Product.
KVMILL_AVX512_TARGET inline void AttendTileAvx512(const TileStep& step,
                                                  void (*multiply)(const Avx512Product&)) {
  const TileFormat& format = *step.format;
  const RecordLayout& layout = *step.layout;
  const std::byte* record = step.record;
  const std::size_t dim = format.head_dim;
  const std::size_t group = format.group;
  const Avx512Scratch scratch(step.scratch);
  float* const k_scale = scratch.scales;
  float* const k_zero = k_scale + kHeadDimMax;
  float* const k_token = k_zero + kHeadDimMax;
  float* const v_scale = k_token + kHeadDimMax;
  float* const v_zero = v_scale + kHeadDimMax;
  float* const v_channel = v_zero + kHeadDimMax;
  LoadScales(record + layout.k_scale, dim, k_scale);
  LoadScales(record + layout.k_zero, dim, k_zero);
  LoadScalesInPlaneOrder(record + layout.k_token, group, step.keys.bits, step.rule->scale, k_token);
  const Avx512Scales scales{k_scale, k_zero, k_token, v_scale, v_zero, v_channel};

  // The next record is asked for in the order of its bytes, which the processor's own prefetching
  // follows best: the codes while those of this one are unpacked, the scales here.
  FixedRow rows[kUnitRowsMax];
  for (std::size_t r = 0; r < step.row_count; ++r) {
    const float* query = step.query + r * dim;
    std::int8_t* planes = scratch.planes + 2 * r * dim;
    rows[r] = dim == 64    ? FixQuery<64>(query, scales, planes)
              : dim == 128 ? FixQuery<128>(query, scales, planes)
                           : FixQuery<256>(query, scales, planes);
  }
  multiply({step.keys, 8, step.row_count, scratch.quads, scratch.planes, scratch.sums,
            step.next_record + layout.k_codes});
  LoadScalesInPlaneOrder(record + layout.v_scale, group, step.keys.bits, 1, v_scale);
  LoadScalesInPlaneOrder(record + layout.v_zero, group, step.keys.bits, 1, v_zero);
  LoadScalesInPlaneOrder(record + layout.v_channel, dim, format.value_bits, 1, v_channel);
  const auto fix_weights = step.keys.bits == 4
                               ? (group == 64 ? FixWeights<64, 4> : FixWeights<128, 4>)
                               : (group == 64 ? FixWeights<64, 2> : FixWeights<128, 2>);
  for (std::size_t r = 0; r < step.row_count; ++r) {
    AskFor(step.next_record + layout.k_scale, layout.v_codes - layout.k_scale, r, step.row_count);
    std::int8_t* planes = scratch.planes + 2 * r * group;
    rows[r] = fix_weights(step, scales, scratch.sums, rows[r], r, planes);
  }
  const CodeMatrix values{record + layout.v_codes, format.value_bits, group, dim};
  multiply({values, step.keys.bits, step.row_count, scratch.quads, scratch.planes, scratch.sums,
            step.next_record + layout.v_codes});
  const auto add_outputs = format.value_bits == 4 ? AddOutputs<4> : AddOutputs<2>;
  for (std::size_t r = 0; r < step.row_count; ++r) {
    AskFor(step.next_record + layout.v_channel, layout.bytes - layout.v_channel, r, step.row_count);
    add_outputs(step, scales, scratch.sums, rows[r], r);
  }
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_TILE_AVX512_H_
