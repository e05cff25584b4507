// KVarN in obvious loops, with switches. The arithmetic is that of kernels/encode_reference.cc,
// operation by operation, because its bits are what tests compare.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "client/eval/kvarn.h"
#include "kernels/hadamard.h"

namespace kvmill::eval {
namespace {

struct Tile {
  std::size_t rows = 0, columns = 0;
  std::vector<float> values;  // [rows][columns].
};

float Clip(float x, float low, float high) { return std::min(std::max(x, low), high); }

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

std::vector<float> ColumnDeviations(const Tile& t) {
  std::vector<float> out(t.columns);
  for (std::size_t c = 0; c < t.columns; ++c) {
    out[c] = StandardDeviation(t.values.data() + c, t.rows, t.columns);
  }
  return out;
}

std::vector<float> RowDeviations(const Tile& t) {
  std::vector<float> out(t.rows);
  for (std::size_t r = 0; r < t.rows; ++r) {
    out[r] = StandardDeviation(t.values.data() + r * t.columns, t.columns, 1);
  }
  return out;
}

float AxisSpread(const std::vector<float>& deviations) {
  const auto [smallest, largest] = std::minmax_element(deviations.begin(), deviations.end());
  return *largest / std::max(*smallest, 1e-8f);
}

float Imbalance(const Tile& t) {
  const float columns = AxisSpread(ColumnDeviations(t));
  return columns + AxisSpread(RowDeviations(t));
}

void Accumulate(const std::vector<float>& deviations, float log_scale_min,
                std::vector<float>& log_scale) {
  for (std::size_t i = 0; i < deviations.size(); ++i) {
    log_scale[i] =
        Clip(log_scale[i] + std::log(Clip(deviations[i], 1e-3f, 1e3f)), log_scale_min, 10.0f);
  }
}

std::vector<float> Exp(const std::vector<float>& log_scale) {
  std::vector<float> out;
  for (const float x : log_scale) out.push_back(std::exp(x));
  return out;
}

void Rescale(const Tile& tile, const std::vector<float>& log_column,
             const std::vector<float>& log_row, Tile& current) {
  const std::vector<float> column = Exp(log_column), row = Exp(log_row);
  for (std::size_t r = 0; r < tile.rows; ++r) {
    for (std::size_t c = 0; c < tile.columns; ++c) {
      const std::size_t i = r * tile.columns + c;
      current.values[i] = tile.values[i] / column[c] / row[r];
    }
  }
}

void Normalize(const Tile& tile, bool column_axis, bool row_axis, int iterations,
               float log_scale_min, std::vector<float>& column_scale,
               std::vector<float>& row_scale) {
  std::vector<float> log_column(tile.columns, 0.0f), log_row(tile.rows, 0.0f);
  column_scale.assign(tile.columns, 1.0f);
  row_scale.assign(tile.rows, 1.0f);
  if (!column_axis && !row_axis) return;
  Tile current = tile;
  float best = iterations > 0 ? Imbalance(tile) : 0;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    if (column_axis) {
      Accumulate(ColumnDeviations(current), log_scale_min, log_column);
      Rescale(tile, log_column, log_row, current);
    }
    if (row_axis) {
      Accumulate(RowDeviations(current), log_scale_min, log_row);
      Rescale(tile, log_column, log_row, current);
    }
    const float imbalance = Imbalance(current);
    if (imbalance <= best) {  // A tie takes the later iterate.
      best = imbalance;
      column_scale = Exp(log_column);
      row_scale = Exp(log_row);
    }
  }
}

// How one row is stored: codes, and S and Z before they are rounded to fp16.
struct Row {
  std::vector<float> codes;
  float scale = 0, zero = 0;
};

// Refinements of one row. `target`: what code * S + Z should be; `weight`: T squared.
class RowSearch {
 public:
  RowSearch(const std::vector<float>& target, const std::vector<float>& weight, float code_max)
      : target_(target), weight_(weight), code_max_(code_max) {}

