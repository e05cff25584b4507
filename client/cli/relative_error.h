// How far values are from what they should be.
#ifndef KVMILL_CLIENT_CLI_RELATIVE_ERROR_H_
#define KVMILL_CLIENT_CLI_RELATIVE_ERROR_H_

#include <cmath>
#include <cstddef>

#include "absl/types/span.h"

namespace kvmill::cli {

// Over all values that were added: |got - want| / |want|, Frobenius norms; 0/0 = 0.
struct SquareSums {
  double difference = 0;
  double wanted = 0;

  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    wanted += want * want;
  }
  void Add(absl::Span<const float> got, absl::Span<const float> want) {  // As many of each.
    for (std::size_t i = 0; i < want.size(); ++i) Add(got[i], want[i]);
  }
  void Add(const SquareSums& other) {
    difference += other.difference;
    wanted += other.wanted;
  }
  double RelativeError() const { return difference == 0 ? 0 : std::sqrt(difference / wanted); }
};

inline double RelativeError(absl::Span<const float> got, absl::Span<const float> want) {
  SquareSums sums;
  sums.Add(got, want);
  return sums.RelativeError();
}

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_RELATIVE_ERROR_H_
