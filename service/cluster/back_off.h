// How long to wait before the next attempt.
#ifndef KVMILL_SERVICE_CLUSTER_BACK_OFF_H_
#define KVMILL_SERVICE_CLUSTER_BACK_OFF_H_

#include <algorithm>
#include <cstdint>
#include <random>

namespace kvmill {

// Doubles from `first` to `last`, each time a random half to whole of it, so that a thousand nodes
// that lost the same server do not come back at once. The same seed waits the same times.
class BackOff {
 public:
  BackOff(std::int64_t first_nanos, std::int64_t last_nanos, std::uint64_t seed)
      : first_nanos_(first_nanos), last_nanos_(std::max(first_nanos, last_nanos)), random_(seed) {}

  std::int64_t Next() {
    const std::int64_t whole = next_nanos_ == 0 ? first_nanos_ : next_nanos_;
    next_nanos_ = std::min(2 * whole, last_nanos_);
    const auto half = static_cast<std::uint64_t>(whole / 2);
    return whole - static_cast<std::int64_t>(random_() % (half + 1));
  }
  void Reset() { next_nanos_ = 0; }

 private:
  const std::int64_t first_nanos_;
  const std::int64_t last_nanos_;
  std::int64_t next_nanos_ = 0;
  std::mt19937_64 random_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_BACK_OFF_H_
