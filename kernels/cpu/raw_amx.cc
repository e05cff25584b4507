// Attention over rows of fp16 or bf16 with AMX: one tdpbf16ps multiplies 16 rows of 32 bf16 by 32
// rows of 16.
//
// An fp16 has 11 significant bits, a bf16 eight: x = high + low, where high is x without its last
// three bits. Both come from integer operations on 32 values at a time. Moved right by three, the
// exponent and the first seven bits of an fp16 stand where bf16 has them and make a bf16 of value
// high * 2^-112; low, which is exact in fp16, is made 2^7 times larger first, so that less of it is
// below what the product takes for zero: values change by at most 2^-21. The query and the
// probabilities are two bf16 as well; the two of eight heads fill the 16 rows or columns of the
// other operand, so that the second one costs nothing. They are 2^56 times too large, halfway to
// what the rows are too small.
//
// Scores: 16 tokens of K as they lie, times the query's columns. Lane h of a result is head h, and
// so the softmax of eight heads needs no sums across lanes. Outputs: the probabilities of eight
// heads, turned so that tokens lie side by side, times V, two rows of it interleaved.
#include "kernels/cpu/raw_amx.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/tile_avx512.h"

#define KVMILL_RAW KVMILL_AVX512 ",avx512bf16,avx512fp16,amx-tile,amx-bf16"
#define KVMILL_TARGET __attribute__((target(KVMILL_RAW)))
#define KVMILL_INLINE __attribute__((always_inline, target(KVMILL_RAW))) inline

namespace kvmill {
namespace {

constexpr std::size_t kTileBytes = 1024;
constexpr std::size_t kHeads = kBlockRows;             // Rows of a unit that share a tile register.
constexpr float kToLow = 128;                          // What low is made larger by.
constexpr float kOperandScale = 72057594037927936.0f;  // 2^56

// What a sum of products has to be multiplied by.
template <DType kDType>
constexpr float kBack = kDType == DType::kFloat16 ? kOperandScale : 1 / kOperandScale;

// Parts of a value: bf16 is one already.
template <DType kDType>
constexpr bool kHasLow = kDType == DType::kFloat16;
template <DType kDType>
constexpr std::size_t kParts = kHasLow<kDType> ? 2 : 1;

// Where things are in RawStep::scratch.
struct Scratch {
  std::byte* operands;  // Rows of K or V, as tile registers.
  float* sums;          // [rows / kHeads][group / 16][2][16 tokens][16]: of the high parts and of
                        // the low ones; of the first eight lanes and the last eight are the query's
                        // first and second bf16. Then logits, [group / 2][2 tokens][heads].
  std::byte* weights;   // [rows / kHeads][group / 32] tile registers.
  float* outputs;       // [rows / kHeads][dim / 16][16][16], where the logits were.

  explicit Scratch(std::byte* scratch)
      : operands(scratch),
        sums(reinterpret_cast<float*>(operands + kOperandBytes)),
        weights(reinterpret_cast<std::byte*>(sums) + kUnitRowsMax / kHeads * kSumsBytes),
        outputs(sums) {}

  static constexpr std::size_t kOperandBytes = 2 * 2 * 32 * kHeadDimMax;
  static constexpr std::size_t kSumsBytes = kGroupMax / 16 * 2 * kTileBytes;
  static constexpr std::size_t kWeightsBytes = kGroupMax / 32 * 2 * kTileBytes;
  static constexpr std::size_t kOutputBytes = kUnitRowsMax / kHeads * kHeadDimMax / 16 * kTileBytes;
};
static_assert(Scratch::kOutputBytes <= kUnitRowsMax / kHeads * Scratch::kSumsBytes);
static_assert(kTileScratchBytes >=
              Scratch::kOperandBytes +
                  kUnitRowsMax / kHeads * (Scratch::kSumsBytes + Scratch::kWeightsBytes));

// 32 values to their parts.
KVMILL_INLINE void Split(__m512i x, __m512i* high, __m512i* low) {
  const __m512i sign_and_value = _mm512_set1_epi16(static_cast<short>(0x8FFF));
  const __mmask32 normal = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7C00));
  const __m512i first = _mm512_and_si512(x, _mm512_set1_epi16(static_cast<short>(0xFFF8)));
  const __m512h value = _mm512_castsi512_ph(x);
  const __m512h rest =
      _mm512_mul_ph(_mm512_mask_sub_ph(value, normal, value, _mm512_castsi512_ph(first)),
                    _mm512_set1_ph(static_cast<_Float16>(kToLow)));
  *high = _mm512_and_si512(_mm512_srai_epi16(x, 3), sign_and_value);
  *low = _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(rest), 3), sign_and_value);
}

