// Variance normalization of a half of a tile that lies in registers (tile_registers.h), by the
// algorithm of kernels/cpu/normalize-inl.h: the normalized tile is never computed, moments are
// matrix-vector products with the weights 1/s.
//
// An iteration has two passes over the registers. Token moments (over channels) are sums within a
// warp, and the warp steps its tokens by itself. Channel moments (over tokens) are taken per warp
// around the warp's own mean and combined by the threads that own the channels, thread c channel c:
// means first, then squares, so that nothing cancels however the means differ. Two barriers an
// iteration.
#ifndef KVMILL_KERNELS_CUDA_NORMALIZE_H_
#define KVMILL_KERNELS_CUDA_NORMALIZE_H_

#include <cstddef>

#include "kernels/cuda/device.h"
#include "kernels/cuda/tile_registers.h"
#include "kernels/encode.h"

namespace kvmill {
namespace device {

enum class Half { kKeys, kValues };

// Logarithms of the paper as factors: log s = clip(log s + ln(clip(std, 1e-3, 1e3)), -0.3, 10).
constexpr float kDeviationMin = 1e-3f;
constexpr float kDeviationMax = 1e3f;
constexpr float kScaleMin = 0.74081822f;  // exp(-0.3)
constexpr float kScaleMax = 22026.4658f;  // exp(10)

// Below this share of the squares a difference is rounding alone and counts as 0.
constexpr float kNoise = 4e-6f;

// What the threads of a block share. Arrays over channels are indexed by Slot().
template <typename Shape>
struct NormalizeShared {
  float channel_weight[Shape::kDim];     // 1 / s.
  float channel_deviation[Shape::kDim];  // Of the current iterate.
  // By warp: the mean over its tokens, and the sum of squares around it. Of x * token weight.
  float channel_mean[Shape::kWarps][Shape::kDim];
  float channel_squares[Shape::kWarps][Shape::kDim];
  float token_weight[Shape::kGroup];
  float token_pivot[Shape::kGroup];    // Close to the mean of x * channel weight.
  unsigned token_high[Shape::kWarps];  // Extreme deviations of the warp's tokens, as bits.
  unsigned token_low[Shape::kWarps];
};

// What came out: the kept scales of the token and of the channel that the calling thread owns.
struct KeptScales {
  float token;
  float channel;
};

KVMILL_DEVICE float NextScale(float scale, float deviation) {
  const float clipped = Min(Max(deviation, kDeviationMin), kDeviationMax);
  return Min(Max(scale * clipped, kScaleMin), kScaleMax);
}

// max / max(min, 1e-8): one axis' share of the imbalance.
KVMILL_DEVICE float Spread(unsigned high_bits, unsigned low_bits) {
  return FromBits(high_bits) / Max(FromBits(low_bits), 1e-8f);
}

// By halves: the sum of equal values is exact.
KVMILL_DEVICE float SumOfEight(const float (&x)[8]) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Adds up over the columns, that is over all channels; every lane gets the sum.
template <typename Shape>
KVMILL_DEVICE float SumOverColumns(float x) {
  KVMILL_UNROLL
  for (int h = 1; h < Shape::kColumns; h *= 2) {
    x += ShuffleXor(kAllLanes, x, static_cast<unsigned>(h));
  }
  return x;
}

// One half of a butterfly that also divides the work: of `2 * n` values each lane keeps n, sums its
// partner's share of those, and gives the others away.
template <typename Combine>
KVMILL_DEVICE void Exchange(float* x, int n, unsigned lane_xor, bool upper, Combine combine) {
  KVMILL_UNROLL
  for (int r = 0; r < n; ++r) {
    const float give = upper ? x[r] : x[r + n];
    const float keep = upper ? x[r + n] : x[r];
    x[r] = combine(keep, ShuffleXor(kAllLanes, give, lane_xor));
  }
}

struct Plus {
  KVMILL_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Least {
  KVMILL_DEVICE float operator()(float a, float b) const { return Min(a, b); }
};
struct Greatest {
  KVMILL_DEVICE float operator()(float a, float b) const { return Max(a, b); }
};

// Combines values of the thread's eight tokens over the columns. The result, in x[0], is that of
// token 8*row + OwnToken(): all lanes of a warp together own each of its tokens, kColumns/8 lanes
// the same one.
template <typename Shape, typename Combine>
KVMILL_DEVICE void CombineTokens(float (&x)[8], int column, Combine combine) {
  constexpr int kColumns = Shape::kColumns;
  Exchange(x, 4, kColumns / 2, (column & (kColumns / 2)) != 0, combine);
  Exchange(x, 2, kColumns / 4, (column & (kColumns / 4)) != 0, combine);
  Exchange(x, 1, kColumns / 8, (column & (kColumns / 8)) != 0, combine);
  KVMILL_UNROLL
  for (int h = kColumns / 16; h > 0; h /= 2) {
    x[0] = combine(x[0], ShuffleXor(kAllLanes, x[0], static_cast<unsigned>(h)));
  }
}

// Combines values of the thread's eight channels over the rows of its warp. The results, in
// x[0] .. x[8/kWarpRows - 1], are those of channels 8*column + OwnChannels() and on.
template <typename Shape, typename Combine>
KVMILL_DEVICE void CombineChannels(float (&x)[8], Combine combine) {
  const unsigned lane = LaneIndex();
  if constexpr (Shape::kWarpRows == 2) Exchange(x, 4, 16, (lane & 16) != 0, combine);
  if constexpr (Shape::kWarpRows == 4) {
    Exchange(x, 4, 16, (lane & 16) != 0, combine);
    Exchange(x, 2, 8, (lane & 8) != 0, combine);
  }
}

template <typename Shape, Half kHalf>
class Normalizer {
 public:
  using Place = TilePlace<Shape>;

