// How many bytes may come by now: a budget that fills at a rate, slowly at first.
//
// Whoever takes bytes may begin while the budget is not below zero, and then owes what it took:
// between two moments no more comes than the rate gives, one burst, and what was begun last. A node
// that has just started gets a part of its rate, and all of it after the ramp, so that becoming the
// home of many blocks does not flood it. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_RATE_LIMIT_H_
#define KVMILL_SERVICE_CLUSTER_RATE_LIMIT_H_

#include <cstdint>

#include "storage/core/clock.h"

namespace kvmill {

class RateLimit {
 public:
  // Of the rate, at the start of the ramp; then in a straight line up to all of it.
  static constexpr double kFirstShare = 1.0 / 16;
  // A budget that nobody used is worth so long at the full rate, no longer.
  static constexpr std::int64_t kBurstNanos = 100'000'000;

  struct Options {
    std::uint64_t bytes_per_second = 64 << 20;  // At least 1.
    std::int64_t ramp_nanos = 0;                // From now. 0: the full rate at once.
  };
  RateLimit(const Clock& clock, const Options& options);

  bool Ready() const;
  // The moment at which it will be, of the clock; one that has passed when it is.
  std::int64_t ReadyAt() const;
  void Charge(std::uint64_t bytes);
  // From now on. What was charged and not yet earned stays owed.
  void SetRate(std::uint64_t bytes_per_second);
  // Bytes that were charged and did not come.
  void Refund(std::uint64_t bytes);

  // How long it takes from now until so many bytes have come, if they never wait for anything else.
  std::int64_t NanosFor(std::uint64_t bytes) const;

 private:
  double EarnedBy(std::int64_t nanos) const;      // Since the start.
  std::int64_t TimeOf(double earned) const;       // Its inverse.
  double SpentAtLeast(std::int64_t nanos) const;  // What is above a burst is lost.

  const Clock& clock_;
  double rate_;        // Bytes a second.
  const double ramp_;  // Seconds.
  const std::int64_t start_;
  double spent_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_RATE_LIMIT_H_