  double Error(const Row& row) const {
    const float scale = Stored(row.scale), zero = Stored(row.zero);
    double error = 0;
    for (std::size_t c = 0; c < target_.size(); ++c) {
      const double delta = static_cast<double>(row.codes[c] * scale + zero - target_[c]);
      error += static_cast<double>(weight_[c]) * delta * delta;
    }
    return error;
  }

  // The nearest codes for S and Z as they will be stored.
  void Recode(Row& row) const {
    const float scale = Stored(row.scale), zero = Stored(row.zero);
    row.codes.resize(target_.size());
    for (std::size_t c = 0; c < target_.size(); ++c) {
      row.codes[c] =
          scale == 0 ? 0 : Clip(std::nearbyint((target_[c] - zero) / scale), 0.0f, code_max_);
    }
  }

  // S and Z of least squares for the codes. Nothing when all codes are the same.
  void Refit(Row& row) const {
    double w = 0, wq = 0, wqq = 0, wy = 0, wqy = 0;
    for (std::size_t c = 0; c < target_.size(); ++c) {
      const auto weight = static_cast<double>(weight_[c]), q = static_cast<double>(row.codes[c]),
                 y = static_cast<double>(target_[c]);
      w += weight;
      wq += weight * q;
      wqq += weight * q * q;
      wy += weight * y;
      wqy += weight * q * y;
    }
    const double determinant = w * wqq - wq * wq;
    if (!(determinant > 1e-12 * w * wqq)) return;
    row.scale = static_cast<float>((w * wqy - wq * wy) / determinant);
    row.zero = static_cast<float>((wqq * wy - wq * wqy) / determinant);
  }

  // S and Z of the regression the other way round: of codes on values. Nothing when it is not
  // finite in fp16.
  void Stretch(Row& row) const {
    double w = 0, wq = 0, wy = 0;
    for (std::size_t c = 0; c < target_.size(); ++c) {
      const auto weight = static_cast<double>(weight_[c]);
      w += weight;
      wq += weight * static_cast<double>(row.codes[c]);
      wy += weight * static_cast<double>(target_[c]);
    }
    const double mean_q = wq / w, mean_y = wy / w;
    double square = 0, product = 0;
    for (std::size_t c = 0; c < target_.size(); ++c) {
      const double y = static_cast<double>(target_[c]) - mean_y;
      square += static_cast<double>(weight_[c]) * y * y;
      product += static_cast<double>(weight_[c]) * y * (static_cast<double>(row.codes[c]) - mean_q);
    }
    const auto scale = static_cast<float>(square / product);
    const auto zero = static_cast<float>(mean_y - square / product * mean_q);
    if (!(product > 0) || !std::isfinite(Stored(scale)) || !std::isfinite(Stored(zero))) return;
    row.scale = scale;
    row.zero = zero;
  }

  void Try(Row candidate, Row& best, double& error) const {
    if (!std::isfinite(Stored(candidate.scale)) || !std::isfinite(Stored(candidate.zero))) return;
    const double its = Error(candidate);
    if (its < error) {
      error = its;
      best = std::move(candidate);
    }
  }

  // The better of `row` and its fits.
  void RefitTwice(const Row& row, Row& best, double& error) const {
    Row fitted = row;
    for (int pass = 0; pass < 2; ++pass) {
      Refit(fitted);
      Try(fitted, best, error);
      Recode(fitted);
      Try(fitted, best, error);
    }
  }

  Row Improve(const Row& plain, bool clip, bool refit) const {
    Row best = plain;
    double error = Error(plain);
    if (refit) RefitTwice(plain, best, error);
    if (!clip) return best;
    const auto [low, high] = std::minmax_element(target_.begin(), target_.end());
    const float middle = (*low + *high) / 2, width = *high - *low;
    for (int step = 1; step <= 10; ++step) {
      const float kept = 1 - 0.05f * static_cast<float>(step);
      Row row;
      row.scale = width * kept / code_max_;
      row.zero = middle - width * kept / 2;
      Recode(row);
      Try(row, best, error);
      if (refit) RefitTwice(row, best, error);
    }
    return best;
  }

