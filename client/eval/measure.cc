#include "client/eval/measure.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "client/eval/random.h"
#include "client/eval/statistics.h"

namespace kvmill::eval {
namespace {

double Ratio(double squares, double of_squares) {
  return squares == 0 ? 0 : std::sqrt(squares / of_squares);
}

}  // namespace

HalfError MeasureHalf(const HeadValues& before, absl::Span<const float> after) {
  const std::size_t dim = before.head_dim;
  double all = 0, error = 0, magnitude = 0, direction = 0;
  std::vector<double> tokens;
  for (std::size_t t = 0; t < before.tokens; ++t) {
    const float* x = before.values.data() + t * dim;
    const float* y = after.data() + t * dim;
    double xx = 0, yy = 0, dd = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const auto a = static_cast<double>(x[d]), b = static_cast<double>(y[d]);
      xx += a * a;
      yy += b * b;
      dd += (b - a) * (b - a);
    }
    // E_M = stretch * x.
    const double stretch = xx == 0 ? 0 : std::sqrt(yy / xx) - 1;
    double rest = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      const auto a = static_cast<double>(x[d]), b = static_cast<double>(y[d]);
      const double delta = b - a - stretch * a;
      rest += delta * delta;
    }
    all += xx;
    error += dd;
    magnitude += stretch * stretch * xx;
    direction += rest;
    tokens.push_back(Ratio(dd, xx));
  }
  std::sort(tokens.begin(), tokens.end());
  HalfError out;
  out.relative = Ratio(error, all);
  out.magnitude = Ratio(magnitude, all);
  out.direction = Ratio(direction, all);
  out.token_p50 = Quantile(tokens, 0.5);
  out.token_p95 = Quantile(tokens, 0.95);
  out.token_p99 = Quantile(tokens, 0.99);
  return out;
}

Queries SurrogateQueries(const HeadValues& keys, std::uint32_t count, std::uint64_t seed) {
  const std::size_t dim = keys.head_dim, tokens = keys.tokens;
  std::vector<double> mean(dim, 0), deviation(dim, 0);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < dim; ++d) mean[d] += static_cast<double>(keys.values[t * dim + d]);
  }
  for (double& m : mean) m /= static_cast<double>(tokens);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < dim; ++d) {
      const double delta = static_cast<double>(keys.values[t * dim + d]) - mean[d];
      deviation[d] += delta * delta;
    }
  }
  for (double& s : deviation) s = std::sqrt(s / static_cast<double>(tokens));
  Random random(seed);
  Queries queries;
  queries.token_ends.assign(count, keys.tokens);
  std::vector<double> q(dim);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::size_t token = random.Below(tokens);
    for (std::size_t d = 0; d < dim; ++d) {
      q[d] = static_cast<double>(keys.values[token * dim + d]) - mean[d] +
             deviation[d] * random.Gaussian();
    }
    double sum = 0, squares = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      double dot = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        dot += q[d] * (static_cast<double>(keys.values[t * dim + d]) - mean[d]);
      }
      dot /= std::sqrt(static_cast<double>(dim));
      sum += dot;
      squares += dot * dot;
    }
    const auto n = static_cast<double>(tokens);
    const double spread = std::sqrt(std::max(squares / n - sum / n * (sum / n), 0.0));
    // Keys that are all the same see nothing: the query stays as it is.
    const double length = spread > 0 ? kSurrogateSpread / spread : 1;
    for (const double x : q) queries.values.push_back(static_cast<float>(x * length));
  }
  return queries;
}

std::vector<double> Attend(const Queries& queries, absl::Span<const float> keys,
                           absl::Span<const float> values, std::uint32_t head_dim) {
  const std::size_t dim = head_dim, tokens = keys.size() / dim;
  std::vector<float> by_channel(keys.size());  // [head_dim][tokens]: sums run over tokens at once.
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < dim; ++d) by_channel[d * tokens + t] = keys[t * dim + d];
  }
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  std::vector<double> outputs(queries.values.size(), 0);
  std::vector<double> scores(tokens);
  for (std::size_t i = 0; i < queries.token_ends.size(); ++i) {
    const std::size_t end = queries.token_ends[i];
    std::fill(scores.begin(), scores.end(), 0);
    for (std::size_t d = 0; d < dim; ++d) {
      const double q = static_cast<double>(queries.values[i * dim + d]) * scale;
      const float* channel = by_channel.data() + d * tokens;
      for (std::size_t t = 0; t < end; ++t) scores[t] += q * static_cast<double>(channel[t]);
    }
    const double most =
        *std::max_element(scores.begin(), scores.begin() + static_cast<std::ptrdiff_t>(end));
    double sum = 0;
    double* output = outputs.data() + i * dim;
    for (std::size_t t = 0; t < end; ++t) {
      const double p = std::exp(scores[t] - most);
      sum += p;
      const float* v = values.data() + t * dim;
      for (std::size_t d = 0; d < dim; ++d) output[d] += p * static_cast<double>(v[d]);
    }
    for (std::size_t d = 0; d < dim; ++d) output[d] /= sum;
  }
  return outputs;
}

double OutputError(absl::Span<const double> before, absl::Span<const double> after) {
  double error = 0, all = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    error += (after[i] - before[i]) * (after[i] - before[i]);
    all += before[i] * before[i];
  }
  return Ratio(error, all);
}

}  // namespace kvmill::eval
