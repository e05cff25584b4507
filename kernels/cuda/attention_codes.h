// Tensor-core products with packed codes and with 16-bit rows, by one warp.
//
// The products are m16n8k16 with fp32 sums. Of the 16 rows eight are vectors (queries, or their
// probabilities), rounded to 16 bits; the other eight are what that rounding left over, so that the
// product has 22 bits of each factor for the price of one: row r + 8 corrects row r, and both sums
// meet in one lane.
//
// A code q is its own fp16 value: the bits q are the subnormal q * 2^-24, exactly. So two codes
// become two halves by one shift and one mask, and 2^24 goes into the scale of the vectors. Which
// token or channel a column of a fragment stands for is ours to choose: lane l, with g = l/4 and
// t = l%4, takes the packed word g of each of its rows (eight codes: tokens 8g..8g+7 of a channel
// of K, or channels of a token of V), and its code j is column g of the j-th product.
#ifndef KVMILL_KERNELS_CUDA_ATTENTION_CODES_H_
#define KVMILL_KERNELS_CUDA_ATTENTION_CODES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/float16.h"

namespace kvmill {
namespace device {

constexpr float kCodeUnit = 16777216.0f;  // 2^24

// Eight codes of kBits, the first in the low bits.
template <int kBits>
KVMILL_DEVICE std::uint32_t LoadEightCodes(const std::byte* at) {
  if constexpr (kBits == 4) return *reinterpret_cast<const std::uint32_t*>(at);
  return *reinterpret_cast<const std::uint16_t*>(at);
}

// The same eight codes of two rows (a and b), so that one mask makes a fragment register of both:
// codes of a in the low half of a word, and of b above them.
template <int kBits>
struct CodePairs;

template <>
struct CodePairs<4> {
  std::uint32_t low;   // Codes 0..3.
  std::uint32_t high;  // Codes 4..7.
  KVMILL_DEVICE static CodePairs Of(std::uint32_t a, std::uint32_t b) {
    return {PermuteBytes(a, b, 0x5410), PermuteBytes(a, b, 0x7632)};
  }
  KVMILL_DEVICE std::uint32_t At(int j) const {
    return ((j < 4 ? low : high) >> (j % 4 * 4)) & 0x000F000Fu;
  }
};

template <>
struct CodePairs<2> {
  std::uint32_t all;
  KVMILL_DEVICE static CodePairs Of(std::uint32_t a, std::uint32_t b) {
    return {PermuteBytes(a, b, 0x5410)};
  }
  KVMILL_DEVICE std::uint32_t At(int j) const { return (all >> (j * 2)) & 0x00030003u; }
};

// The powers of two that bring a largest magnitude into [1, 2), and back. Exact, unlike a division;
// of 0 (and of what is next to it) `back` is 0.
struct PowerScale {
  float there;
  float back;
};
KVMILL_DEVICE PowerScale ScaleOf(float largest) {
  const std::uint32_t exponent = BitsOf(largest) & 0x7F800000u;
  return {FromBits((254u << 23) - exponent), FromBits(exponent)};
}

// Two fp32 values as 16-bit ones, and what is left over of each.
struct Planes {
  std::uint32_t value;
  std::uint32_t rest;
};
KVMILL_DEVICE Planes SplitHalf(float a, float b) {
  const std::uint16_t x = FloatToHalf(a);
  const std::uint16_t y = FloatToHalf(b);
  return {x | static_cast<std::uint32_t>(y) << 16,
          PackHalf2(a - HalfToFloat(x), b - HalfToFloat(y))};
}
KVMILL_DEVICE Planes SplitBFloat16(float a, float b) {
  const std::uint16_t x = FloatToBFloat16(a);
  const std::uint16_t y = FloatToBFloat16(b);
  const std::uint16_t x_rest = FloatToBFloat16(a - BFloat16ToFloat(x));
  const std::uint16_t y_rest = FloatToBFloat16(b - BFloat16ToFloat(y));
  return {x | static_cast<std::uint32_t>(y) << 16, x_rest | static_cast<std::uint32_t>(y_rest)
                                                                << 16};
}
template <DType kDType>
KVMILL_DEVICE Planes Split(float a, float b) {
  if constexpr (kDType == DType::kFloat16) return SplitHalf(a, b);
  return SplitBFloat16(a, b);
}

template <DType kDType>
KVMILL_DEVICE void Mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  if constexpr (kDType == DType::kFloat16) {
    MmaHalf(c, a, b);
  } else {
    MmaBFloat16(c, a, b);
  }
}

// Both planes of eight vectors of kDim values as the first factor, in shared memory: rows 0..7 the
// values, 8..15 what is left over.
template <int kDim>
struct VectorPlanes {
  static constexpr int kPitch = kDim + 8;  // Rows fall into different banks.
  std::uint16_t rows[16][kPitch];

  // Rows 0..15, columns 16*step and on.
  KVMILL_DEVICE void Load(std::uint32_t (&a)[4], int step) const {
    const int lane = static_cast<int>(LaneIndex());
    LdMatrix4(a, &rows[lane % 16][16 * step + lane / 16 * 8]);
  }
};

// Where channel c of K stands among the columns of the first factor: lane t has channels t, t+4,
// t+8 and t+12 of each 16, so that the four loads of a lane fall into different banks for
// neighbouring t.
KVMILL_DEVICE int ColumnOfChannel(int channel) {
  const int c = channel % 16;
  return channel - c + c % 4 * 2 + c / 4 % 2 + c / 8 * 8;
}

// sums[j][e] = the product of the vectors with the codes of `channels` channels of K from `codes`
// on, the first of which is channel `first`: row g, token 8*(2t+e) + j of the 64 that begin at word
// `word` of each channel's row; values and left-overs added up, times 2^-24.
template <int kDim, int kBits>
KVMILL_DEVICE void KeyProducts(const VectorPlanes<kDim>& vectors, const std::byte* codes, int first,
                               int channels, int row_bytes, int word, float (&sums)[8][2]) {
  const int lane = static_cast<int>(LaneIndex());
  const std::byte* at = codes + lane % 4 * row_bytes + (word + lane / 4) * kBits;
  float c[8][4];
  KVMILL_UNROLL
  for (int j = 0; j < 8; ++j) {
    KVMILL_UNROLL
    for (int i = 0; i < 4; ++i) c[j][i] = 0;
  }
  KVMILL_NO_UNROLL
  for (int step = 0; step < channels / 16; ++step, at += 16 * row_bytes) {
    std::uint32_t a[4];
    vectors.Load(a, first / 16 + step);
    const auto lower =
        CodePairs<kBits>::Of(LoadEightCodes<kBits>(at), LoadEightCodes<kBits>(at + 4 * row_bytes));
    const auto upper = CodePairs<kBits>::Of(LoadEightCodes<kBits>(at + 8 * row_bytes),
                                            LoadEightCodes<kBits>(at + 12 * row_bytes));
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t b[2] = {lower.At(j), upper.At(j)};
      MmaHalf(c[j], a, b);
    }
  }
  KVMILL_UNROLL
  for (int j = 0; j < 8; ++j) {
    sums[j][0] = c[j][0] + c[j][2];
    sums[j][1] = c[j][1] + c[j][3];
  }
}

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_ATTENTION_CODES_H_
