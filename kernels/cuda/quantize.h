// Quantization, absorbed scales and packing of a half of a tile in registers, and the rule of what
// a tile cannot hold: as kernels/cpu/quantize-inl.h, divided and rounded the same way.
//
// Rows are what a scale and a zero belong to: channels of keys, tokens of values. "Across" is the
// other axis, which T scales.
#ifndef KVMILL_KERNELS_CUDA_QUANTIZE_H_
#define KVMILL_KERNELS_CUDA_QUANTIZE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/normalize.h"
#include "kernels/cuda/tile_registers.h"
#include "kernels/encode.h"

namespace kvmill {
namespace device {

// The first value that rounds to infinity in fp16.
constexpr float kHalfOverflow = 65520.0f;

// The sections of one half in a record, aligned to 16 bytes.
struct HalfRecord {
  std::byte* codes;
  std::uint16_t* scale;   // S
  std::uint16_t* zero;    // Z
  std::uint16_t* across;  // T
};

template <typename Shape>
struct QuantizeShared {
  static constexpr int kAxisMax = Shape::kDim > Shape::kGroup ? Shape::kDim : Shape::kGroup;

  // Arrays over channels are indexed by Slot().
  float across[kAxisMax];          // The kept scales s across,
  float across_inverse[kAxisMax];  // and 1 / s.
  // Of the rows: the same, then the smallest value, the step and its inverse, S and Z.
  float row[kAxisMax];
  float row_inverse[kAxisMax];
  float low[kAxisMax];
  float step[kAxisMax];
  float step_inverse[kAxisMax];
  float scale[kAxisMax];
  float zero[kAxisMax];
  // Extremes of each channel in the tokens of a warp.
  float warp_low[Shape::kWarps][Shape::kDim];
  float warp_high[Shape::kWarps][Shape::kDim];
  // How far fp16 scales move the decoded values, and these values: sums of squares by warp.
  float moved[Shape::kWarps];
  float values[Shape::kWarps];
};

template <typename Shape, Half kHalf>
class Quantizer {
 public:
  using Place = TilePlace<Shape>;
  static constexpr bool kKeys = kHalf == Half::kKeys;

  // `unit` brings the largest value near 1, so that squares neither overflow nor vanish.
  KVMILL_DEVICE Quantizer(QuantizeShared<Shape>& shared, const Place& place, int bits, float unit,
                          const HalfRecord& out)
      : s_(shared), place_(place), bits_(bits), unit_(unit), out_(out) {}

  // Every thread of the block must call it; `x` is divided on the way. The same answer for all
  // threads: whether the tile can hold the half. Ends with a barrier.
  KVMILL_DEVICE bool Run(Tile& x, const KeptScales& kept) {
    SyncThreads();  // The shared memory was the normalization's.
    const int own_token = Normalizer<Shape, kHalf>::OwnToken(place_);
    const bool writes_token = place_.column % (Shape::kColumns / 8) == 0;
    const int own_channel = static_cast<int>(ThreadIndex());
    const bool has_channel = own_channel < Shape::kDim;
    const int slot = Shape::Slot(own_channel);
    if (writes_token) WriteScale(!kKeys, kept.token, own_token, own_token);
    if (has_channel) WriteScale(kKeys, kept.channel, slot, own_channel);
    SyncThreads();

    DivideAcross(x);
    float low[8];
    float high[8];
    Extremes(x, low, high);
    if constexpr (kKeys) {
      CombineChannels<Shape>(low, Least());
      CombineChannels<Shape>(high, Greatest());
      constexpr int kKept = 8 / Shape::kWarpRows;
      const int first = place_.row % Shape::kWarpRows * kKept;
      const int warp = static_cast<int>(WarpIndex());
      KVMILL_UNROLL
      for (int r = 0; r < kKept; ++r) {
        s_.warp_low[warp][(first + r) * Shape::kColumns + place_.column] = low[r];
        s_.warp_high[warp][(first + r) * Shape::kColumns + place_.column] = high[r];
      }
      SyncThreads();
      if (has_channel) {
        float least = s_.warp_low[0][slot];
        float greatest = s_.warp_high[0][slot];
        for (int w = 1; w < Shape::kWarps; ++w) {
          least = Min(least, s_.warp_low[w][slot]);
          greatest = Max(greatest, s_.warp_high[w][slot]);
        }
        AbsorbRow(least, greatest, kept.channel, slot, own_channel);
      }
      SyncThreads();
    } else {
      CombineTokens<Shape>(low, place_.column, Least());
      CombineTokens<Shape>(high, place_.column, Greatest());
      if (writes_token) AbsorbRow(low[0], high[0], kept.token, own_token, own_token);
      SyncWarp();
    }
    Pack(x);
    return Fits();
  }

 private:
  // `index` of the shared arrays, `at` of the record's.
  KVMILL_DEVICE void WriteScale(bool of_row, float scale, int index, int at) {
    if (of_row) {
      s_.row[index] = scale;
      s_.row_inverse[index] = 1.0f / scale;
    } else {
      s_.across[index] = scale;
      s_.across_inverse[index] = 1.0f / scale;
      out_.across[at] = FloatToHalf(scale);
      overflow_ = overflow_ || !(scale < kHalfOverflow);
    }
  }

  // Where the shared arrays keep what belongs to the thread's row r, and to its value c across.
  KVMILL_DEVICE int RowIndex(int r) const {
    return kKeys ? r * Shape::kColumns + place_.column : place_.token + r;
  }
  KVMILL_DEVICE int AcrossIndex(int c) const {
    return kKeys ? place_.token + c : c * Shape::kColumns + place_.column;
  }
  KVMILL_DEVICE static float& At(Tile& x, int r, int c) { return kKeys ? x[c][r] : x[r][c]; }