// 32 values to as many parts as they have, kTileBytes apart.
template <DType kDType>
KVMILL_INLINE void StoreParts(__m512i x, std::byte* to) {
  if constexpr (kDType == DType::kFloat16) {
    __m512i high;
    __m512i low;
    Split(x, &high, &low);
    _mm512_store_si512(to, high);
    _mm512_store_si512(to + kTileBytes, low);
  } else {
    _mm512_store_si512(to, x);
  }
}

KVMILL_INLINE __m512i Load(const std::byte* from) { return _mm512_loadu_si512(from); }

// Lines to ask for at the stops of a block, in equal steps of time: together a little more than the
// block has, 32 for 128 tokens and 16 channels.
struct Stops {
  std::size_t key_row, key_product, weighing, value_rows, value_product;
};
KVMILL_INLINE Stops StopsOf(std::size_t dim) {
  return {dim / 64, dim / 8, (dim + 127) / 128, dim / 32, 24};
}

// Up to 16 rows of K: [dim / 32][part] tile registers. Rows from `count` on are zeroed.
template <DType kDType>
KVMILL_TARGET void ConvertKeys(const RawStep& step, std::size_t first, Ahead& ahead,
                               std::byte* to) {
  const RawHalf& k = step.k;
  const std::size_t dim = step.dim;
  const std::size_t count = std::min<std::size_t>(16, step.token_count - first);
  const std::byte* row = k.first + static_cast<std::ptrdiff_t>(first) * k.stride_bytes;
  for (std::size_t t = 0; t < count; ++t, row += k.stride_bytes, to += 64) {
    ahead.Take(StopsOf(dim).key_row);
    for (std::size_t c = 0; c < dim / 32; ++c) {
      StoreParts<kDType>(Load(row + 64 * c), to + c * kParts<kDType> * kTileBytes);
    }
  }
  for (std::size_t t = count; t < 16; ++t, to += 64) {
    for (std::size_t c = 0; c < dim / 32 * kParts<kDType>; ++c) {
      _mm512_store_si512(to + c * kTileBytes, _mm512_setzero_si512());
    }
  }
}

// ---- Scores. Tile registers: 0 and 1 are sums, 2 and 3 rows of K, 4 to 7 the query. ----

KVMILL_INLINE void LoadQuery(const std::byte* query) {
  _tile_loadd(4, query, 64);
  _tile_loadd(5, query + kTileBytes, 64);
}
KVMILL_INLINE void LoadQueryRest(const std::byte* query) {
  _tile_loadd(6, query + 2 * kTileBytes, 64);
  _tile_loadd(7, query + 3 * kTileBytes, 64);
}

// GCC wants the names of tile registers as numbers.
#define KVMILL_SCORE_CHUNK(chunk, query)                                  \
  _tile_loadd(2, keys + (chunk)*kParts<kDType> * kTileBytes, 64);         \
  _tile_dpbf16ps(0, 2, query);                                            \
  if constexpr (kHasLow<kDType>) {                                        \
    _tile_loadd(3, keys + ((chunk)*kParts<kDType> + 1) * kTileBytes, 64); \
    _tile_dpbf16ps(1, 3, query);                                          \
  }

