// Variance normalization without materializing the normalized tile. Included once per SIMD target.
//
// A tile lies token-major, [tokens][channels], for K and for V. One fused pass per iteration goes
// over it in blocks of kBlockTokens rows, which stay in L1: first the moments of each token with
// the channel weights (across the row), then, with the token weights that follow from them, the
// moments of each channel (down the rows).
#if defined(KVMILL_KERNELS_CPU_NORMALIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_NORMALIZE_INL_H_
#undef KVMILL_KERNELS_CPU_NORMALIZE_INL_H_
#else
#define KVMILL_KERNELS_CPU_NORMALIZE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/cpu/vectors-inl.h"
#include "kernels/cpu/workspace.h"
#include "kernels/encode.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

// Logarithms of the paper as factors: log s = clip(log s + ln(clip(std, 1e-3, 1e3)), -0.3, 10).
inline constexpr float kDeviationMin = 1e-3f;
inline constexpr float kDeviationMax = 1e3f;
inline constexpr float kScaleMin = 0.74081822f;  // exp(-0.3)
inline constexpr float kScaleMax = 22026.4658f;  // exp(10)

HWY_INLINE void Fill(float* to, float value, std::size_t count) {
  const Df d;
  for (std::size_t i = 0; i < count; i += kLanes) hn::Store(hn::Set(d, value), d, to + i);
}
HWY_INLINE void Copy(const float* from, float* to, std::size_t count) {
  const Df d;
  for (std::size_t i = 0; i < count; i += kLanes) hn::Store(hn::Load(d, from + i), d, to + i);
}
HWY_INLINE float Sum(const float* x, std::size_t count) {
  const Df d;
  Vf sum = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += kLanes) sum = hn::Add(sum, hn::Load(d, x + i));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}
HWY_INLINE void MultiplyBy(float* x, float factor, std::size_t count) {
  const Df d;
  for (std::size_t i = 0; i < count; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, x + i), hn::Set(d, factor)), d, x + i);
  }
}

// max / max(min, 1e-8): one axis' share of the imbalance.
HWY_INLINE float Spread(const float* deviations, std::size_t count) {
  const Df d;
  Vf largest = hn::Load(d, deviations);
  Vf smallest = largest;
  for (std::size_t i = kLanes; i < count; i += kLanes) {
    const Vf v = hn::Load(d, deviations + i);
    largest = hn::Max(largest, v);
    smallest = hn::Min(smallest, v);
  }
  const float low = hn::GetLane(hn::MinOfLanes(d, smallest));
  return hn::GetLane(hn::MaxOfLanes(d, largest)) / (low > 1e-8f ? low : 1e-8f);
}

// Sums of (row[d] * weight[d] - pivot[t]) and of their squares over the channels, for kBlockTokens
// rows.
template <std::size_t kDim>
HWY_INLINE void TokenMoments(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT weight,
                             const float* HWY_RESTRICT pivot, float* HWY_RESTRICT sum,
                             float* HWY_RESTRICT sum_squares) {
  const Df d;
  for (std::size_t start = 0; start < kBlockTokens; start += kLanes) {
    Vf quad_sums[kLanes / 4];
    Vf quad_squares[kLanes / 4];
    for (std::size_t quad = 0; quad < kLanes / 4; ++quad) {
      const std::size_t t = start + 4 * quad;
      const float* HWY_RESTRICT r0 = rows + t * kDim;
      const float* HWY_RESTRICT r1 = r0 + kDim;
      const float* HWY_RESTRICT r2 = r1 + kDim;
      const float* HWY_RESTRICT r3 = r2 + kDim;
      const Vf p0 = hn::Set(d, pivot[t]);
      const Vf p1 = hn::Set(d, pivot[t + 1]);
      const Vf p2 = hn::Set(d, pivot[t + 2]);
      const Vf p3 = hn::Set(d, pivot[t + 3]);
      Vf s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
      Vf q0 = s0, q1 = s0, q2 = s0, q3 = s0;
      for (std::size_t i = 0; i < kDim; i += kLanes) {
        const Vf w = hn::Load(d, weight + i);
        const Vf x0 = hn::MulSub(hn::Load(d, r0 + i), w, p0);
        const Vf x1 = hn::MulSub(hn::Load(d, r1 + i), w, p1);
        const Vf x2 = hn::MulSub(hn::Load(d, r2 + i), w, p2);
        const Vf x3 = hn::MulSub(hn::Load(d, r3 + i), w, p3);
        s0 = hn::Add(s0, x0);
        s1 = hn::Add(s1, x1);
        s2 = hn::Add(s2, x2);
        s3 = hn::Add(s3, x3);
        q0 = hn::MulAdd(x0, x0, q0);
        q1 = hn::MulAdd(x1, x1, q1);
        q2 = hn::MulAdd(x2, x2, q2);
        q3 = hn::MulAdd(x3, x3, q3);
      }
      quad_sums[quad] = ReduceBlocks4<AddOp>(s0, s1, s2, s3);
      quad_squares[quad] = ReduceBlocks4<AddOp>(q0, q1, q2, q3);
    }
    hn::Store(ReduceQuads<AddOp>(quad_sums), d, sum + start);
    hn::Store(ReduceQuads<AddOp>(quad_squares), d, sum_squares + start);
  }
}