  KVMILL_DEVICE Normalizer(NormalizeShared<Shape>& shared, const Place& place, const Tile& x)
      : s_(shared),
        place_(place),
        x_(x),
        warp_(static_cast<int>(WarpIndex())),
        own_token_(OwnToken(place)),
        writes_token_(place.column % (Shape::kColumns / 8) == 0),
        own_channel_(static_cast<int>(ThreadIndex()) < Shape::kDim ? static_cast<int>(ThreadIndex())
                                                                   : -1) {}

  // The token whose state the calling lane has; writes_token: it is the one that writes.
  KVMILL_DEVICE static int OwnToken(const Place& place) {
    return place.token + place.column / (Shape::kColumns / 8);
  }

  // Every thread of the block must call it.
  KVMILL_DEVICE KeptScales Run() {
    PlainTokens();
    PlainChannels();
    SyncThreads();
    const float token_spread = TokenSpread();
    CloseChannel(1.0f);
    if constexpr (kHalf == Half::kKeys) {
      WriteDeviation(channel_deviation_);
      SyncThreads();
      best_ = ChannelSpread() + token_spread;
      ChannelPass();
      SyncThreads();
      CloseChannel(1.0f);
      StepChannel();
      WriteDeviation(channel_deviation_);
      WriteChannelWeight();
    } else {
      WriteDeviation(channel_deviation_);
      StepChannel();
      WriteChannelWeight();
      SyncThreads();
      best_ = ChannelSpread() + token_spread;
    }
    if constexpr (kHalf == Half::kKeys) SyncThreads();

    KVMILL_NO_UNROLL
    for (int iteration = 0; iteration < kNormalizeIterations; ++iteration) {
      const bool last = iteration + 1 == kNormalizeIterations;
      float channel_spread = 0;
      if constexpr (kHalf == Half::kKeys) channel_spread = ChannelSpread();
      TokenPass();
      // Keys are normalized along tokens first: the step belongs to the next iterate.
      if (kHalf == Half::kValues || !last) ChannelPass();
      SyncThreads();
      const float spread = TokenSpread();
      if constexpr (kHalf == Half::kKeys) {
        Keep(channel_spread + spread, channel_scale_, token_scale_);
        token_scale_ = next_token_scale_;
        if (last) break;
        CloseChannel(channel_weight_);
        StepChannel();
        WriteDeviation(channel_deviation_);
        WriteChannelWeight();
        SyncThreads();
      } else {
        token_scale_ = next_token_scale_;
        const float scale = channel_scale_;
        CloseChannel(channel_weight_);
        WriteDeviation(channel_deviation_);
        StepChannel();  // Of the next iteration; unused after the last.
        WriteChannelWeight();
        SyncThreads();
        Keep(ChannelSpread() + spread, scale, token_scale_);
      }
    }
    return {best_token_, best_channel_};
  }

 private:
  // Keeps an iterate that is no worse than the best one: a tie takes the later.
  KVMILL_DEVICE void Keep(float imbalance, float channel_scale, float token_scale) {
    if (!(imbalance <= best_)) return;
    best_ = imbalance;
    best_channel_ = channel_scale;
    best_token_ = token_scale;
  }

  // ---- Tokens: within a warp. ----

  KVMILL_DEVICE void PlainTokens() {
    float pivot[8];
    KVMILL_UNROLL
    for (int i = 0; i < 8; ++i) {
      pivot[i] = SumOverColumns<Shape>(SumOfEight(x_[i])) * (1.0f / Shape::kDim);
      if (place_.column == 0) s_.token_pivot[place_.token + i] = pivot[i];
    }
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    SyncWarp();
    StepTokens<Half::kKeys>(ones, pivot, s_.token_pivot[own_token_]);  // As it is, before the step.
    if constexpr (kHalf == Half::kValues) {
      // Values begin with the channels: undo the step.
      next_token_scale_ = 1;
      token_weight_ = 1;
    } else {
      token_scale_ = next_token_scale_;
    }
  }