// 16 tokens times eight rows. For kChunks <= 4 the query is loaded.
template <DType kDType, std::size_t kChunks>
KVMILL_TARGET void ScoreKeys(const std::byte* keys, const std::byte* query, float* sums) {
  _tile_zero(0);
  if constexpr (kHasLow<kDType>) _tile_zero(1);
  if constexpr (kChunks > 4) {
    LoadQuery(query);
    LoadQueryRest(query);
  }
  KVMILL_SCORE_CHUNK(0, 4)
  KVMILL_SCORE_CHUNK(1, 5)
  if constexpr (kChunks > 2) {
    KVMILL_SCORE_CHUNK(2, 6)
    KVMILL_SCORE_CHUNK(3, 7)
  }
  if constexpr (kChunks > 4) {
    LoadQuery(query + 4 * kTileBytes);
    LoadQueryRest(query + 4 * kTileBytes);
    KVMILL_SCORE_CHUNK(4, 4)
    KVMILL_SCORE_CHUNK(5, 5)
    KVMILL_SCORE_CHUNK(6, 6)
    KVMILL_SCORE_CHUNK(7, 7)
  }
  _tile_stored(0, sums, 64);
  if constexpr (kHasLow<kDType>) _tile_stored(1, sums + 256, 64);
}

template <DType kDType, std::size_t kChunks>
KVMILL_TARGET void Score(const RawStep& step, const Scratch& scratch, Ahead& ahead) {
  constexpr std::size_t kQueryBytes = kChunks * kTileBytes;
  const std::size_t blocks = (step.row_count + kHeads - 1) / kHeads;
  const std::size_t pieces = (step.token_count + 15) / 16;
  if (blocks == 1 && kChunks <= 4) {
    LoadQuery(step.query);
    if constexpr (kChunks > 2) LoadQueryRest(step.query);
  }
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    ConvertKeys<kDType>(step, 16 * piece, ahead, scratch.operands);
    // GCC's tile loads do not say that they read memory: what was stored has to be there.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::byte* query = step.query + b * kQueryBytes;
      if (blocks != 1 && kChunks <= 4) {
        LoadQuery(query);
        if constexpr (kChunks > 2) LoadQueryRest(query);
      }
      ahead.Take(StopsOf(step.dim).key_product);
      ScoreKeys<kDType, kChunks>(
          scratch.operands, query,
          scratch.sums + (b * Scratch::kSumsBytes + piece * 2 * kTileBytes) / sizeof(float));
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

// ---- The softmax of eight heads: lanes h and h + 8 are head h, of two tokens. ----

KVMILL_INLINE __m512 Twice(__m256 x) { return _mm512_insertf32x8(_mm512_castps256_ps512(x), x, 1); }
KVMILL_INLINE __m256 Upper(__m512 x) { return _mm512_extractf32x8_ps(x, 1); }

// The probabilities of 32 tokens, 16 vectors of two, as a tile register: row h the first bf16 of
// head h, row h + 8 the second one. Tokens come in the order of PairOf.
KVMILL_INLINE void StoreWeights(const __m512* p, std::byte* to) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  __m512i planes[2][8];
  for (std::size_t m = 0; m < 8; ++m) {
    const __m512i a = _mm512_castps_si512(p[2 * m]);
    const __m512i b = _mm512_castps_si512(p[2 * m + 1]);
    const __m512i a_high = _mm512_and_si512(a, upper);
    const __m512i b_high = _mm512_and_si512(b, upper);
    const __m512i a_low = _mm512_castps_si512(_mm512_sub_ps(p[2 * m], _mm512_castsi512_ps(a_high)));
    const __m512i b_low =
        _mm512_castps_si512(_mm512_sub_ps(p[2 * m + 1], _mm512_castsi512_ps(b_high)));
    planes[0][m] = _mm512_or_si512(_mm512_srli_epi32(a, 16), b_high);
    planes[1][m] = _mm512_or_si512(_mm512_srli_epi32(a_low, 16), _mm512_and_si512(b_low, upper));
  }
  for (std::size_t plane = 0; plane < 2; ++plane) {
    // Lanes of 128 bits of quad[i][h]: (token of the vector, upper half of the heads), four pairs
    // each of head h of that half.
    __m512i quad[2][4];
    for (std::size_t i = 0; i < 2; ++i) {
      const __m512i* y = planes[plane] + 4 * i;
      const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]);
      const __m512i b = _mm512_unpacklo_epi32(y[2], y[3]);
      const __m512i c = _mm512_unpackhi_epi32(y[0], y[1]);
      const __m512i d = _mm512_unpackhi_epi32(y[2], y[3]);
      quad[i][0] = _mm512_unpacklo_epi64(a, b);
      quad[i][1] = _mm512_unpackhi_epi64(a, b);
      quad[i][2] = _mm512_unpacklo_epi64(c, d);
      quad[i][3] = _mm512_unpackhi_epi64(c, d);
    }
    // 2^-7 times as large: taken from the exponents, which saturate.
    const __m512i seven = _mm512_set1_epi16(7 << 7);
    for (std::size_t h = 0; h < 4; ++h) {
      const __m512i lower = _mm512_shuffle_i32x4(quad[0][h], quad[1][h], 0x88);
      const __m512i upper_heads = _mm512_shuffle_i32x4(quad[0][h], quad[1][h], 0xDD);
      std::byte* const row = to + (8 * plane + h) * 64;
      _mm512_store_si512(row, lower);
      _mm512_store_si512(row + 4 * 64, upper_heads);
      _mm512_store_si512(row + kTileBytes, _mm512_subs_epu16(lower, seven));
      _mm512_store_si512(row + kTileBytes + 4 * 64, _mm512_subs_epu16(upper_heads, seven));
    }
  }
}

