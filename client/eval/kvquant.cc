#include "client/eval/kvquant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace kvmill::eval {
namespace {

constexpr std::size_t kBins = 2048;  // Of the histogram that k-means runs on.

// One vector: where it lies, its range without outliers, and which elements those are.
struct Vector {
  std::size_t first = 0;   // Index of its first element.
  std::size_t stride = 1;  // Between elements.
  std::size_t count = 0;
  float low = 0, high = 0;  // As stored: fp16.
  std::vector<std::size_t> outliers;
};

float Round16(float x) { return Float16ToFloat(FloatToFloat16(x)); }

float ToUnit(const Vector& v, float x) {
  return v.high > v.low ? std::clamp(2 * (x - v.low) / (v.high - v.low) - 1, -1.0f, 1.0f) : 0;
}
float FromUnit(const Vector& v, float u) { return v.low + (u + 1) / 2 * (v.high - v.low); }

// k-means in one dimension over values in [-1, 1], as fp16.
std::vector<float> Levels(const std::vector<double>& histogram, std::uint32_t bits) {
  const std::size_t count = std::size_t{1} << bits;
  const auto middle = [](std::size_t bin) {
    return (static_cast<double>(bin) + 0.5) * 2 / static_cast<double>(kBins) - 1;
  };
  std::vector<double> levels(count);
  // Begins with as many values near each level, so that no level is left without any.
  double all = 0, below = 0;
  for (const double weight : histogram) all += weight;
  std::size_t next = 0;
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    below += histogram[bin];
    while (next < count &&
           below * static_cast<double>(count) >= (static_cast<double>(next) + 0.5) * all) {
      levels[next++] = middle(bin);
    }
  }
  for (int iteration = 0; iteration < 500; ++iteration) {
    std::vector<double> mass(count, 0), sum(count, 0);
    std::size_t level = 0;
    for (std::size_t bin = 0; bin < kBins; ++bin) {
      while (level + 1 < count && middle(bin) > (levels[level] + levels[level + 1]) / 2) ++level;
      mass[level] += histogram[bin];
      sum[level] += histogram[bin] * middle(bin);
    }
    double moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (mass[i] == 0) continue;  // Stays where it is.
      moved = std::max(moved, std::abs(sum[i] / mass[i] - levels[i]));
      levels[i] = sum[i] / mass[i];
    }
    if (moved < 1e-9) break;
  }
  std::vector<float> stored;
  for (const double level : levels) stored.push_back(Round16(static_cast<float>(level)));
  return stored;
}

class KvQuant : public Quantizer {
 public:
  KvQuant(std::uint32_t key_bits, std::uint32_t value_bits, std::uint32_t group, double share)
      : key_bits_(key_bits), value_bits_(value_bits), group_(group), share_(share) {}

  Decoded Quantize(Half half, const HeadValues& head) const override {
    const std::uint32_t bits = half == Half::kKey ? key_bits_ : value_bits_;
    std::vector<Vector> vectors = Cut(half, head);
    Decoded out;
    out.values.assign(head.values.begin(), head.values.end());
    std::vector<double> histogram(kBins, 0);
    for (Vector& v : vectors) {
      std::vector<float> values(v.count);
      for (std::size_t i = 0; i < v.count; ++i) values[i] = head.values[v.first + i * v.stride];
      v.outliers = FindOutliers(values, OutlierCount(v.count, share_));
      std::vector<bool> kept(v.count, true);
      for (const std::size_t i : v.outliers) kept[i] = false;
      v.low = INFINITY;
      v.high = -INFINITY;
      for (std::size_t i = 0; i < v.count; ++i) {
        if (!kept[i]) continue;
        v.low = std::min(v.low, values[i]);
        v.high = std::max(v.high, values[i]);
      }
      v.low = Round16(v.low);
      v.high = Round16(v.high);
      for (std::size_t i = 0; i < v.count; ++i) {
        if (!kept[i]) continue;
        const float place = (ToUnit(v, values[i]) + 1) / 2 * static_cast<float>(kBins);
        ++histogram[std::min(static_cast<std::size_t>(place), kBins - 1)];
      }
      const auto index_bits = static_cast<std::uint64_t>(std::bit_width(v.count - 1));
      out.bits += v.count * bits + 32 + v.outliers.size() * (16 + index_bits);
    }
    const std::vector<float> levels = Levels(histogram, bits);
    out.bits += levels.size() * 16;
    for (const Vector& v : vectors) {
      std::size_t next = 0;
      for (std::size_t i = 0; i < v.count; ++i) {
        if (next < v.outliers.size() && v.outliers[next] == i) {
          ++next;  // As it was: 16 bits hold it.
          continue;
        }
        float& x = out.values[v.first + i * v.stride];
        const float unit = ToUnit(v, x);
        const auto nearest = std::min_element(
            levels.begin(), levels.end(),
            [unit](float a, float b) { return std::abs(a - unit) < std::abs(b - unit); });
        x = FromUnit(v, *nearest);
      }
    }
    return out;
  }

 private:
  // K: a channel of `group_` tokens. V: a token.
  std::vector<Vector> Cut(Half half, const HeadValues& head) const {
    std::vector<Vector> vectors;
    const std::size_t dim = head.head_dim;
    if (half == Half::kValue) {
      for (std::size_t t = 0; t < head.tokens; ++t) vectors.push_back({t * dim, 1, dim});
      return vectors;
    }
    for (std::size_t begin = 0; begin < head.tokens; begin += group_) {
      const std::size_t count = std::min<std::size_t>(group_, head.tokens - begin);
      for (std::size_t d = 0; d < dim; ++d) vectors.push_back({begin * dim + d, dim, count});
    }
    return vectors;
  }

  const std::uint32_t key_bits_, value_bits_, group_;
  const double share_;
};

}  // namespace

std::size_t OutlierCount(std::size_t count, double share) {
  return std::max<std::size_t>(
      1, static_cast<std::size_t>(std::lround(static_cast<double>(count) * share)));
}

std::vector<std::size_t> FindOutliers(absl::Span<const float> vector, std::size_t outliers) {
  std::vector<std::size_t> order(vector.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return vector[a] != vector[b] ? vector[a] < vector[b] : a < b;
  });
  // In order of value the others are neighbours: as many from below as from where they begin.
  const std::size_t kept = vector.size() - outliers;
  std::size_t best = 0;
  for (std::size_t from = 1; from <= outliers; ++from) {
    if (vector[order[from + kept - 1]] - vector[order[from]] <
        vector[order[best + kept - 1]] - vector[order[best]]) {
      best = from;
    }
  }
  std::vector<std::size_t> found(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(best));
  found.insert(found.end(), order.begin() + static_cast<std::ptrdiff_t>(best + kept), order.end());
  std::sort(found.begin(), found.end());
  return found;
}

std::unique_ptr<Quantizer> MakeKvQuant(std::uint32_t key_bits, std::uint32_t value_bits,
                                       std::uint32_t group_tokens, double outlier_share) {
  return std::make_unique<KvQuant>(key_bits, value_bits, group_tokens, outlier_share);
}

}  // namespace kvmill::eval
