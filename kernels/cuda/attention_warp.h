// One warp's part of decode attention: eight rows over some of the blocks of one KV head, with a
// running maximum (online softmax). Keys and values of a block come into the warp's own shared
// memory by asynchronous copies, the keys of the next block while the values of this one are worked
// on and the other way round.
#ifndef KVMILL_KERNELS_CUDA_ATTENTION_WARP_H_
#define KVMILL_KERNELS_CUDA_ATTENTION_WARP_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/attention_codes.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/attention_steps.h"
#include "kernels/cuda/device.h"

namespace kvmill {
namespace device {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// The queries of a unit, shared by the warps.
template <int kDim>
struct UnitQueries {
  float rotated[kUnitRows][kDim];  // In the frame of the tiles. Later the outputs in that frame.
  float plain[kUnitRows][kDim];    // In the frame of raw rows. Later the outputs in that frame.
  float scale[kUnitRows];          // What the planes of `plain` were divided by.
  VectorPlanes<kDim> half;
  VectorPlanes<kDim> bfloat16;
};

template <int kDim>
class AttentionWarp {
 public:
  using Step = typename AttentionSteps<kDim>::Step;

  KVMILL_DEVICE AttentionWarp(const AttentionParameters& p, const Share& share,
                              const UnitQueries<kDim>& queries, const WarpMemory<kDim>& memory)
      : p_(p),
        q_(queries),
        memory_(memory),
        steps_(p, share, memory),
        row_(static_cast<int>(LaneIndex()) / 4),
        pair_(static_cast<int>(LaneIndex()) % 4),
        group_(p.shape.format.group),
        log2_scale_(p.shape.scale * kLog2E) {
    KVMILL_UNROLL
    for (int i = 0; i < kDim / 8; ++i) {
      KVMILL_UNROLL
      for (int e = 0; e < 2; ++e) tiles_[i / 8][i % 8][e] = raw_[i][e] = 0;
    }
  }

  KVMILL_DEVICE void Run() {
    Step step = steps_.First();
    if (step.valid) {
      steps_.Load(step, false);
      CpAsyncCommit();
      steps_.Load(step, true);
      CpAsyncCommit();
    }
    KVMILL_NO_UNROLL
    while (step.valid) {
      const Step next = steps_.After(step);
      WaitForOlder();
      const float old_max = max_;
      if (step.tile) {
        TileScores(step);
      } else if (steps_.TypeOf(step, false) == DType::kFloat16) {
        RawScores<DType::kFloat16>(step);
      } else {
        RawScores<DType::kBFloat16>(step);
      }
      const float moved = max_ == kMinusInfinity ? 1.0f : Exp2(old_max - max_);
      if (p_.in_quarters && step.tile) {
        LoadQuarter(step, true, true);
        WaitForOlder();
        AddTileValues<0>(moved);
        LoadNext(next, false);
        WaitForOlder();
        AddTileValues<1>(moved);
      } else {
        LoadNext(next, false);
        WaitForOlder();
        if (step.tile) {
          AddTileValues<0>(moved);
          AddTileValues<1>(moved);
        } else if (steps_.TypeOf(step, true) == DType::kFloat16) {
          AddRawValues<DType::kFloat16>(moved);
        } else {
          AddRawValues<DType::kBFloat16>(moved);
        }
      }
      LoadNext(next, true);
      step = next;
    }
    CpAsyncWait<0>();
    total_ += ShuffleXor(kAllLanes, total_, 1);
    total_ += ShuffleXor(kAllLanes, total_, 2);
  }

  // Of the row of this lane; lanes of a row agree. Maximum in units of log2.
  KVMILL_DEVICE float max() const { return max_; }
  KVMILL_DEVICE float total() const { return total_; }