// Position i of a tile register of weights has the tokens PairOf(i) and PairOf(i) + 2.
constexpr std::size_t PairOf(std::size_t i) { return 4 * (i / 8 * 4 + i % 4) + i / 4 % 2; }

template <DType kDType>
KVMILL_TARGET void Weigh(const RawStep& step, const Scratch& scratch, std::size_t block,
                         Ahead& ahead) {
  const std::size_t lines = StopsOf(step.dim).weighing;
  const LogitRule& rule = *step.rule;
  const std::size_t first = block * kHeads;
  const std::size_t heads = std::min(kHeads, step.row_count - first);
  const std::size_t pairs = (step.token_count + 31) / 32 * 16;
  float* const sums = scratch.sums + block * Scratch::kSumsBytes / sizeof(float);
  const auto* query_scale =
      reinterpret_cast<const float*>(step.query + 2 * 2 * kUnitRowsMax * kHeadDimMax);
  const __m512 scale = _mm512_mul_ps(Twice(_mm256_loadu_ps(query_scale + first)),
                                     _mm512_set1_ps(rule.scale * kBack<kDType>));
  const __m512 from_low = _mm512_set1_ps(1 / kToLow);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  alignas(64) std::int32_t begins[16];
  alignas(64) std::int32_t ends[16];
  bool all = true;
  for (std::size_t h = 0; h < kHeads; ++h) {
    const TokenSpan seen = h < heads ? step.spans[first + h] : TokenSpan{0, 0};
    begins[h] = begins[h + 8] = static_cast<std::int32_t>(seen.begin);
    ends[h] = ends[h + 8] = static_cast<std::int32_t>(seen.end);
    all = all && (h >= heads || (seen.begin == 0 && seen.end >= 2 * pairs));
  }
  const __m512i begin = _mm512_load_si512(begins);
  const __m512i end = _mm512_load_si512(ends);
  __m512i token = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  __m512 largest = nothing;
  for (std::size_t i = 0; i < pairs; ++i) {
    ahead.Take(lines);
    const float* at = sums + i / 8 * 512 + i % 8 * 32;
    __m512 a = _mm512_load_ps(at);
    __m512 b = _mm512_load_ps(at + 16);
    if constexpr (kHasLow<kDType>) {
      a = _mm512_fmadd_ps(_mm512_load_ps(at + 256), from_low, a);
      b = _mm512_fmadd_ps(_mm512_load_ps(at + 272), from_low, b);
    }
    __m512 x = _mm512_mul_ps(
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE)), scale);
    if (rule.cap > 0) x = Capped(x, rule);
    if (!all) {
      const __mmask16 inside =
          _mm512_kand(_mm512_cmpge_epi32_mask(token, begin), _mm512_cmplt_epi32_mask(token, end));
      x = _mm512_mask_mov_ps(nothing, inside, x);
      token = _mm512_add_epi32(token, _mm512_set1_epi32(2));
    }
    largest = _mm512_max_ps(largest, x);
    // Behind what is still to be read.
    _mm512_store_ps(sums + 16 * i, x);
  }
  const __m256 before = _mm256_load_ps(step.softmax.largest + first);
  const __m256 now =
      _mm256_max_ps(_mm256_max_ps(_mm512_castps512_ps256(largest), Upper(largest)), before);
  // While nothing was seen, any shift will do: all weights and sums are 0.
  const __mmask8 seen = _mm256_cmp_ps_mask(now, _mm512_castps512_ps256(nothing), _CMP_GT_OQ);
  const __m256 shift = _mm256_maskz_mov_ps(seen, now);
  const __m256 change =
      _mm512_castps512_ps256(Exp2(_mm512_castps256_ps512(_mm256_sub_ps(before, shift))));
  const __m256 correction =
      _mm256_mask_mov_ps(change, _mm256_cmp_ps_mask(now, before, _CMP_EQ_OQ), _mm256_set1_ps(1));
  _mm256_store_ps(step.softmax.largest + first, now);
  _mm256_store_ps(step.softmax.correction + first, correction);

  // Weights are as much too large as an operand should be.
  const __m512 down = Twice(_mm256_sub_ps(shift, _mm256_set1_ps(56)));
  __m512 total = _mm512_setzero_ps();
  for (std::size_t i = 0; i < pairs; i += 16) {
    __m512 p[16];
    for (std::size_t j = 0; j < 16; ++j) {
      ahead.Take(lines);
      p[j] = Exp2(_mm512_sub_ps(_mm512_load_ps(sums + 16 * (i + j)), down));
      total = _mm512_add_ps(total, p[j]);
    }
    StoreWeights(p, scratch.weights + block * Scratch::kWeightsBytes + i / 8 * kTileBytes);
  }
  alignas(32) float totals[8];
  _mm256_store_ps(totals, _mm256_mul_ps(_mm256_add_ps(_mm512_castps512_ps256(total), Upper(total)),
                                        _mm256_set1_ps(1 / kOperandScale)));
  for (std::size_t h = 0; h < heads; ++h) {
    float* const at = step.softmax.total + 16 * (first + h);
    const __m512 old =
        _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(step.softmax.correction[first + h]));
    _mm512_store_ps(at, _mm512_add_ps(old, _mm512_maskz_mov_ps(1, _mm512_set1_ps(totals[h]))));
  }
}

