// Products with raw rows: fp16 or bf16 becomes fp32 once, in pieces that stay in the L1 cache, and
// is used for all rows of the unit. Included once per SIMD target.
#if defined(KVMILL_KERNELS_CPU_ATTENTION_RAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_ATTENTION_RAW_INL_H_
#undef KVMILL_KERNELS_CPU_ATTENTION_RAW_INL_H_
#else
#define KVMILL_KERNELS_CPU_ATTENTION_RAW_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/ahead.h"
#include "kernels/cpu/attention_unit.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// What comes after a piece: the next piece of the same half, or `next` behind the last.
HWY_INLINE Ahead AheadOf(const RawHalf& half, std::size_t first, std::size_t token_count,
                         std::size_t dim, const Ahead& next) {
  if (first >= token_count) return next;
  return Ahead(half.first + static_cast<std::ptrdiff_t>(first) * half.stride_bytes,
               half.stride_bytes, 2 * dim, token_count - first);
}

// Tokens that are converted together: as many as kConvertedBytes hold, a multiple of 16.
HWY_INLINE std::size_t ConvertedTokens(std::size_t dim) {
  return kConvertedBytes / sizeof(float) / dim;
}

template <DType kDType>
HWY_INLINE void ConvertRowsOf(const RawHalf& half, std::size_t first, std::size_t count,
                              std::size_t dim, float* HWY_RESTRICT to) {
  const std::byte* row = half.first + static_cast<std::ptrdiff_t>(first) * half.stride_bytes;
  for (std::size_t t = 0; t < count; ++t, row += half.stride_bytes, to += dim) {
    for (std::size_t i = 0; i < dim; i += 2 * kLanes) {
      hn::Store(HalfToFloat<kDType>(LoadHalf(row + 2 * i)), Df(), to + i);
      hn::Store(HalfToFloat<kDType>(LoadHalf(row + 2 * (i + kLanes))), Df(), to + i + kLanes);
    }
  }
}

// The tokens first .. first + count - 1 in fp32; rows up to a multiple of 4 are zeroed.
HWY_INLINE void ConvertRows(const RawHalf& half, std::size_t first, std::size_t count,
                            std::size_t dim, float* HWY_RESTRICT to) {
  if (half.dtype == DType::kFloat16) {
    ConvertRowsOf<DType::kFloat16>(half, first, count, dim, to);
  } else {
    ConvertRowsOf<DType::kBFloat16>(half, first, count, dim, to);
  }
  for (std::size_t i = count * dim; i < (count + 3) / 4 * 4 * dim; i += kLanes) {
    hn::Store(hn::Zero(Df()), Df(), to + i);
  }
}