// Adds (row[d] * weight[t] - pivot[d]) and its square to the sums of each channel, for kBlockTokens
// rows.
template <std::size_t kDim>
HWY_INLINE void AddChannelMoments(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT weight,
                                  const float* HWY_RESTRICT pivot, float* HWY_RESTRICT sum,
                                  float* HWY_RESTRICT sum_squares) {
  const Df d;
  for (std::size_t i = 0; i < kDim; i += 4 * kLanes) {
    const Vf p0 = hn::Load(d, pivot + i);
    const Vf p1 = hn::Load(d, pivot + i + kLanes);
    const Vf p2 = hn::Load(d, pivot + i + 2 * kLanes);
    const Vf p3 = hn::Load(d, pivot + i + 3 * kLanes);
    Vf s0 = hn::Load(d, sum + i);
    Vf s1 = hn::Load(d, sum + i + kLanes);
    Vf s2 = hn::Load(d, sum + i + 2 * kLanes);
    Vf s3 = hn::Load(d, sum + i + 3 * kLanes);
    Vf q0 = hn::Load(d, sum_squares + i);
    Vf q1 = hn::Load(d, sum_squares + i + kLanes);
    Vf q2 = hn::Load(d, sum_squares + i + 2 * kLanes);
    Vf q3 = hn::Load(d, sum_squares + i + 3 * kLanes);
    const float* HWY_RESTRICT row = rows + i;
    for (std::size_t t = 0; t < kBlockTokens; ++t, row += kDim) {
      const Vf w = hn::Set(d, weight[t]);
      const Vf x0 = hn::MulSub(hn::Load(d, row), w, p0);
      const Vf x1 = hn::MulSub(hn::Load(d, row + kLanes), w, p1);
      const Vf x2 = hn::MulSub(hn::Load(d, row + 2 * kLanes), w, p2);
      const Vf x3 = hn::MulSub(hn::Load(d, row + 3 * kLanes), w, p3);
      s0 = hn::Add(s0, x0);
      s1 = hn::Add(s1, x1);
      s2 = hn::Add(s2, x2);
      s3 = hn::Add(s3, x3);
      q0 = hn::MulAdd(x0, x0, q0);
      q1 = hn::MulAdd(x1, x1, q1);
      q2 = hn::MulAdd(x2, x2, q2);
      q3 = hn::MulAdd(x3, x3, q3);
    }
    hn::Store(s0, d, sum + i);
    hn::Store(s1, d, sum + i + kLanes);
    hn::Store(s2, d, sum + i + 2 * kLanes);
    hn::Store(s3, d, sum + i + 3 * kLanes);
    hn::Store(q0, d, sum_squares + i);
    hn::Store(q1, d, sum_squares + i + kLanes);
    hn::Store(q2, d, sum_squares + i + 2 * kLanes);
    hn::Store(q3, d, sum_squares + i + 3 * kLanes);
  }
}