 private:
  static float Stored(float x) { return Float16ToFloat(FloatToFloat16(x)); }

  const std::vector<float>& target_;
  const std::vector<float>& weight_;
  const float code_max_;
};

}  // namespace

KvarnHalf EncodeKvarnHalf(Half half, absl::Span<const float> block, std::uint32_t tokens,
                          std::uint32_t head_dim, std::uint32_t bits, const KvarnOptions& options) {
  const bool key = half == Half::kKey;
  std::vector<float> rotated(block.begin(), block.end());
  if (options.rotate) RotateRowsReference(rotated.data(), tokens, head_dim);
  Tile tile{key ? head_dim : tokens, key ? tokens : head_dim, {}};
  tile.values.resize(rotated.size());
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < head_dim; ++d) {
      tile.values[key ? d * tokens + t : t * head_dim + d] = rotated[t * head_dim + d];
    }
  }
  std::vector<float> column_scale, row_scale;
  Normalize(tile, key ? options.token_axis : options.channel_axis,
            key ? options.channel_axis : options.token_axis, options.iterations,
            options.log_scale_min, column_scale, row_scale);

  KvarnHalf out;
  out.codes.resize(tile.values.size());
  const auto code_max = static_cast<float>((1u << bits) - 1u);
  const bool clip = key ? options.clip_keys : options.clip_values;
  const bool refit = options.refit || (key ? options.refit_keys : options.refit_values);
  bool finite = true;
  double error_squares = 0, value_squares = 0;
  std::vector<float> weight;
  for (const float scale : column_scale) {
    out.across.push_back(FloatToFloat16(scale));
    const float stored = Float16ToFloat(out.across.back());
    finite = finite && std::isfinite(stored);
    weight.push_back(stored * stored);
  }
  std::vector<float> balanced(tile.columns), target(tile.columns);
  for (std::size_t r = 0; r < tile.rows; ++r) {
    const float* values = tile.values.data() + r * tile.columns;
    for (std::size_t c = 0; c < tile.columns; ++c) {
      balanced[c] = values[c] / column_scale[c] / row_scale[r];
    }
    const auto [lowest, highest] = std::minmax_element(balanced.begin(), balanced.end());
    const float low = *lowest;
    const float scale = std::max((*highest - low) / code_max, 1e-10f);
    Row row{std::vector<float>(tile.columns), row_scale[r] * scale, row_scale[r] * low};
    for (std::size_t c = 0; c < tile.columns; ++c) {
      row.codes[c] = Clip(std::nearbyint((balanced[c] - low) / scale), 0.0f, code_max);
    }
    if ((clip || refit || options.stretch) && finite) {
      for (std::size_t c = 0; c < tile.columns; ++c) {
        target[c] = values[c] / Float16ToFloat(out.across[c]);
      }
      const RowSearch search(target, weight, code_max);
      row = search.Improve(row, clip, refit);
      if (options.stretch) search.Stretch(row);
    }
    out.scale.push_back(FloatToFloat16(row.scale));
    out.zero.push_back(FloatToFloat16(row.zero));
    const float stored_scale = Float16ToFloat(out.scale.back());
    const float stored_zero = Float16ToFloat(out.zero.back());
    if (!finite || !std::isfinite(stored_scale) || !std::isfinite(stored_zero)) {
      return {.raw = true};
    }
    for (std::size_t c = 0; c < tile.columns; ++c) {
      out.codes[r * tile.columns + c] = static_cast<std::uint8_t>(row.codes[c]);
      const float exact = (row.codes[c] * row.scale + row.zero) * column_scale[c];
      const float stored =
          (row.codes[c] * stored_scale + stored_zero) * Float16ToFloat(out.across[c]);
      const double error = static_cast<double>(stored) - static_cast<double>(exact);
      error_squares += error * error;
      value_squares += static_cast<double>(exact) * static_cast<double>(exact);
    }
  }
  const double limit = static_cast<double>(kScaleRoundingErrorMax);
  if (error_squares > limit * limit * value_squares) return {.raw = true};
  return out;
}

}  // namespace kvmill::eval