  KVMILL_DEVICE void DivideAcross(Tile& x) {
    KVMILL_UNROLL
    for (int c = 0; c < 8; ++c) {
      const float scale = s_.across[AcrossIndex(c)];
      const float inverse = s_.across_inverse[AcrossIndex(c)];
      KVMILL_UNROLL
      for (int r = 0; r < 8; ++r) At(x, r, c) = Divide(At(x, r, c), scale, inverse);
    }
  }

  KVMILL_DEVICE void Extremes(Tile& x, float (&low)[8], float (&high)[8]) {
    KVMILL_UNROLL
    for (int r = 0; r < 8; ++r) {
      low[r] = high[r] = At(x, r, 0);
      KVMILL_UNROLL
      for (int c = 1; c < 8; ++c) {
        low[r] = Min(low[r], At(x, r, c));
        high[r] = Max(high[r], At(x, r, c));
      }
    }
  }

  // From the extremes of a row, divided by the scales across already. Division is monotonic: the
  // smallest quotient is that of the smallest value.
  KVMILL_DEVICE void AbsorbRow(float low, float high, float row, int index, int at) {
    const float inverse = 1.0f / row;
    low = Divide(low, row, inverse);
    high = Divide(high, row, inverse);
    const float step = Max((high - low) / static_cast<float>((1 << bits_) - 1), 1e-10f);
    const float scale = row * step;
    const float zero = row * low;
    s_.low[index] = low;
    s_.step[index] = step;
    s_.step_inverse[index] = 1.0f / step;
    s_.scale[index] = scale;
    s_.zero[index] = zero;
    out_.scale[at] = FloatToHalf(scale);
    out_.zero[at] = FloatToHalf(zero);
    overflow_ = overflow_ || !(scale < kHalfOverflow) || !(Max(zero, -zero) < kHalfOverflow);
  }

  // clamp(round_half_even((x / row - low) / step), 0, 2^bits - 1), eight codes a store; and the
  // sums that decide whether the fp16 vectors are exact enough.
  KVMILL_DEVICE void Pack(Tile& x) {
    float across[8];
    float stored_across[8];
    KVMILL_UNROLL
    for (int c = 0; c < 8; ++c) {
      const float scale = s_.across[AcrossIndex(c)];
      across[c] = scale * unit_;
      stored_across[c] = HalfToFloat(FloatToHalf(scale)) * unit_;
    }
    const int code_max = (1 << bits_) - 1;
    const int row_bytes = (kKeys ? Shape::kGroup : Shape::kDim) * bits_ / 8;
    std::byte* out = out_.codes + (kKeys ? place_.channel : place_.token) * row_bytes +
                     (kKeys ? place_.row : place_.column) * bits_;
    float moved = 0;
    float values = 0;
    KVMILL_UNROLL
    for (int r = 0; r < 8; ++r, out += row_bytes) {
      const int index = RowIndex(r);
      const float row = s_.row[index];
      const float row_inverse = s_.row_inverse[index];
      const float low = s_.low[index];
      const float step = s_.step[index];
      const float step_inverse = s_.step_inverse[index];
      const float scale = s_.scale[index];
      const float zero = s_.zero[index];
      const float stored_scale = HalfToFloat(FloatToHalf(scale));
      const float stored_zero = HalfToFloat(FloatToHalf(zero));
      std::uint32_t word = 0;
      KVMILL_UNROLL
      for (int c = 0; c < 8; ++c) {
        const float y = Divide(At(x, r, c), row, row_inverse);
        int q = RoundToInt(Divide(y - low, step, step_inverse));
        q = q < 0 ? 0 : (q > code_max ? code_max : q);
        word |= static_cast<std::uint32_t>(q) << (c * bits_);
        const float code = static_cast<float>(q);
        const float exact = Fma(code, scale, zero) * across[c];
        const float error = Fma(-Fma(code, stored_scale, stored_zero), stored_across[c], exact);
        moved = Fma(error, error, moved);
        values = Fma(exact, exact, values);
      }
      if (bits_ == 4) {
        *reinterpret_cast<std::uint32_t*>(out) = word;
      } else {
        *reinterpret_cast<std::uint16_t*>(out) = static_cast<std::uint16_t>(word);
      }
    }
    KVMILL_UNROLL
    for (int h = 1; h < 32; h *= 2) {
      moved += ShuffleXor(kAllLanes, moved, static_cast<unsigned>(h));
      values += ShuffleXor(kAllLanes, values, static_cast<unsigned>(h));
    }
    if (LaneIndex() == 0) {
      s_.moved[WarpIndex()] = moved;
      s_.values[WarpIndex()] = values;
    }
  }

  KVMILL_DEVICE bool Fits() const {
    const bool overflow = SyncThreadsOr(overflow_);
    float moved = 0;
    float values = 0;
    for (int w = 0; w < Shape::kWarps; ++w) {
      moved += s_.moved[w];
      values += s_.values[w];
    }
    constexpr float kLimit = kScaleRoundingErrorMax * kScaleRoundingErrorMax;
    return !overflow && moved <= kLimit * values;  // As a product, so that 0/0 counts as 0.
  }

  QuantizeShared<Shape>& s_;
  const Place& place_;
  const int bits_;
  const float unit_;
  const HalfRecord& out_;
  bool overflow_ = false;
};

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_QUANTIZE_H_