// ---- Outputs. Tile registers: 0 to 3 are sums, 4 and 5 V, 6 and 7 weights. ----

// 32 tokens of V: [dim / 16][part] tile registers, two tokens interleaved.
template <DType kDType>
KVMILL_TARGET void ConvertValues(const RawStep& step, std::size_t first, Ahead& ahead,
                                 std::byte* to) {
  const RawHalf& v = step.v;
  const std::size_t count = step.token_count;
  constexpr std::size_t kBytes = kParts<kDType> * kTileBytes;
  for (std::size_t i = 0; i < 16; ++i, to += 64) {
    const std::size_t t = first + PairOf(i);
    ahead.Take(StopsOf(step.dim).value_rows);
    const std::byte* row = v.first + static_cast<std::ptrdiff_t>(t) * v.stride_bytes;
    const std::byte* other = row + 2 * v.stride_bytes;
    if (t + 2 < count) {
      for (std::size_t c = 0; c < step.dim / 32; ++c) {
        const __m512i x = Load(row + 64 * c);
        const __m512i y = Load(other + 64 * c);
        StoreParts<kDType>(_mm512_unpacklo_epi16(x, y), to + 2 * c * kBytes);
        StoreParts<kDType>(_mm512_unpackhi_epi16(x, y), to + (2 * c + 1) * kBytes);
      }
    } else {
      for (std::size_t c = 0; c < step.dim / 32; ++c) {
        const __m512i x = t < count ? Load(row + 64 * c) : _mm512_setzero_si512();
        const __m512i y = _mm512_setzero_si512();
        StoreParts<kDType>(_mm512_unpacklo_epi16(x, y), to + 2 * c * kBytes);
        StoreParts<kDType>(_mm512_unpackhi_epi16(x, y), to + (2 * c + 1) * kBytes);
      }
    }
  }
}