  // Adds the outputs times `factor` to those of the unit, or stores them.
  KVMILL_DEVICE void Output(UnitQueries<kDim>& out, float factor, bool add) const {
    KVMILL_UNROLL
    for (int i = 0; i < kDim / 8; ++i) {
      KVMILL_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& tile = out.rotated[row_][i / 8 * 64 + 16 * pair_ + 8 * e + i % 8];
        float& raw = out.plain[row_][8 * i + 2 * pair_ + e];
        tile = (add ? tile : 0.0f) + tiles_[i / 8][i % 8][e] * factor;
        raw = (add ? raw : 0.0f) + raw_[i][e] * factor;
      }
    }
  }

 private:
  // Copies go on in order; the last but one has arrived.
  KVMILL_DEVICE static void WaitForOlder() {
    CpAsyncWait<1>();
    SyncWarp();
  }
  // Begin a copy to memory that no lane reads any more.
  KVMILL_DEVICE void LoadNext(const Step& next, bool second) const {
    SyncWarp();
    if (next.valid) steps_.Load(next, second);
    CpAsyncCommit();
  }
  KVMILL_DEVICE void LoadQuarter(const Step& step, bool values, bool second) const {
    SyncWarp();
    steps_.LoadQuarter(step, values, second);
    CpAsyncCommit();
  }

  // Applies the soft cap to scores, which are in units of log2.
  template <int kCount>
  KVMILL_DEVICE void Cap(float (&scores)[kCount]) const {
    const float cap = p_.shape.soft_cap * kLog2E;
    if (!(cap > 0)) return;
    const float inverse = 1.0f / cap;
    KVMILL_UNROLL
    for (int i = 0; i < kCount; ++i) scores[i] = cap * Tanh(scores[i] * inverse);
  }

  // Turns the lane's scores into probabilities under the new maximum.
  template <int kCount>
  KVMILL_DEVICE void Softmax(float (&scores)[kCount]) {
    float largest = max_;
    KVMILL_UNROLL
    for (int i = 0; i < kCount; ++i) largest = Max(largest, scores[i]);
    largest = Max(largest, ShuffleXor(kAllLanes, largest, 1));
    largest = Max(largest, ShuffleXor(kAllLanes, largest, 2));
    const float pivot = largest == kMinusInfinity ? 0.0f : largest;  // Nothing seen: all 0, no NaN.
    float sum = 0;
    KVMILL_UNROLL
    for (int i = 0; i < kCount; ++i) {
      scores[i] = Exp2(scores[i] - pivot);
      sum += scores[i];
    }
    total_ = total_ * (largest == kMinusInfinity ? 1.0f : Exp2(max_ - largest)) + sum;
    max_ = largest;
  }

  // ---- Tiles. ----

  KVMILL_DEVICE const std::uint16_t* KeyHalves(std::size_t offset) const {
    return reinterpret_cast<const std::uint16_t*>(memory_.key_scales +
                                                  (offset - p_.layout.k_scale));
  }
  KVMILL_DEVICE const std::uint16_t* ValueHalves(std::size_t offset) const {
    return reinterpret_cast<const std::uint16_t*>(memory_.value_scales +
                                                  (offset - p_.layout.v_channel));
  }