  KVMILL_DEVICE void TokenPass() {
    float weight[8];
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) weight[j] = s_.channel_weight[j * Shape::kColumns + place_.column];
    // Roughly how the means of the tokens moved with the weights of the channels.
    const float weights = SumOverColumns<Shape>(SumOfEight(weight));
    const float moved = weights / channel_weights_;
    channel_weights_ = weights;
    float pivot[8];
    KVMILL_UNROLL
    for (int i = 0; i < 8; ++i) pivot[i] = s_.token_pivot[place_.token + i] * moved;
    StepTokens<kHalf>(weight, pivot, s_.token_pivot[own_token_] * moved);
  }

  // Moments of the tokens around `pivot`, and their next scale. `own_pivot` is that of own_token_.
  // The deviations that count are those of the iterate that the old weights close (kKeys) or that
  // the new ones make (kValues).
  template <Half kCloses>
  KVMILL_DEVICE void StepTokens(const float (&weight)[8], const float (&pivot)[8],
                                float own_pivot) {
    float sum[8];
    float squares[8];
    KVMILL_UNROLL
    for (int i = 0; i < 8; ++i) {
      sum[i] = 0;
      squares[i] = 0;
      KVMILL_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float y = Fma(x_[i][j], weight[j], -pivot[i]);
        sum[i] += y;
        squares[i] = Fma(y, y, squares[i]);
      }
    }
    CombineTokens<Shape>(sum, place_.column, Plus());
    CombineTokens<Shape>(squares, place_.column, Plus());
    const float shift = sum[0] * (1.0f / Shape::kDim);
    const float difference = Fma(-sum[0], shift, squares[0]);
    const bool real = difference > squares[0] * kNoise;
    const float deviation =
        real ? Sqrt(difference * (1.0f / static_cast<float>(Shape::kDim - 1))) : 0.0f;
    const float current = deviation * token_weight_;
    next_token_scale_ = NextScale(token_scale_, current);
    token_weight_ = 1.0f / next_token_scale_;
    const unsigned closed = BitsOf(kCloses == Half::kKeys ? current : deviation * token_weight_);
    const unsigned high = ReduceMax(kAllLanes, closed);
    const unsigned low = ReduceMin(kAllLanes, closed);
    SyncWarp();  // All lanes have read their pivots.
    if (writes_token_) {
      s_.token_pivot[own_token_] = own_pivot + shift;
      s_.token_weight[own_token_] = token_weight_;
    }
    if (LaneIndex() == 0) {
      s_.token_high[warp_] = high;
      s_.token_low[warp_] = low;
    }
    SyncWarp();
  }

  KVMILL_DEVICE float TokenSpread() const {
    const int lane = static_cast<int>(LaneIndex());
    const int from = lane < Shape::kWarps ? lane : 0;
    return Spread(ReduceMax(kAllLanes, s_.token_high[from]),
                  ReduceMin(kAllLanes, s_.token_low[from]));
  }

  // ---- Channels: per warp, then by their owners. ----

  KVMILL_DEVICE void PlainChannels() {
    float pivot[8];
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      float column[8];
      KVMILL_UNROLL
      for (int i = 0; i < 8; ++i) column[i] = x_[i][j];
      float sum = SumOfEight(column);
      KVMILL_UNROLL
      for (int h = Shape::kColumns; h < 32; h *= 2) {
        sum += ShuffleXor(kAllLanes, sum, static_cast<unsigned>(h));
      }
      pivot[j] = sum * (1.0f / Shape::kWarpTokens);
    }
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    AddChannels(ones, pivot);
  }