#define KVMILL_VALUES(sum, n)                                           \
  _tile_loadd(4, values + (n)*kParts<kDType> * kTileBytes, 64);         \
  _tile_dpbf16ps(sum, 6, 4);                                            \
  if constexpr (kHasLow<kDType>) {                                      \
    _tile_loadd(5, values + ((n)*kParts<kDType> + 1) * kTileBytes, 64); \
    _tile_dpbf16ps(sum, 7, 5);                                          \
  }

// Eight rows times all channels of 32 tokens, added to `sums` unless they are the first.
template <DType kDType>
KVMILL_TARGET void MultiplyValues(const std::byte* weights, const std::byte* values,
                                  std::size_t dim, bool first, Ahead& ahead, float* sums) {
  _tile_loadd(6, weights, 64);
  if constexpr (kHasLow<kDType>) _tile_loadd(7, weights + kTileBytes, 64);
  for (std::size_t n = 0; n < dim / 16;
       n += 4, sums += 1024, values += 4 * kParts<kDType> * kTileBytes) {
    if (first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, 64);
      _tile_loadd(1, sums + 256, 64);
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
    ahead.Take(StopsOf(dim).value_product);
    KVMILL_VALUES(0, 0)
    KVMILL_VALUES(1, 1)
    KVMILL_VALUES(2, 2)
    KVMILL_VALUES(3, 3)
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// The sums of eight rows to where they belong.
template <DType kDType>
KVMILL_TARGET void AddOutputs(const RawStep& step, std::size_t first, const float* sums) {
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const std::size_t heads = std::min(kHeads, step.row_count - first);
  const __m512 back = _mm512_set1_ps(kBack<kDType>);
  for (std::size_t h = 0; h < heads; ++h) {
    float* to = step.from_raw + (first + h) * step.dim;
    const float* at = sums + 16 * h;
    const __m512 correction = _mm512_set1_ps(step.softmax.correction[first + h]);
    for (std::size_t c = 0; c < step.dim / 32; ++c, to += 32, at += 512) {
      const __m512 x = _mm512_add_ps(_mm512_load_ps(at), _mm512_load_ps(at + 128));
      const __m512 y = _mm512_add_ps(_mm512_load_ps(at + 256), _mm512_load_ps(at + 384));
      const __m512 a = _mm512_mul_ps(_mm512_load_ps(to), correction);
      const __m512 b = _mm512_mul_ps(_mm512_load_ps(to + 16), correction);
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_permutex2var_ps(x, lower, y), back, a));
      _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_permutex2var_ps(x, upper, y), back, b));
    }
  }
}

