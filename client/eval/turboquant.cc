#include "client/eval/turboquant.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "client/eval/random.h"
#include "kernels/dense.h"

namespace kvmill::eval {
namespace {

constexpr std::size_t kCells = 1 << 15;  // Of the integration over [-1, 1].
constexpr std::uint64_t kRotationSeed = 20250428;

// Mass, first and second moment of f from -1 to the right edge of each cell (midpoint rule), and
// the means of pieces between any two points, linear within a cell.
class SphereDensity {
 public:
  explicit SphereDensity(std::uint32_t dim) : mass_(kCells + 1), first_(kCells + 1) {
    // The constant in front cancels in means; it is taken from the sum.
    const double exponent = (static_cast<double>(dim) - 3) / 2;
    for (std::size_t i = 0; i < kCells; ++i) {
      const double x = Middle(i);
      const double f = std::exp(exponent * std::log1p(-x * x));
      mass_[i + 1] = mass_[i] + f;
      first_[i + 1] = first_[i] + f * x;
    }
  }

  static double Middle(std::size_t cell) {
    return (static_cast<double>(cell) + 0.5) * 2 / static_cast<double>(kCells) - 1;
  }
  double Weight(std::size_t cell) const { return (mass_[cell + 1] - mass_[cell]) / mass_.back(); }

  // Mean of x between two points; their middle when there is no mass.
  double Mean(double from, double to) const {
    const double mass = At(mass_, to) - At(mass_, from);
    return mass > 0 ? (At(first_, to) - At(first_, from)) / mass : (from + to) / 2;
  }
  // The point with `share` of the mass below it.
  double Quantile(double share) const {
    const auto cell = std::lower_bound(mass_.begin(), mass_.end(), share * mass_.back());
    return static_cast<double>(cell - mass_.begin()) * 2 / static_cast<double>(kCells) - 1;
  }

 private:
  static double At(const std::vector<double>& sums, double x) {
    const double at = std::clamp((x + 1) / 2, 0.0, 1.0) * static_cast<double>(kCells);
    const std::size_t cell = std::min(static_cast<std::size_t>(at), kCells - 1);
    return sums[cell] + (at - static_cast<double>(cell)) * (sums[cell + 1] - sums[cell]);
  }

  std::vector<double> mass_, first_;
};

class TurboQuant : public Quantizer {
 public:
  TurboQuant(std::uint32_t key_bits, std::uint32_t value_bits, std::uint32_t head_dim)
      : bits_{key_bits, value_bits},
        codebooks_{SphereCodebook(head_dim, key_bits), SphereCodebook(head_dim, value_bits)},
        rotation_(RandomOrthogonal(head_dim, kRotationSeed)),
        transposed_(rotation_.size()) {
    for (std::size_t r = 0; r < head_dim; ++r) {
      for (std::size_t d = 0; d < head_dim; ++d) {
        transposed_[d * head_dim + r] = rotation_[r * head_dim + d];
      }
    }
  }

  Decoded Quantize(Half half, const HeadValues& head) const override {
    const std::size_t dim = head.head_dim;
    const std::uint32_t bits = bits_[half == Half::kKey ? 0 : 1];
    const std::vector<double>& codebook = codebooks_[half == Half::kKey ? 0 : 1];
    Decoded out;
    out.values.assign(head.values.size(), 0.0f);
    out.bits = std::uint64_t{head.tokens} * (dim * bits + 16);
    // x P^T, coordinates; their nearest levels; and back, y P.
    std::vector<float> rotated(head.values.size());
    MultiplyCpu({head.values.data(), transposed_.data(), rotated.data(), head.tokens, dim, dim, dim,
                 dim, dim});
    for (std::size_t t = 0; t < head.tokens; ++t) {
      const float* x = head.values.data() + t * dim;
      float* coordinates = rotated.data() + t * dim;
      double squares = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        squares += static_cast<double>(x[d]) * static_cast<double>(x[d]);
      }
      const double norm = std::sqrt(squares);
      // A norm beyond fp16 can only come of a vector that is near its limits in many channels.
      const float stored =
          Float16ToFloat(FloatToFloat16(std::min(static_cast<float>(norm), 65504.0f)));
      if (norm == 0) continue;  // The coordinates are zeros, too.
      for (std::size_t r = 0; r < dim; ++r) {
        const double unit = static_cast<double>(coordinates[r]) / norm;
        const auto above = std::lower_bound(codebook.begin(), codebook.end(), unit);
        auto best = above == codebook.end() ? above - 1 : above;
        if (best != codebook.begin() && unit - *(best - 1) < *best - unit) --best;
        coordinates[r] = static_cast<float>(*best) * stored;
      }
    }
    MultiplyCpu({rotated.data(), rotation_.data(), out.values.data(), head.tokens, dim, dim, dim,
                 dim, dim});
    return out;
  }

 private:
  const std::uint32_t bits_[2];
  const std::vector<double> codebooks_[2];
  const std::vector<float> rotation_;
  std::vector<float> transposed_;
};

}  // namespace

std::vector<double> SphereCodebook(std::uint32_t dim, std::uint32_t bits) {
  const SphereDensity density(dim);
  const std::size_t count = std::size_t{1} << bits;
  std::vector<double> codebook(count);
  for (std::size_t i = 0; i < count; ++i) {
    codebook[i] = density.Quantile((static_cast<double>(i) + 0.5) / static_cast<double>(count));
  }
  for (int iteration = 0; iteration < 10000; ++iteration) {
    double moved = 0;
    double from = -1;
    std::vector<double> next(count);
    for (std::size_t i = 0; i < count; ++i) {
      const double to = i + 1 < count ? (codebook[i] + codebook[i + 1]) / 2 : 1.0;
      next[i] = density.Mean(from, to);
      moved = std::max(moved, std::abs(next[i] - codebook[i]));
      from = to;
    }
    codebook = next;
    if (moved < 1e-12) break;
  }
  return codebook;
}

double SphereDistortion(std::uint32_t dim, const std::vector<double>& codebook) {
  const SphereDensity density(dim);
  double distortion = 0;
  for (std::size_t i = 0; i < kCells; ++i) {
    const double x = SphereDensity::Middle(i);
    double nearest = 4;
    for (const double entry : codebook) nearest = std::min(nearest, (x - entry) * (x - entry));
    distortion += density.Weight(i) * nearest;
  }
  return distortion;
}

std::vector<float> RandomOrthogonal(std::uint32_t dim, std::uint64_t seed) {
  Random random(seed);
  std::vector<double> rows(std::size_t{dim} * dim);
  for (double& x : rows) x = random.Gaussian();
  for (std::size_t r = 0; r < dim; ++r) {
    double* row = rows.data() + r * dim;
    // Twice, because one pass of Gram-Schmidt leaves rounding behind.
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t other = 0; other < r; ++other) {
        const double* done = rows.data() + other * dim;
        double dot = 0;
        for (std::size_t d = 0; d < dim; ++d) dot += row[d] * done[d];
        for (std::size_t d = 0; d < dim; ++d) row[d] -= dot * done[d];
      }
    }
    double squares = 0;
    for (std::size_t d = 0; d < dim; ++d) squares += row[d] * row[d];
    for (std::size_t d = 0; d < dim; ++d) row[d] /= std::sqrt(squares);
  }
  return {rows.begin(), rows.end()};
}

std::unique_ptr<Quantizer> MakeTurboQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                          std::uint32_t head_dim) {
  return std::make_unique<TurboQuant>(key_bits, value_bits, head_dim);
}

}  // namespace kvmill::eval
