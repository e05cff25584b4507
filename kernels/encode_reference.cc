// The oracle: one obvious loop per sentence of docs/formats.md, "Algorithm". Never optimized.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/encode.h"
#include "kernels/gather_reference.h"
#include "kernels/hadamard.h"
#include "kernels/packed_codes.h"
#include "kernels/refine.h"
#include "kernels/refine_reference.h"

namespace kvmill {
namespace {

constexpr std::size_t kAxisMax = kHeadDimMax;  // The longer of the two axes of a tile.
static_assert(kGroupMax <= kAxisMax);

// One half of a tile, K or V, as the algorithm sees it: [rows, cols], codes packed along the
// columns.
struct Half {
  float* tile;       // [rows, cols], rotated.
  float* current;    // [rows, cols], scratch.
  std::size_t rows;  // K: channels. V: tokens.
  std::size_t cols;  // K: tokens. V: channels.
  std::uint32_t bits;
  std::byte* codes;   // [rows, cols * bits / 8].
  std::byte* scale;   // S[rows], fp16.
  std::byte* zero;    // Z[rows], fp16.
  std::byte* across;  // T[cols], fp16.
};

float Clip(float x, float low, float high) { return std::min(std::max(x, low), high); }

// Sample standard deviation (ddof = 1) of `count` values that lie `stride` apart.
float StandardDeviation(const float* x, std::size_t count, std::size_t stride) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(x[i * stride]);
  const double mean = sum / static_cast<double>(count);
  double squares = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double delta = static_cast<double>(x[i * stride]) - mean;
    squares += delta * delta;
  }
  return static_cast<float>(std::sqrt(squares / static_cast<double>(count - 1)));
}

void ColumnDeviations(const Half& h, const float* x, float* deviations) {
  for (std::size_t c = 0; c < h.cols; ++c) deviations[c] = StandardDeviation(x + c, h.rows, h.cols);
}

void RowDeviations(const Half& h, const float* x, float* deviations) {
  for (std::size_t r = 0; r < h.rows; ++r) {
    deviations[r] = StandardDeviation(x + r * h.cols, h.cols, 1);
  }
}

float Spread(const float* deviations, std::size_t count) {
  const float largest = *std::max_element(deviations, deviations + count);
  const float smallest = *std::min_element(deviations, deviations + count);
  return largest / std::max(smallest, 1e-8f);
}

float Imbalance(const Half& h, const float* x) {
  float columns[kAxisMax];
  float rows[kAxisMax];
  ColumnDeviations(h, x, columns);
  RowDeviations(h, x, rows);
  return Spread(columns, h.cols) + Spread(rows, h.rows);
}

void AccumulateLog(const float* deviations, std::size_t count, float* log_scale) {
  for (std::size_t i = 0; i < count; ++i) {
    log_scale[i] = Clip(log_scale[i] + std::log(Clip(deviations[i], 1e-3f, 1e3f)), -0.3f, 10.0f);
  }
}

void Rescale(const Half& h, const float* log_col, const float* log_row) {
  for (std::size_t r = 0; r < h.rows; ++r) {
    for (std::size_t c = 0; c < h.cols; ++c) {
      const std::size_t i = r * h.cols + c;
      h.current[i] = h.tile[i] / std::exp(log_col[c]) / std::exp(log_row[r]);
    }
  }
}

void VarianceNormalize(const Half& h, float* s_col, float* s_row) {
  float log_col[kAxisMax] = {};
  float log_row[kAxisMax] = {};
  float deviations[kAxisMax];
  std::fill_n(s_col, h.cols, 1.0f);
  std::fill_n(s_row, h.rows, 1.0f);
  std::copy_n(h.tile, h.rows * h.cols, h.current);
  float best = Imbalance(h, h.tile);
  for (int iteration = 0; iteration < kNormalizeIterations; ++iteration) {
    ColumnDeviations(h, h.current, deviations);
    AccumulateLog(deviations, h.cols, log_col);
    Rescale(h, log_col, log_row);
    RowDeviations(h, h.current, deviations);
    AccumulateLog(deviations, h.rows, log_row);
    Rescale(h, log_col, log_row);
    const float imbalance = Imbalance(h, h.current);
    if (imbalance <= best) {  // A tie takes the later iterate.
      best = imbalance;
      for (std::size_t c = 0; c < h.cols; ++c) s_col[c] = std::exp(log_col[c]);
      for (std::size_t r = 0; r < h.rows; ++r) s_row[r] = std::exp(log_row[r]);
    }
  }
}

