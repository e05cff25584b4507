#include "client/eval/statistics.h"

#include <algorithm>
#include <cmath>

namespace kvmill::eval {

double Quantile(absl::Span<const double> sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  if (below + 1 >= sorted.size()) return sorted.back();
  const double part = at - static_cast<double>(below);
  return sorted[below] + part * (sorted[below + 1] - sorted[below]);
}

Spread SpreadOf(std::vector<double> sample) {
  Spread spread;
  spread.n = sample.size();
  if (sample.empty()) return spread;
  std::sort(sample.begin(), sample.end());
  spread.min = sample.front();
  spread.lower = Quantile(sample, 0.25);
  spread.median = Quantile(sample, 0.5);
  spread.upper = Quantile(sample, 0.75);
  spread.max = sample.back();
  return spread;
}

Interval ShareInterval(std::size_t count, std::size_t n) {
  constexpr double kZ = 1.959963984540054;  // 2.5 % on either side of the normal distribution.
  const auto size = static_cast<double>(n);
  const double share = static_cast<double>(count) / size, z2 = kZ * kZ / size;
  const double middle = (share + z2 / 2) / (1 + z2);
  const double reach = kZ / (1 + z2) * std::sqrt(share * (1 - share) / size + z2 / (4 * size));
  return {std::max(0.0, middle - reach), std::min(1.0, middle + reach)};
}

SignTest TestSigns(absl::Span<const double> one, absl::Span<const double> other) {
  SignTest test;
  for (std::size_t i = 0; i < one.size(); ++i) {
    if (one[i] < other[i]) ++test.smaller;
    if (one[i] > other[i]) ++test.greater;
  }
  const std::size_t n = test.smaller + test.greater;
  const std::size_t few = std::min(test.smaller, test.greater);
  // Sum of n over k for k up to `few`, each divided by 2^n, in logarithms.
  double tail = 0, log_choose = 0;
  const double log_all = static_cast<double>(n) * std::log(2.0);
  for (std::size_t k = 0; k <= few; ++k) {
    if (k > 0) log_choose += std::log(static_cast<double>(n - k + 1) / static_cast<double>(k));
    tail += std::exp(log_choose - log_all);
  }
  test.p = std::min(1.0, 2 * tail);
  return test;
}

}  // namespace kvmill::eval
