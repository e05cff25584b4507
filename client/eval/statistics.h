// Spread and significance of small samples.
#ifndef KVMILL_CLIENT_EVAL_STATISTICS_H_
#define KVMILL_CLIENT_EVAL_STATISTICS_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace kvmill::eval {

// The value below which `share` of the sample lies; between two values in proportion. `sorted` must
// not be empty.
double Quantile(absl::Span<const double> sorted, double share);

struct Spread {
  std::size_t n = 0;
  double min = 0, lower = 0, median = 0, upper = 0, max = 0;  // lower, upper: quartiles.
};
Spread SpreadOf(std::vector<double> sample);

// Where a share lies of which `count` of `n` were seen, with 95 % (Wilson's interval). n > 0.
struct Interval {
  double from = 0, to = 1;
};
Interval ShareInterval(std::size_t count, std::size_t n);

// Of pairs (one, other): how often the one is smaller, how often greater, and how likely so uneven
// a split or a worse one would be if both were as likely (two-sided, exact). Ties do not count;
// p is 1 without other pairs.
struct SignTest {
  std::size_t smaller = 0, greater = 0;
  double p = 1;
};
SignTest TestSigns(absl::Span<const double> one, absl::Span<const double> other);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_STATISTICS_H_