// From the moments of `values` numbers around a pivot: their mean (the next pivot) and their
// deviation without this axis' weight. Below kNoise of the squares the difference is rounding alone
// and counts as 0: constant rows must not be ranked by noise.
inline constexpr float kNoise = 4e-6f;
struct Moments {
  Vf mean;
  Vf deviation;
};
HWY_INLINE Moments MomentsOf(Vf sum, Vf sum_squares, Vf pivot, float values) {
  const Df d;
  const Vf shift = hn::Mul(sum, hn::Set(d, 1.0f / values));
  const Vf difference = hn::NegMulAdd(sum, shift, sum_squares);
  const auto is_real = hn::Gt(difference, hn::Mul(sum_squares, hn::Set(d, kNoise)));
  const Vf squares = hn::IfThenElseZero(is_real, difference);
  return {hn::Add(pivot, shift), hn::Sqrt(hn::Mul(squares, hn::Set(d, 1.0f / (values - 1.0f))))};
}

HWY_INLINE Vf NextScale(Vf scale, Vf deviation) {
  const Df d;
  const Vf clipped =
      hn::Min(hn::Max(deviation, hn::Set(d, kDeviationMin)), hn::Set(d, kDeviationMax));
  return hn::Min(hn::Max(hn::Mul(scale, clipped), hn::Set(d, kScaleMin)), hn::Set(d, kScaleMax));
}

// Which half a tile is: it decides which axis is normalized first and so when the token deviations
// are taken.
enum class Half { kKeys, kValues };

// From the moments of one block of tokens: their deviations, the next scale (into `next_scale`) and
// its weight. Keys are normalized along tokens first: the deviation belongs to the iterate that the
// old weight closes. Values are normalized along tokens last: it belongs to the iterate that the
// new weight makes.
template <Half kHalf>
HWY_INLINE void StepTokens(AxisState& token, float* next_scale, std::size_t first, float channels) {
  const Df d;
  for (std::size_t t = first; t < first + kBlockTokens; t += kLanes) {
    const Moments m = MomentsOf(hn::Load(d, token.sum + t), hn::Load(d, token.sum_squares + t),
                                hn::Load(d, token.pivot + t), channels);
    const Vf current = hn::Mul(m.deviation, hn::Load(d, token.weight + t));
    const Vf scale = NextScale(hn::Load(d, token.scale + t), current);
    const Vf weight = hn::Div(hn::Set(d, 1.0f), scale);
    hn::Store(m.mean, d, token.pivot + t);
    hn::Store(scale, d, next_scale + t);
    hn::Store(weight, d, token.weight + t);
    hn::Store(kHalf == Half::kKeys ? current : hn::Mul(m.deviation, weight), d,
              token.deviation + t);
  }
}

// From the channel sums of a whole pass: deviation of the current tile and the next pivot.
HWY_INLINE void CloseChannels(AxisState& channel, std::size_t channels, float tokens) {
  const Df d;
  for (std::size_t i = 0; i < channels; i += kLanes) {
    const Moments m = MomentsOf(hn::Load(d, channel.sum + i), hn::Load(d, channel.sum_squares + i),
                                hn::Load(d, channel.pivot + i), tokens);
    hn::Store(m.mean, d, channel.pivot + i);
    hn::Store(hn::Mul(m.deviation, hn::Load(d, channel.weight + i)), d, channel.deviation + i);
  }
}

// The channel step. Returns (sum of the new weights) / (sum of the old): how the means of the
// tokens move, roughly.
HWY_INLINE float StepChannels(AxisState& channel, std::size_t channels) {
  const Df d;
  Vf old_weights = hn::Zero(d);
  Vf new_weights = hn::Zero(d);
  for (std::size_t i = 0; i < channels; i += kLanes) {
    const Vf old_weight = hn::Load(d, channel.weight + i);
    const Vf deviation = hn::Load(d, channel.deviation + i);
    const Vf old_scale = hn::Load(d, channel.scale + i);
    const Vf scale = NextScale(old_scale, deviation);
    const Vf weight = hn::Div(hn::Set(d, 1.0f), scale);
    hn::Store(scale, d, channel.scale + i);
    hn::Store(weight, d, channel.weight + i);
    hn::Store(hn::Mul(hn::Mul(deviation, old_scale), weight), d, channel.deviation + i);
    old_weights = hn::Add(old_weights, old_weight);
    new_weights = hn::Add(new_weights, weight);
  }
  return hn::GetLane(hn::SumOfLanes(d, new_weights)) / hn::GetLane(hn::SumOfLanes(d, old_weights));
}

