#include "service/cluster/rate_limit.h"

#include <algorithm>
#include <cmath>

namespace kvmill {

namespace {

constexpr double kNanos = 1e9;

}  // namespace

RateLimit::RateLimit(const Clock& clock, const Options& options)
    : clock_(clock),
      rate_(static_cast<double>(options.bytes_per_second)),
      ramp_(static_cast<double>(options.ramp_nanos) / kNanos),
      start_(clock.MonotonicNanos()) {}

// The share of the rate is f + (1 - f)·t/ramp until the ramp ends: its integral, and then a line.
double RateLimit::EarnedBy(std::int64_t nanos) const {
  const double t = static_cast<double>(nanos - start_) / kNanos;
  const double on_ramp = std::min(t, ramp_);
  double seconds = t - on_ramp;
  if (ramp_ > 0) {
    seconds += on_ramp * (kFirstShare + (1 - kFirstShare) * on_ramp / ramp_ / 2);
  }
  return rate_ * seconds;
}

std::int64_t RateLimit::TimeOf(double earned) const {
  const double seconds = earned / rate_;
  const double on_ramp = ramp_ * (1 + kFirstShare) / 2;
  double t = seconds - on_ramp + ramp_;
  if (seconds < on_ramp) {
    const double slope = (1 - kFirstShare) / ramp_;
    t = (std::sqrt(kFirstShare * kFirstShare + 2 * slope * seconds) - kFirstShare) / slope;
  }
  // Rounded up: when it has come, EarnedBy gives as much.
  return start_ + static_cast<std::int64_t>(std::ceil(t * kNanos)) + 1;
}

double RateLimit::SpentAtLeast(std::int64_t nanos) const {
  return std::max(spent_, EarnedBy(nanos) - rate_ * (static_cast<double>(kBurstNanos) / kNanos));
}

bool RateLimit::Ready() const { return EarnedBy(clock_.MonotonicNanos()) >= spent_; }

std::int64_t RateLimit::ReadyAt() const { return TimeOf(spent_); }

void RateLimit::Charge(std::uint64_t bytes) {
  spent_ = SpentAtLeast(clock_.MonotonicNanos()) + static_cast<double>(bytes);
}

void RateLimit::SetRate(std::uint64_t bytes_per_second) {
  const std::int64_t now = clock_.MonotonicNanos();
  const double owed = SpentAtLeast(now) - EarnedBy(now);
  const double unused_seconds = std::min(owed, 0.0) / rate_;  // Of a burst: of the new rate then.
  rate_ = static_cast<double>(bytes_per_second);
  spent_ = EarnedBy(now) + std::max(owed, 0.0) + unused_seconds * rate_;
}

void RateLimit::Refund(std::uint64_t bytes) { spent_ -= static_cast<double>(bytes); }

std::int64_t RateLimit::NanosFor(std::uint64_t bytes) const {
  const std::int64_t now = clock_.MonotonicNanos();
  return std::max<std::int64_t>(0, TimeOf(SpentAtLeast(now) + static_cast<double>(bytes)) - now);
}

}  // namespace kvmill
