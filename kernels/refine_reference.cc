// The oracle: kernels/refine.h, row by row. Never optimized.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/gather_reference.h"
#include "kernels/hadamard.h"
#include "kernels/packed_codes.h"
#include "kernels/refine.h"
#include "kernels/refine_row.h"

namespace kvmill {
namespace {

constexpr std::size_t kAxisMax = kHeadDimMax;  // The longer of the two axes of a tile.
static_assert(kGroupMax <= kAxisMax);

// One half of a tile and its parts of the record.
struct Half {
  const float* tile;          // Rotated; value c of row r lies at r * row_stride + c * stride.
  std::size_t rows, columns;  // K: channels, tokens. V: tokens, channels.
  std::size_t row_stride, stride;
  std::uint32_t bits;
  std::byte* codes;         // [rows][columns * bits / 8]
  std::byte* scale;         // S[rows], fp16.
  std::byte* zero;          // Z[rows], fp16.
  const std::byte* across;  // T[columns], fp16.

  float Value(std::size_t r, std::size_t c) const { return tile[r * row_stride + c * stride]; }
};

// The nearest codes of a row, and what they and the sums are worth. Returns the sum of squared
// errors.
double Recode(const Half& h, std::size_t r, const RowScale& row, float* codes, RowSums& sums) {
  const float scale = Float16ToFloat(row.scale), zero = Float16ToFloat(row.zero);
  const auto code_max = static_cast<float>((1u << h.bits) - 1u);
  double error = 0;
  sums = {};
  for (std::size_t c = 0; c < h.columns; ++c) {
    const float across = Float16At(h.across, c), x = h.Value(r, c);
    const float steps = scale == 0 ? 0 : std::nearbyint((x / across - zero) / scale);
    codes[c] = std::min(std::max(steps, 0.0f), code_max);
    const auto t = static_cast<double>(across), value = static_cast<double>(x),
               q = static_cast<double>(codes[c]);
    const double moved = (q * static_cast<double>(scale) + static_cast<double>(zero)) * t - value;
    error += moved * moved;
    sums.w += t * t;
    sums.wq += t * t * q;
    sums.wqq += t * t * q * q;
    sums.wx += t * value;
    sums.wqx += t * value * q;
  }
  return error;
}

void RefineHalf(const Half& h) {
  const std::size_t row_bytes = h.columns * h.bits / 8;
  float codes[kAxisMax];
  RowSums sums;
  for (std::size_t r = 0; r < h.rows; ++r) {
    const RowScale encoded{Float16BitsAt(h.scale, r), Float16BitsAt(h.zero, r)};
    RowScale row = encoded;
    const double before = Recode(h, r, row, codes, sums);
    FitRow(sums, row);
    const double after = Recode(h, r, row, codes, sums);
    if (after < before) {
      FitRow(sums, row);
    } else {
      row = encoded;
    }
    Recode(h, r, row, codes, sums);
    PutFloat16(h.scale, r, row.scale);
    PutFloat16(h.zero, r, row.zero);
    std::memset(h.codes + r * row_bytes, 0, row_bytes);
    for (std::size_t c = 0; c < h.columns; ++c) {
      PutCode(h.codes + r * row_bytes, c, h.bits, static_cast<std::uint32_t>(codes[c]));
    }
  }
}

}  // namespace

void RefineTilesReference(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                          absl::Span<const EncodeResult> results, absl::Span<std::byte> scratch) {
  auto* const tile = reinterpret_cast<float*>(scratch.data());
  const RecordLayout at = LayoutOf(format);
  const std::size_t group = format.group, dim = format.head_dim;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (results[i] != EncodeResult::kTile) continue;
    std::byte* const record = tiles[i].record;
    GatherReference(tiles[i].k, format.group, format.head_dim, frame, tile);
    RefineHalf({tile, dim, group, 1, dim, format.key_bits, record + at.k_codes, record + at.k_scale,
                record + at.k_zero, record + at.k_token});
    GatherReference(tiles[i].v, format.group, format.head_dim, frame, tile);
    RefineHalf({tile, group, dim, dim, 1, format.value_bits, record + at.v_codes,
                record + at.v_scale, record + at.v_zero, record + at.v_channel});
  }
}

}  // namespace kvmill