// Clears the sums for the next pass over the tile.
HWY_INLINE void OpenChannels(AxisState& channel, std::size_t channels) {
  Fill(channel.sum, 0.0f, channels);
  Fill(channel.sum_squares, 0.0f, channels);
}

// Moments of one block of tokens with the channel weights, and the token step.
template <std::size_t kDim, Half kHalf>
HWY_INLINE void PassTokens(EncodeWorkspace& ws, std::size_t first) {
  TokenMoments<kDim>(ws.tile + first * kDim, ws.channel.weight, ws.token.pivot + first,
                     ws.token.sum + first, ws.token.sum_squares + first);
  StepTokens<kHalf>(ws.token, ws.next_scale, first, static_cast<float>(kDim));
}

// One pass: token moments with the channel weights, the token step, channel moments with the new
// token weights. The token side runs one block ahead, so that the step's long chain of a division
// and a root is over when its weights are needed.
template <std::size_t kDim, Half kHalf>
HWY_NOINLINE void FusedPass(EncodeWorkspace& ws, std::size_t tokens) {
  OpenChannels(ws.channel, kDim);
  // The means of the channels move with the token weights; the first block shows how far.
  const float old_weights = Sum(ws.token.weight, kBlockTokens);
  PassTokens<kDim, kHalf>(ws, 0);
  MultiplyBy(ws.channel.pivot, Sum(ws.token.weight, kBlockTokens) / old_weights, kDim);
  for (std::size_t t = 0; t < tokens; t += kBlockTokens) {
    if (t + kBlockTokens < tokens) PassTokens<kDim, kHalf>(ws, t + kBlockTokens);
    AddChannelMoments<kDim>(ws.tile + t * kDim, ws.token.weight + t, ws.channel.pivot,
                            ws.channel.sum, ws.channel.sum_squares);
  }
  CloseChannels(ws.channel, kDim, static_cast<float>(tokens));
}

// The token half of FusedPass: closes the last iteration of keys.
template <std::size_t kDim>
HWY_NOINLINE void TokenPass(EncodeWorkspace& ws, std::size_t tokens) {
  for (std::size_t t = 0; t < tokens; t += kBlockTokens) PassTokens<kDim, Half::kKeys>(ws, t);
}

// Plain moments of one block of new rows: all weights are 1. The first block also chooses the
// pivots of the channels.
template <std::size_t kDim>
HWY_INLINE void AddPlainMoments(EncodeWorkspace& ws, std::size_t first) {
  const Df d;
  const float* rows = ws.tile + first * kDim;
  if (first == 0) {
    for (std::size_t i = 0; i < kDim; i += kLanes) {
      // By halves: the mean of equal values is exact.
      Vf sums[kBlockTokens];
      for (std::size_t t = 0; t < kBlockTokens; ++t) sums[t] = hn::Load(d, rows + t * kDim + i);
      for (std::size_t half = kBlockTokens / 2; half > 0; half /= 2) {
        for (std::size_t t = 0; t < half; ++t) sums[t] = hn::Add(sums[t], sums[t + half]);
      }
      hn::Store(hn::Mul(sums[0], hn::Set(d, 1.0f / kBlockTokens)), d, ws.channel.pivot + i);
    }
  }
  AddChannelMoments<kDim>(rows, ws.token.weight + first, ws.channel.pivot, ws.channel.sum,
                          ws.channel.sum_squares);
  // The mean of the first channels will do for a token: exact when all are equal, and within a
  // deviation or so when one of them is an outlier (channel 0 holds sqrt(kDim) times the mean of
  // what was rotated).
  for (std::size_t start = first; start < first + kBlockTokens; start += kLanes) {
    Vf quads[kLanes / 4];
    for (std::size_t quad = 0; quad < kLanes / 4; ++quad) {
      const float* row = ws.tile + (start + 4 * quad) * kDim;
      quads[quad] = ReduceBlocks4<AddOp>(hn::Load(d, row), hn::Load(d, row + kDim),
                                         hn::Load(d, row + 2 * kDim), hn::Load(d, row + 3 * kDim));
    }
    hn::Store(hn::Mul(ReduceQuads<AddOp>(quads), hn::Set(d, 1.0f / kLanes)), d,
              ws.token.pivot + start);
  }
  TokenMoments<kDim>(rows, ws.channel.weight, ws.token.pivot + first, ws.token.sum + first,
                     ws.token.sum_squares + first);
}