  KVMILL_DEVICE void ChannelPass() {
    float weights = token_weight_;
    KVMILL_UNROLL
    for (int h = 1; h < 32; h *= 2) {
      weights += ShuffleXor(kAllLanes, weights, static_cast<unsigned>(h));
    }
    const float moved = weights / token_weights_;
    token_weights_ = weights;
    float weight[8];
    float pivot[8];
    KVMILL_UNROLL
    for (int i = 0; i < 8; ++i) weight[i] = s_.token_weight[place_.token + i];
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      pivot[j] = s_.channel_mean[warp_][j * Shape::kColumns + place_.column] * moved;
    }
    SyncWarp();  // All lanes have read the means.
    AddChannels(weight, pivot);
  }

  KVMILL_DEVICE void AddChannels(const float (&weight)[8], float (&pivot)[8]) {
    float sum[8];
    float squares[8];
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      sum[j] = 0;
      squares[j] = 0;
    }
    KVMILL_UNROLL
    for (int i = 0; i < 8; ++i) {
      KVMILL_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float y = Fma(x_[i][j], weight[i], -pivot[j]);
        sum[j] += y;
        squares[j] = Fma(y, y, squares[j]);
      }
    }
    CombineChannels<Shape>(sum, Plus());
    CombineChannels<Shape>(squares, Plus());
    constexpr int kKept = 8 / Shape::kWarpRows;
    const int first = place_.row % Shape::kWarpRows * kKept;
    KVMILL_UNROLL
    for (int r = 0; r < kKept; ++r) {
      const float shift = sum[r] * (1.0f / Shape::kWarpTokens);
      const float difference = Fma(-sum[r], shift, squares[r]);
      const int slot = (first + r) * Shape::kColumns + place_.column;
      s_.channel_mean[warp_][slot] = PivotOf(pivot, r) + shift;
      s_.channel_squares[warp_][slot] = difference > squares[r] * kNoise ? difference : 0.0f;
    }
  }

  // pivot[first + r], by selection: an index that the compiler does not know would put the array
  // into memory.
  KVMILL_DEVICE float PivotOf(const float (&pivot)[8], int r) const {
    if constexpr (Shape::kWarpRows == 1) return pivot[r];
    if constexpr (Shape::kWarpRows == 2) {
      return (LaneIndex() & 16) != 0 ? pivot[r + 4] : pivot[r];
    }
    const bool upper = (LaneIndex() & 8) != 0;
    return (LaneIndex() & 16) != 0 ? (upper ? pivot[(r + 6) & 7] : pivot[(r + 4) & 7])
                                   : (upper ? pivot[(r + 2) & 7] : pivot[r]);
  }

  // The owner combines the warps' moments: the deviation of the iterate with `weight`.
  KVMILL_DEVICE void CloseChannel(float weight) {
    if (own_channel_ < 0) return;
    const int slot = Shape::Slot(own_channel_);
    const float first = s_.channel_mean[0][slot];
    float apart = 0;  // Sum of the means' distances from the first: equal means give exactly 0.
    float squares = 0;
    KVMILL_UNROLL
    for (int w = 0; w < Shape::kWarps; ++w) {
      apart += s_.channel_mean[w][slot] - first;
      squares += s_.channel_squares[w][slot];
    }
    const float mean = apart * (1.0f / Shape::kWarps);
    float between = 0;
    KVMILL_UNROLL
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float distance = (s_.channel_mean[w][slot] - first) - mean;
      between = Fma(distance, distance, between);
    }
    squares = Fma(between, static_cast<float>(Shape::kWarpTokens), squares);
    channel_deviation_ = Sqrt(squares * (1.0f / static_cast<float>(Shape::kGroup - 1))) * weight;
  }

  // Also makes channel_deviation_ that of the iterate after the step.
  KVMILL_DEVICE void StepChannel() {
    if (own_channel_ < 0) return;
    const float old_scale = channel_scale_;
    channel_scale_ = NextScale(old_scale, channel_deviation_);
    channel_weight_ = 1.0f / channel_scale_;
    channel_deviation_ = channel_deviation_ * old_scale * channel_weight_;
  }

  KVMILL_DEVICE void WriteDeviation(float deviation) {
    if (own_channel_ >= 0) s_.channel_deviation[Shape::Slot(own_channel_)] = deviation;
  }
  KVMILL_DEVICE void WriteChannelWeight() {
    if (own_channel_ >= 0) s_.channel_weight[Shape::Slot(own_channel_)] = channel_weight_;
  }

  // Each row of threads has all channels.
  KVMILL_DEVICE float ChannelSpread() const {
    float high = 0;
    float low = kHuge;
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float deviation = s_.channel_deviation[j * Shape::kColumns + place_.column];
      high = Max(high, deviation);
      low = Min(low, deviation);
    }
    return Spread(ReduceMax(kAllLanes, BitsOf(high)), ReduceMin(kAllLanes, BitsOf(low)));
  }

  static constexpr float kHuge = 3e38f;

  NormalizeShared<Shape>& s_;
  const Place& place_;
  const Tile& x_;
  const int warp_;
  const int own_token_;
  const bool writes_token_;
  const int own_channel_;  // -1: none.

  float best_ = 0;
  float best_token_ = 1;
  float best_channel_ = 1;
  float token_scale_ = 1;
  float next_token_scale_ = 1;
  float token_weight_ = 1;
  float token_weights_ = 32;             // Sum over the lanes, at the last channel pass.
  float channel_weights_ = Shape::kDim;  // Sum over the channels, at the last token pass.
  float channel_scale_ = 1;
  float channel_weight_ = 1;
  float channel_deviation_ = 0;
};

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_NORMALIZE_H_