  // The planes of q * S for this tile, and for the row of the lane what they were divided by and
  // the sum of q * Z.
  KVMILL_DEVICE void FoldQueries(float& divisor, float& zeros) {
    constexpr int kEach = kDim / 32;
    const int lane = static_cast<int>(LaneIndex());
    const std::uint16_t* const scale = KeyHalves(p_.layout.k_scale);
    const std::uint16_t* const zero = KeyHalves(p_.layout.k_zero);
    float s[kEach];
    float z[kEach];
    KVMILL_UNROLL
    for (int i = 0; i < kEach; ++i) {
      s[i] = HalfToFloat(scale[lane + 32 * i]);
      z[i] = HalfToFloat(zero[lane + 32 * i]);
    }
    divisor = zeros = 0;
    KVMILL_UNROLL
    for (int r = 0; r < kUnitRows; ++r) {
      float v[kEach];
      float sum = 0;
      float largest = 0;
      KVMILL_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const float q = q_.rotated[r][lane + 32 * i];
        v[i] = q * s[i];
        sum = Fma(q, z[i], sum);
        largest = Max(largest, Max(v[i], -v[i]));
      }
      largest = FromBits(ReduceMax(kAllLanes, BitsOf(largest)));
      const PowerScale power = ScaleOf(largest);
      KVMILL_UNROLL
      for (unsigned h = 1; h < 32; h *= 2) sum += ShuffleXor(kAllLanes, sum, h);
      if (r == row_) {
        divisor = power.back;
        zeros = sum;
      }
      KVMILL_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const float x = v[i] * power.there;
        const std::uint16_t value = FloatToHalf(x);
        const int column = ColumnOfChannel(lane + 32 * i);
        memory_.planes->rows[r][column] = value;
        memory_.planes->rows[r + 8][column] = FloatToHalf(x - HalfToFloat(value));
      }
    }
    SyncWarp();
  }

  // The halves first + 8*e .. + 7 for e = 0, 1, first a multiple of 8: 16 values of neighbouring
  // words' tokens or channels.
  struct Sixteen {
    Vector16 half[2];
    KVMILL_DEVICE float At(int j, int e) const {
      return HalfToFloat(static_cast<std::uint16_t>(half[e].word[j / 2] >> (j % 2 * 16)));
    }
  };
  KVMILL_DEVICE static Sixteen LoadSixteen(const std::uint16_t* from) {
    return {{Load16(from), Load16(from + 8)}};
  }

  // The products of `channels` channels, from channel `first` on, to scores_ or added to it.
  template <bool kAdd>
  KVMILL_DEVICE void KeyScores(const std::byte* codes, int first, int channels) {
    KVMILL_UNROLL
    for (int span = 0; span < 2; ++span) {
      float sums[8][2] = {};
      if (64 * span < static_cast<int>(group_)) {
        if (p_.shape.format.key_bits == 4) {
          KeyProducts<kDim, 4>(*memory_.planes, codes, first, channels,
                               static_cast<int>(group_) / 2, 8 * span, sums);
        } else {
          KeyProducts<kDim, 2>(*memory_.planes, codes, first, channels,
                               static_cast<int>(group_) / 4, 8 * span, sums);
        }
      }
      KVMILL_UNROLL
      for (int i = 0; i < 16; ++i) {
        float& score = scores_[16 * span + i];
        score = kAdd ? score + sums[i / 2][i % 2] : sums[i / 2][i % 2];
      }
    }
  }

  KVMILL_DEVICE void TileScores(const Step& step) {
    float divisor;
    float zeros;
    FoldQueries(divisor, zeros);
    const float unit = divisor * kCodeUnit;
    KeyScores<false>(memory_.keys, 0, p_.in_quarters ? kDim / 2 : kDim);
    if (p_.in_quarters) {
      LoadQuarter(step, true, false);
      WaitForOlder();
      KeyScores<true>(memory_.values, kDim / 2, kDim / 2);
    }
    KVMILL_UNROLL
    for (int span = 0; span < 2; ++span) {
      const int first = 64 * span;
      if (first >= static_cast<int>(group_)) continue;  // Masked below.
      const Sixteen across = LoadSixteen(KeyHalves(p_.layout.k_token) + first + 16 * pair_);
      KVMILL_UNROLL
      for (int i = 0; i < 16; ++i) {
        scores_[16 * span + i] =
            across.At(i / 2, i % 2) * Fma(scores_[16 * span + i], unit, zeros) * log2_scale_;
      }
    }
    Cap(scores_);
    const unsigned begin = steps_.Begin(step.block);
    const unsigned end = steps_.End(step.block);
    // Few blocks are at an edge of what is seen.
    if (Ballot(kAllLanes, begin > 0 || end < 128) != 0) {
      KVMILL_UNROLL
      for (int i = 0; i < 32; ++i) {
        const auto token =
            static_cast<unsigned>(i / 16 * 64 + 16 * pair_ + 8 * (i % 2) + i % 16 / 2);
        if (token < begin || token >= end) scores_[i] = kMinusInfinity;
      }
    }
    Softmax(scores_);
  }

  // The values of tokens 64 * kSpan and on; span 0 comes first, 1 only if there are as many.
  template <int kSpan>
  KVMILL_DEVICE void AddTileValues(float moved) {
    if (64 * kSpan >= static_cast<int>(group_)) return;
    if (p_.shape.format.value_bits == 4) {
      AddTileValuesOf<kSpan, 4>(moved);
    } else {
      AddTileValuesOf<kSpan, 2>(moved);
    }
  }

  template <int kSpan, int kBits>
  KVMILL_DEVICE void AddTileValuesOf(float moved) {
    constexpr int kRowBytes = kDim * kBits / 8;
    const int first = 64 * kSpan + 16 * pair_;
    const std::byte* const codes = p_.in_quarters ? (kSpan == 0 ? memory_.keys : memory_.values)
                                                  : memory_.values + 64 * kSpan * kRowBytes;
    // p * S of the lane's sixteen tokens, divided by the row's largest; and the sum of p * Z.
    const Sixteen scale = LoadSixteen(ValueHalves(p_.layout.v_scale) + first);
    const Sixteen zero = LoadSixteen(ValueHalves(p_.layout.v_zero) + first);
    float w[16];
    float zeros = 0;
    float largest = 0;
    KVMILL_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float p = scores_[16 * kSpan + i];
      w[i] = p * scale.At(i / 2, i % 2);
      zeros = Fma(p, zero.At(i / 2, i % 2), zeros);
      largest = Max(largest, Max(w[i], -w[i]));
    }
    KVMILL_UNROLL
    for (unsigned h = 1; h < 4; h *= 2) {
      zeros += ShuffleXor(kAllLanes, zeros, h);
      largest = Max(largest, ShuffleXor(kAllLanes, largest, h));
    }
    const PowerScale power = ScaleOf(largest);
    const float unit = power.back * kCodeUnit;
    // Step s has the tokens of codes 2s and 2s + 1: first + {2s, 8 + 2s} and first + {2s + 1,
    // 8 + 2s + 1}.
    std::uint32_t a[4][4];
    KVMILL_UNROLL
    for (int s = 0; s < 4; ++s) {
      KVMILL_UNROLL
      for (int h = 0; h < 2; ++h) {
        const Planes planes =
            SplitHalf(w[4 * s + 2 * h] * power.there, w[4 * s + 2 * h + 1] * power.there);
        a[s][2 * h] = planes.value;
        a[s][2 * h + 1] = planes.rest;
      }
    }
    const float before = kSpan == 0 ? moved : 1.0f;
    KVMILL_UNROLL
    for (int part = 0; part < kDim / 64; ++part) {
      CodePairs<kBits> pairs[4][2];
      KVMILL_UNROLL
      for (int s = 0; s < 4; ++s) {
        KVMILL_UNROLL
        for (int h = 0; h < 2; ++h) {
          const std::byte* const at =
              codes + (16 * pair_ + 2 * s + h) * kRowBytes + (8 * part + row_) * kBits;
          pairs[s][h] = CodePairs<kBits>::Of(LoadEightCodes<kBits>(at),
                                             LoadEightCodes<kBits>(at + 8 * kRowBytes));
        }
      }
      const Sixteen across = LoadSixteen(ValueHalves(p_.layout.v_channel) + 64 * part + 16 * pair_);
      KVMILL_UNROLL
      for (int j = 0; j < 8; ++j) {
        float c[4] = {0, 0, 0, 0};
        KVMILL_UNROLL
        for (int s = 0; s < 4; ++s) {
          const std::uint32_t b[2] = {pairs[s][0].At(j), pairs[s][1].At(j)};
          MmaHalf(c, a[s], b);
        }
        KVMILL_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float sum = Fma(c[e] + c[e + 2], unit, zeros);
          tiles_[part][j][e] = Fma(across.At(j, e), sum, tiles_[part][j][e] * before);
        }
      }
    }
    if constexpr (kSpan == 0) {
      KVMILL_UNROLL
      for (int i = 0; i < kDim / 8; ++i) {
        raw_[i][0] *= moved;
        raw_[i][1] *= moved;
      }
    }
  }

  // ---- Raw rows. ----

  template <DType kDType>
  KVMILL_DEVICE void RawScores(const Step& step) {
    const VectorPlanes<kDim>& planes = kDType == DType::kFloat16 ? q_.half : q_.bfloat16;
    float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    const std::byte* const rows = memory_.keys + static_cast<unsigned>(row_) * kRawPitch<kDim>;
    KVMILL_UNROLL
    for (int s = 0; s < kDim / 16; ++s) {
      std::uint32_t a[4];
      planes.Load(a, s);
      KVMILL_UNROLL
      for (int n = 0; n < 2; ++n) {
        const auto* const k = reinterpret_cast<const std::uint32_t*>(
            rows + static_cast<unsigned>(8 * n) * kRawPitch<kDim> + 32 * s + 4 * pair_);
        const std::uint32_t b[2] = {k[0], k[4]};
        Mma<kDType>(c[n], a, b);
      }
    }
    const unsigned begin = steps_.Begin(step.block);
    const unsigned end = steps_.End(step.block);
    const float unit = q_.scale[row_] * log2_scale_;
    float scores[4];
    KVMILL_UNROLL
    for (int i = 0; i < 4; ++i) scores[i] = (c[i / 2][i % 2] + c[i / 2][i % 2 + 2]) * unit;
    Cap(scores);
    KVMILL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const unsigned token = step.first + static_cast<unsigned>(8 * (i / 2) + 2 * pair_ + i % 2);
      if (token < begin || token >= end) scores[i] = kMinusInfinity;
    }
    Softmax(scores);
    KVMILL_UNROLL
    for (int i = 0; i < 4; ++i) scores_[i] = scores[i];
  }

  template <DType kDType>
  KVMILL_DEVICE void AddRawValues(float moved) {
    const Planes first = Split<kDType>(scores_[0], scores_[1]);
    const Planes second = Split<kDType>(scores_[2], scores_[3]);
    const std::uint32_t a[4] = {first.value, first.rest, second.value, second.rest};
    const unsigned lane = LaneIndex();
    const std::byte* const rows = memory_.values + lane % 16 * kRawPitch<kDim> + lane / 16 * 16;
    KVMILL_UNROLL
    for (int i = 0; i < kDim / 8; i += 2) {
      std::uint32_t b[4];
      LdMatrix4Transposed(b, rows + 16 * i);
      KVMILL_UNROLL
      for (int n = 0; n < 2; ++n) {
        float c[4] = {0, 0, 0, 0};
        const std::uint32_t pair[2] = {b[2 * n], b[2 * n + 1]};
        Mma<kDType>(c, a, pair);
        KVMILL_UNROLL
        for (int e = 0; e < 2; ++e) {
          raw_[i + n][e] = Fma(raw_[i + n][e], moved, c[e] + c[e + 2]);
        }
      }
    }
    KVMILL_UNROLL
    for (int i = 0; i < kDim / 8; ++i) {
      tiles_[i / 8][i % 8][0] *= moved;
      tiles_[i / 8][i % 8][1] *= moved;
    }
  }

  const AttentionParameters& p_;
  const UnitQueries<kDim>& q_;
  const WarpMemory<kDim> memory_;
  const AttentionSteps<kDim> steps_;
  const int row_;   // Of the unit: lane / 4.
  const int pair_;  // lane % 4.
  const unsigned group_;
  const float log2_scale_;

  float max_ = kMinusInfinity;
  float total_ = 0;               // Of the lane's tokens, until the end.
  float scores_[32];              // Then probabilities. Raw rows use four.
  float tiles_[kDim / 64][8][2];  // Channel 64*part + 16*pair + 8*e + j, rotated.
  float raw_[kDim / 8][2];        // Channel 8*i + 2*pair + e.
};

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_ATTENTION_WARP_H_