template <std::size_t kDim>
HWY_INLINE void OpenTile(EncodeWorkspace& ws, std::size_t tokens) {
  for (AxisState* axis : {&ws.channel, &ws.token}) {
    const std::size_t count = axis == &ws.channel ? kDim : tokens;
    Fill(axis->scale, 1.0f, count);
    Fill(axis->weight, 1.0f, count);
    Fill(axis->best_scale, 1.0f, count);
  }
  OpenChannels(ws.channel, kDim);
}

// Keeps the current iterate when it is no worse than the best one: a tie takes the later.
HWY_INLINE void KeepIfBest(EncodeWorkspace& ws, float imbalance, std::size_t channels,
                           std::size_t tokens, float& best) {
  if (!(imbalance <= best)) return;
  best = imbalance;
  Copy(ws.channel.scale, ws.channel.best_scale, channels);
  Copy(ws.token.scale, ws.token.best_scale, tokens);
}

// The whole normalization, after AddPlainMoments on every block: fills best_scale of both axes.
template <std::size_t kDim, Half kHalf>
HWY_NOINLINE void Normalize(EncodeWorkspace& ws, std::size_t tokens) {
  CloseChannels(ws.channel, kDim, static_cast<float>(tokens));
  for (std::size_t t = 0; t < tokens; t += kBlockTokens) {
    StepTokens<Half::kKeys>(ws.token, ws.next_scale, t, static_cast<float>(kDim));
  }
  // All scales are still 1, so the deviations are the tile's own.
  float best = Spread(ws.channel.deviation, kDim) + Spread(ws.token.deviation, tokens);

  if constexpr (kHalf == Half::kKeys) {
    // The first token step was just made; its channel moments need a pass of their own.
    Copy(ws.next_scale, ws.token.scale, tokens);
    MultiplyBy(ws.channel.pivot, Sum(ws.token.weight, tokens) / static_cast<float>(tokens), kDim);
    OpenChannels(ws.channel, kDim);
    for (std::size_t t = 0; t < tokens; t += kBlockTokens) {
      AddChannelMoments<kDim>(ws.tile + t * kDim, ws.token.weight + t, ws.channel.pivot,
                              ws.channel.sum, ws.channel.sum_squares);
    }
    CloseChannels(ws.channel, kDim, static_cast<float>(tokens));
    for (int iteration = 0; iteration < kNormalizeIterations; ++iteration) {
      MultiplyBy(ws.token.pivot, StepChannels(ws.channel, kDim), tokens);
      const float channel_spread = Spread(ws.channel.deviation, kDim);
      // Closes this iterate and, but for the last, makes the token step and the channel moments of
      // the next: the weights move on, token.scale stays.
      if (iteration + 1 < kNormalizeIterations) {
        FusedPass<kDim, Half::kKeys>(ws, tokens);
      } else {
        TokenPass<kDim>(ws, tokens);
      }
      KeepIfBest(ws, channel_spread + Spread(ws.token.deviation, tokens), kDim, tokens, best);
      Copy(ws.next_scale, ws.token.scale, tokens);
    }
  } else {
    Fill(ws.token.weight, 1.0f, tokens);  // Undo the step: values begin with the channels.
    for (int iteration = 0; iteration < kNormalizeIterations; ++iteration) {
      MultiplyBy(ws.token.pivot, StepChannels(ws.channel, kDim), tokens);
      FusedPass<kDim, Half::kValues>(ws, tokens);
      Copy(ws.next_scale, ws.token.scale, tokens);
      KeepIfBest(ws, Spread(ws.channel.deviation, kDim) + Spread(ws.token.deviation, tokens), kDim,
                 tokens, best);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_NORMALIZE_INL_H_
