// One half of a tile (K or V) in the registers of a block of threads, as encode and decode hold it.
//
// Threads form a grid of kRows x kColumns; the thread at (row, column) holds the 8x8 values of
// tokens 8*row .. 8*row+7 and channels 8*column .. 8*column+7. A row of threads lies in one warp,
// so that what is summed over channels needs no barrier. Eight codes of 4 bits are a word,
// whichever way the half is packed.
#ifndef KVMILL_KERNELS_CUDA_TILE_REGISTERS_H_
#define KVMILL_KERNELS_CUDA_TILE_REGISTERS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/engine_pages.h"

namespace kvmill {
namespace device {

template <int kDimOf, int kGroupOf>
struct TileShape {
  static constexpr int kDim = kDimOf;      // Channels.
  static constexpr int kGroup = kGroupOf;  // Tokens.
  static constexpr int kColumns = kDim / 8;
  static constexpr int kRows = kGroup / 8;
  static constexpr int kThreads = kColumns * kRows;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWarpRows = 32 / kColumns;
  static constexpr int kWarpTokens = 8 * kWarpRows;
  static_assert(kColumns <= 32 && kThreads >= kDim && kThreads >= kGroup);

  // Where shared arrays over channels keep channel 8*column + j: reads of one j by all columns fall
  // into different banks.
  KVMILL_DEVICE static int Slot(int channel) { return channel % 8 * kColumns + channel / 8; }
};

// Which part of the tile the calling thread holds.
template <typename Shape>
struct TilePlace {
  int row = static_cast<int>(ThreadIndex()) / Shape::kColumns;
  int column = static_cast<int>(ThreadIndex()) % Shape::kColumns;
  int token = 8 * row;
  int channel = 8 * column;
};

using Tile = float[8][8];  // [token][channel]

// Each token times H, the Sylvester matrix / sqrt(kDim): butterflies inside the thread, then across
// the columns.
template <typename Shape>
KVMILL_DEVICE void RotateTile(Tile& x) {
  constexpr float kNorm = Shape::kDim == 64    ? 0.125f
                          : Shape::kDim == 128 ? 0.088388347648318447f
                                               : 0.0625f;
  const unsigned lane = LaneIndex();
  KVMILL_UNROLL
  for (int i = 0; i < 8; ++i) {
    KVMILL_UNROLL
    for (int half = 1; half < 8; half *= 2) {
      KVMILL_UNROLL
      for (int j = 0; j < 8; ++j) {
        if ((j & half) != 0) continue;
        const float a = x[i][j];
        const float b = x[i][j + half];
        x[i][j] = a + b;
        x[i][j + half] = a - b;
      }
    }
    KVMILL_UNROLL
    for (int half = 1; half < Shape::kColumns; half *= 2) {
      // The second of a pair takes the difference: exact, and one instruction for both.
      const float sign = (lane & static_cast<unsigned>(half)) != 0 ? -1.0f : 1.0f;
      KVMILL_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float other = ShuffleXor(kAllLanes, x[i][j], static_cast<unsigned>(half));
        x[i][j] = Fma(x[i][j], sign, other);
      }
    }
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) x[i][j] *= kNorm;
  }
}

// The eight channels at `row`, `stride` bytes apart, of any alignment: in one load where they are
// adjacent and aligned, else by halves or by bytes.
KVMILL_DEVICE void LoadEight(const std::byte* row, std::ptrdiff_t stride,
                             std::uint16_t (&values)[8]) {
  const auto address = reinterpret_cast<std::uintptr_t>(row);
  if (stride == 2 && address % 16 == 0) {
    const Vector16 v = Load16(row);
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      values[j] = static_cast<std::uint16_t>(v.word[j / 2] >> (j % 2 * 16));
    }
  } else if (((address | static_cast<std::uintptr_t>(stride)) & 1u) == 0) {
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      values[j] = *reinterpret_cast<const std::uint16_t*>(row + j * stride);
    }
  } else {
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      const std::byte* const at = row + j * stride;
      values[j] = static_cast<std::uint16_t>(static_cast<unsigned>(at[0]) |
                                             static_cast<unsigned>(at[1]) << 8);
    }
  }
}

KVMILL_DEVICE void StoreEight(std::byte* row, std::ptrdiff_t stride,
                              const std::uint16_t (&values)[8]) {
  const auto address = reinterpret_cast<std::uintptr_t>(row);
  if (stride == 2 && address % 16 == 0) {
    Vector16 v;
    KVMILL_UNROLL
    for (int j = 0; j < 4; ++j) {
      v.word[j] = values[2 * j] | static_cast<std::uint32_t>(values[2 * j + 1]) << 16;
    }
    Store16(row, v);
  } else if (((address | static_cast<std::uintptr_t>(stride)) & 1u) == 0) {
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<std::uint16_t*>(row + j * stride) = values[j];
    }
  } else {
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      std::byte* const at = row + j * stride;
      at[0] = static_cast<std::byte>(values[j] & 0xFFu);
      at[1] = static_cast<std::byte>(values[j] >> 8);
    }
  }
}

// Where channel 0 of a token lies.
template <typename Byte>
KVMILL_DEVICE Byte* TokenRow(const BasicHeadPages<Byte>& pages, unsigned token) {
  const unsigned page = token / pages.page_tokens;
  return pages.pages[page] + pages.offset_bytes +
         static_cast<std::ptrdiff_t>(token - page * pages.page_tokens) * pages.token_stride_bytes;
}

// Reads the thread's part of the half. Returns the largest magnitude among it, as 16 bits: those of
// infinities and NaN are the largest.
template <typename Shape>
KVMILL_DEVICE unsigned GatherTile(const HeadPages& pages, const TilePlace<Shape>& place, Tile& x) {
  const bool fp16 = pages.dtype == DType::kFloat16;
  unsigned largest = 0;
  KVMILL_UNROLL
  for (int i = 0; i < 8; ++i) {
    std::uint16_t values[8];
    LoadEight(TokenRow(pages, static_cast<unsigned>(place.token + i)) +
                  place.channel * pages.channel_stride_bytes,
              pages.channel_stride_bytes, values);
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      const unsigned magnitude = values[j] & 0x7FFFu;
      largest = magnitude > largest ? magnitude : largest;
      x[i][j] = fp16 ? HalfToFloat(values[j]) : BFloat16ToFloat(values[j]);
    }
  }
  return largest;
}

template <typename Shape>
KVMILL_DEVICE void ScatterTile(const MutableHeadPages& pages, const TilePlace<Shape>& place,
                               const Tile& x) {
  const bool fp16 = pages.dtype == DType::kFloat16;
  KVMILL_UNROLL
  for (int i = 0; i < 8; ++i) {
    std::uint16_t values[8];
    KVMILL_UNROLL
    for (int j = 0; j < 8; ++j) {
      values[j] = fp16 ? FloatToHalf(x[i][j]) : FloatToBFloat16(x[i][j]);
    }
    StoreEight(TokenRow(pages, static_cast<unsigned>(place.token + i)) +
                   place.channel * pages.channel_stride_bytes,
               pages.channel_stride_bytes, values);
  }
}

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_TILE_REGISTERS_H_