template <DType kDType>
KVMILL_TARGET void AddValues(const RawStep& step, const Scratch& scratch, Ahead& ahead) {
  const std::size_t blocks = (step.row_count + kHeads - 1) / kHeads;
  const std::size_t chunks = (step.token_count + 31) / 32;
  const std::size_t sums = step.dim / 16 * 256;
  for (std::size_t c = 0; c < chunks; ++c) {
    ConvertValues<kDType>(step, 32 * c, ahead, scratch.operands);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (std::size_t b = 0; b < blocks; ++b) {
      MultiplyValues<kDType>(scratch.weights + b * Scratch::kWeightsBytes + c * 2 * kTileBytes,
                             scratch.operands, step.dim, c == 0, ahead, scratch.outputs + b * sums);
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  ahead.Take(step.dim * kGroupMax);  // What is left.
  for (std::size_t b = 0; b < blocks; ++b) {
    AddOutputs<kDType>(step, b * kHeads, scratch.outputs + b * sums);
  }
}

template <DType kDType>
KVMILL_TARGET void ScoreAll(const RawStep& step, const Scratch& scratch, Ahead& ahead) {
  switch (step.dim) {
    case 64:
      Score<kDType, 2>(step, scratch, ahead);
      break;
    case 128:
      Score<kDType, 4>(step, scratch, ahead);
      break;
    default:
      Score<kDType, 8>(step, scratch, ahead);
  }
  for (std::size_t b = 0; b * kHeads < step.row_count; ++b) Weigh<kDType>(step, scratch, b, ahead);
}

}  // namespace

bool RawAmxIsSupported() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBFloat16Tiles = 1u << 22;
  constexpr unsigned kFloat16 = 1u << 23;
  return (d & kBFloat16Tiles) != 0 && (d & kFloat16) != 0;
}

KVMILL_TARGET void PrepareRawAmx(const float* query, std::size_t row_count, std::size_t dim,
                                 std::byte* to) {
  auto* scales = reinterpret_cast<float*>(to + 2 * 2 * kUnitRowsMax * kHeadDimMax);
  const std::size_t padded = (row_count + kHeads - 1) / kHeads * kHeads;
  for (std::size_t r = 0; r < padded; ++r) {
    float largest = 0;
    if (r < row_count) {
      for (std::size_t d = 0; d < dim; ++d) {
        largest = std::max(largest, std::fabs(query[r * dim + d]));
      }
    }
    scales[r] = largest;
    // An inverse that overflows belongs to numbers that are 0 for every purpose.
    float inverse = 1 / largest;
    if (!std::isfinite(inverse)) inverse = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const float x = r < row_count ? query[r * dim + d] * inverse * kOperandScale : 0;
      std::uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      const std::uint32_t high_bits = bits & 0xFFFF0000u;
      float high;
      std::memcpy(&high, &high_bits, sizeof(high));
      const float low = x - high;
      std::uint32_t low_bits;
      std::memcpy(&low_bits, &low, sizeof(low_bits));
      const std::uint16_t parts[2] = {static_cast<std::uint16_t>(bits >> 16),
                                      static_cast<std::uint16_t>(low_bits >> 16)};
      std::byte* row = to + (r / kHeads * dim / 32 + d / 32) * kTileBytes + d % 32 / 2 * 64;
      for (std::size_t part = 0; part < 2; ++part) {
        std::memcpy(row + 4 * (r % kHeads + 8 * part) + 2 * (d % 2), &parts[part], 2);
      }
    }
  }
}

void AttendRawAmx(const RawStep& step) {
  Ahead& ahead = *step.ahead;
  const Scratch scratch(step.scratch);
  if (step.k.dtype == DType::kFloat16) {
    ScoreAll<DType::kFloat16>(step, scratch, ahead);
  } else {
    ScoreAll<DType::kBFloat16>(step, scratch, ahead);
  }
  if (step.v.dtype == DType::kFloat16) {
    AddValues<DType::kFloat16>(step, scratch, ahead);
  } else {
    AddValues<DType::kBFloat16>(step, scratch, ahead);
  }
}

}  // namespace kvmill
#endif  // __x86_64__