// Four tokens times kRows queries. quads[r]: the four products, each still in kLanes / 4 parts.
template <std::size_t kRows>
HWY_INLINE void DotFour(const float* HWY_RESTRICT keys, const float* HWY_RESTRICT queries,
                        std::size_t dim, Vf* HWY_RESTRICT quads) {
  const Df d;
  Vf sum[kRows][4];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t t = 0; t < 4; ++t) sum[r][t] = hn::Zero(d);
  }
  for (std::size_t i = 0; i < dim; i += kLanes) {
    const Vf k0 = hn::Load(d, keys + i);
    const Vf k1 = hn::Load(d, keys + dim + i);
    const Vf k2 = hn::Load(d, keys + 2 * dim + i);
    const Vf k3 = hn::Load(d, keys + 3 * dim + i);
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vf q = hn::Load(d, queries + r * dim + i);
      sum[r][0] = hn::MulAdd(q, k0, sum[r][0]);
      sum[r][1] = hn::MulAdd(q, k1, sum[r][1]);
      sum[r][2] = hn::MulAdd(q, k2, sum[r][2]);
      sum[r][3] = hn::MulAdd(q, k3, sum[r][3]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    quads[r] = ReduceBlocks4<AddOp>(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// kRows queries times `count` converted keys, a multiple of kLanes of them, into
// scores[r * scores_stride + t].
template <std::size_t kRows>
HWY_INLINE void ScoreRows(const float* HWY_RESTRICT keys, std::size_t count,
                          const float* HWY_RESTRICT queries, std::size_t dim,
                          float* HWY_RESTRICT scores, std::size_t scores_stride, Ahead& ahead) {
  for (std::size_t t = 0; t < count; t += kLanes) {
    Vf quads[kLanes / 4][kRows];
    for (std::size_t q = 0; q < kLanes / 4; ++q) {
      ahead.Take(dim / 16 * kRows / 4);
      DotFour<kRows>(keys + (t + 4 * q) * dim, queries, dim, quads[q]);
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      Vf of_row[kLanes / 4];
      for (std::size_t q = 0; q < kLanes / 4; ++q) of_row[q] = quads[q][r];
      hn::Store(ReduceQuads<AddOp>(of_row), Df(), scores + r * scores_stride + t);
    }
  }
}

// scores[r][t] = queries[r] · K[t] for the first `token_count` tokens of a block; scores of a row
// are `group` apart. Rows of K beyond token_count are not read.
HWY_INLINE void ScoreRaw(const RawHalf& keys, std::size_t token_count, std::size_t group,
                         const float* HWY_RESTRICT queries, std::size_t row_count, std::size_t dim,
                         float* HWY_RESTRICT converted, float* HWY_RESTRICT scores,
                         const Ahead& next) {
  const std::size_t piece = ConvertedTokens(dim);
  for (std::size_t first = 0; first < token_count; first += piece) {
    const std::size_t count = HWY_MIN(piece, token_count - first);
    const std::size_t padded = (count + kLanes - 1) / kLanes * kLanes;
    ConvertRows(keys, first, count, dim, converted);
    Ahead ahead = AheadOf(keys, first + piece, token_count, dim, next);
    for (std::size_t i = (count + 3) / 4 * 4 * dim; i < padded * dim; i += kLanes) {
      hn::Store(hn::Zero(Df()), Df(), converted + i);
    }
    std::size_t r = 0;
    for (; r + 4 <= row_count; r += 4) {
      ScoreRows<4>(converted, padded, queries + r * dim, dim, scores + r * group + first, group,
                   ahead);
    }
    for (; r + 2 <= row_count; r += 2) {
      ScoreRows<2>(converted, padded, queries + r * dim, dim, scores + r * group + first, group,
                   ahead);
    }
    if (r < row_count) {
      ScoreRows<1>(converted, padded, queries + r * dim, dim, scores + r * group + first, group,
                   ahead);
    }
  }
}

// to[r] += sum_t weights[r][t] * values[t] for kRows rows and kVectors vectors of channels.
template <std::size_t kRows, std::size_t kVectors>
HWY_INLINE void AddWeighted(const float* HWY_RESTRICT values, std::size_t count, std::size_t dim,
                            const float* HWY_RESTRICT weights, std::size_t weights_stride,
                            float* HWY_RESTRICT to, Ahead& ahead) {
  const Df d;
  Vf sum[kRows][kVectors];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t i = 0; i < kVectors; ++i) sum[r][i] = hn::Load(d, to + r * dim + i * kLanes);
  }
  for (std::size_t t = 0; t < count; ++t) {
    ahead.Take(1);
    Vf v[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) v[i] = hn::Load(d, values + t * dim + i * kLanes);
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vf p = hn::Set(d, weights[r * weights_stride + t]);
      for (std::size_t i = 0; i < kVectors; ++i) sum[r][i] = hn::MulAdd(p, v[i], sum[r][i]);
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t i = 0; i < kVectors; ++i) hn::Store(sum[r][i], d, to + r * dim + i * kLanes);
  }
}

template <std::size_t kRows>
HWY_INLINE void AddWeightedRows(const float* HWY_RESTRICT values, std::size_t count,
                                std::size_t dim, const float* HWY_RESTRICT weights,
                                std::size_t weights_stride, float* HWY_RESTRICT to, Ahead& ahead) {
  constexpr std::size_t kVectors = 64 / kLanes < 4 ? 64 / kLanes : 4;  // Divides every head_dim.
  for (std::size_t i = 0; i < dim; i += kVectors * kLanes) {
    AddWeighted<kRows, kVectors>(values + i, count, dim, weights, weights_stride, to + i, ahead);
  }
}

// to[r] += sum_t weights[r][t] * V[t] over the first `token_count` tokens of a block.
HWY_INLINE void AddRaw(const RawHalf& values, std::size_t token_count, std::size_t group,
                       const float* HWY_RESTRICT weights, std::size_t row_count, std::size_t dim,
                       float* HWY_RESTRICT converted, float* HWY_RESTRICT to, const Ahead& next) {
  const std::size_t piece = ConvertedTokens(dim);
  for (std::size_t first = 0; first < token_count; first += piece) {
    const std::size_t count = HWY_MIN(piece, token_count - first);
    ConvertRows(values, first, count, dim, converted);
    Ahead ahead = AheadOf(values, first + piece, token_count, dim, next);
    std::size_t r = 0;
    for (; r + 4 <= row_count; r += 4) {
      AddWeightedRows<4>(converted, count, dim, weights + r * group + first, group, to + r * dim,
                         ahead);
    }
    for (; r + 2 <= row_count; r += 2) {
      AddWeightedRows<2>(converted, count, dim, weights + r * group + first, group, to + r * dim,
                         ahead);
    }
    if (r < row_count) {
      AddWeightedRows<1>(converted, count, dim, weights + r * group + first, group, to + r * dim,
                         ahead);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_ATTENTION_RAW_INL_H_