// False if the half must stay raw: a vector is not finite in fp16, or rounding the vectors to fp16
// moves the decoded values too far.
bool EncodeHalf(const Half& h, Algorithm algorithm) {
  float s_col[kAxisMax];
  float s_row[kAxisMax];
  VarianceNormalize(h, s_col, s_row);

  const std::uint32_t code_max = (1u << h.bits) - 1u;
  bool finite = true;
  double error_squares = 0;
  double value_squares = 0;
  const std::size_t row_bytes = h.cols * h.bits / 8;
  std::memset(h.codes, 0, h.rows * row_bytes);
  for (std::size_t c = 0; c < h.cols; ++c) {
    const std::uint16_t across = FloatToFloat16(s_col[c]);
    finite = finite && std::isfinite(Float16ToFloat(across));
    PutFloat16(h.across, c, across);
  }
  for (std::size_t r = 0; r < h.rows; ++r) {
    float balanced[kAxisMax];
    for (std::size_t c = 0; c < h.cols; ++c) {
      balanced[c] = h.tile[r * h.cols + c] / s_col[c] / s_row[r];
    }
    const float low = *std::min_element(balanced, balanced + h.cols);
    const float high = *std::max_element(balanced, balanced + h.cols);
    const float scale = std::max((high - low) / static_cast<float>(code_max), 1e-10f);
    const float row_scale = s_row[r] * scale;  // S and Z in fp32.
    const float row_zero = s_row[r] * low;
    PutFloat16(h.scale, r, FloatToFloat16(row_scale));
    PutFloat16(h.zero, r, FloatToFloat16(row_zero));
    const float stored_scale = Float16At(h.scale, r);
    const float stored_zero = Float16At(h.zero, r);
    finite = finite && std::isfinite(stored_scale) && std::isfinite(stored_zero);
    if (!finite) return false;  // Before codes: they may be NaN.
    float codes[kAxisMax];
    for (std::size_t c = 0; c < h.cols; ++c) {
      const float q =
          Clip(std::nearbyint((balanced[c] - low) / scale), 0.0f, static_cast<float>(code_max));
      codes[c] = q;
      const float exact = (q * row_scale + row_zero) * s_col[c];
      const float stored = (q * stored_scale + stored_zero) * Float16At(h.across, c);
      const double error = static_cast<double>(stored) - static_cast<double>(exact);
      error_squares += error * error;
      value_squares += static_cast<double>(exact) * static_cast<double>(exact);
    }
    if (algorithm == Algorithm::kRefined) {
      RefineRow row{h.tile + r * h.cols, s_col,   h.cols, static_cast<float>(code_max), codes,
                    row_scale,           row_zero};
      RefineRowReference(row);
      PutFloat16(h.scale, r, FloatToFloat16(row.scale));
      PutFloat16(h.zero, r, FloatToFloat16(row.zero));
    }
    for (std::size_t c = 0; c < h.cols; ++c) {
      PutCode(h.codes + r * row_bytes, c, h.bits, h.cols, static_cast<std::uint32_t>(codes[c]));
    }
  }
  // As a product, so that 0/0 counts as 0.
  const double limit = static_cast<double>(kScaleRoundingErrorMax);
  return error_squares <= limit * limit * value_squares;
}

EncodeResult EncodeTile(const TileFormat& format, Frame frame, const EncodeArgs& args,
                        Algorithm algorithm, float* scratch) {
  const RecordLayout layout = LayoutOf(format);
  const std::size_t group = format.group;
  const std::size_t dim = format.head_dim;
  float* tile = scratch;
  float* other = scratch + group * dim;

  // Both halves are looked at before anything is decided: non-finite input wins over raw.
  if (!GatherReference(args.v, format.group, format.head_dim, frame, tile))
    return EncodeResult::kNonFinite;
  if (!GatherReference(args.k, format.group, format.head_dim, frame, other))
    return EncodeResult::kNonFinite;
  for (std::size_t t = 0; t < group; ++t) {
    for (std::size_t d = 0; d < dim; ++d) tile[d * group + t] = other[t * dim + d];
  }
  const Half k{tile,
               other,
               dim,
               group,
               format.key_bits,
               args.record + layout.k_codes,
               args.record + layout.k_scale,
               args.record + layout.k_zero,
               args.record + layout.k_token};
  if (!EncodeHalf(k, algorithm)) return EncodeResult::kRaw;

  GatherReference(args.v, format.group, format.head_dim, frame, tile);
  const Half v{tile,
               other,
               group,
               dim,
               format.value_bits,
               args.record + layout.v_codes,
               args.record + layout.v_scale,
               args.record + layout.v_zero,
               args.record + layout.v_channel};
  return EncodeHalf(v, algorithm) ? EncodeResult::kTile : EncodeResult::kRaw;
}

void EncodeTiles(const TileFormat& format, Frame frame, Algorithm algorithm,
                 absl::Span<const EncodeArgs> tiles, absl::Span<EncodeResult> results,
                 absl::Span<std::byte> scratch) {
  auto* floats = reinterpret_cast<float*>(scratch.data());
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    results[i] = EncodeTile(format, frame, tiles[i], algorithm, floats);
  }
}

}  // namespace

void EncodeTilesReference(const TileFormat& format, Frame frame, absl::Span<const EncodeArgs> tiles,
                          absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeTiles(format, frame, Algorithm::kKvarn, tiles, results, scratch);
}

void EncodeRefinedTilesReference(const TileFormat& format, Frame frame,
                                 absl::Span<const EncodeArgs> tiles,
                                 absl::Span<EncodeResult> results, absl::Span<std::byte> scratch) {
  EncodeTiles(format, frame, Algorithm::kRefined, tiles, results, scratch);
}

NonFinite FindNonFinite(const HeadPages& k, const HeadPages& v, std::uint32_t token_count,
                        std::uint32_t head_dim) {
  for (std::uint32_t t = 0; t < token_count; ++t) {
    for (const HeadPages* pages : {&k, &v}) {
      const std::byte* row = pages->Row(t);
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        std::uint16_t bits;
        std::memcpy(&bits, row + static_cast<std::ptrdiff_t>(d) * pages->channel_stride_bytes,
                    sizeof(bits));
        if (!std::isfinite(ToFloat(bits, pages->dtype))) return {true, pages == &v, t, d};
      }
    }
  }
  return {};
}

}  // namespace kvmill
