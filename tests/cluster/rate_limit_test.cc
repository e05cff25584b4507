#include "service/cluster/rate_limit.h"

#include <gtest/gtest.h>

#include "tests/cluster/sim_loop.h"

namespace kvmill {
namespace {

TEST(RateLimitTest, NoMoreComesThanTheRateGives) {
  SimEvents events(1, false);
  SimLoop loop(events, kSimSecond, 0);
  const auto run_for = [&](std::int64_t nanos) { events.RunUntil(events.now() + nanos, [] {}); };
  RateLimit limit(loop.clock(), {.bytes_per_second = 1000});
  EXPECT_TRUE(limit.Ready());
  limit.Charge(500);
  EXPECT_FALSE(limit.Ready());
  EXPECT_NEAR(static_cast<double>(limit.NanosFor(500)), 1e9, 1e6);
  run_for(499 * kSimMs);
  EXPECT_FALSE(limit.Ready());
  run_for(2 * kSimMs);
  EXPECT_TRUE(limit.Ready());
  // What was not used is a tenth of a second, however long.
  run_for(100 * kSimSecond);
  limit.Charge(101);
  EXPECT_FALSE(limit.Ready());
  run_for(2 * kSimMs);
  EXPECT_TRUE(limit.Ready());
  limit.Charge(1000);
  limit.Refund(1000);
  EXPECT_TRUE(limit.Ready());
}

TEST(RateLimitTest, AYoungNodeTakesLess) {
  SimEvents events(1, false);
  SimLoop loop(events, kSimSecond, 0);
  RateLimit limit(loop.clock(), {.bytes_per_second = 1000, .ramp_nanos = 10 * kSimSecond});
  // The mean of a sixteenth and the whole.
  EXPECT_NEAR(static_cast<double>(limit.NanosFor(5312)), 10e9, 1e7);
  EXPECT_NEAR(static_cast<double>(limit.NanosFor(7312)), 12e9, 1e7);
  std::int64_t taken = 0;
  const auto take_until = [&](std::int64_t time) {
    while (events.now() < time) {
      if (limit.Ready()) {
        limit.Charge(10);
        taken += 10;
      }
      events.RunUntil(events.now() + kSimMs, [] {});
    }
  };
  take_until(kSimSecond);
  EXPECT_NEAR(static_cast<double>(taken), 62.5 + 46.9, 12);
  take_until(10 * kSimSecond);
  EXPECT_NEAR(static_cast<double>(taken), 5312, 20);
  take_until(20 * kSimSecond);
  EXPECT_NEAR(static_cast<double>(taken), 15312, 20);
}

TEST(RateLimitTest, ANewRateHoldsFromNowOnAndWhatIsOwedStays) {
  SimEvents events(1, false);
  SimLoop loop(events, kSimSecond, 0);
  RateLimit limit(loop.clock(), {.bytes_per_second = 1000, .ramp_nanos = 10 * kSimSecond});
  events.RunUntil(events.now() + 100 * kSimSecond, [] {});
  limit.Charge(1100);  // 1000 of them are not earned yet.
  EXPECT_NEAR(static_cast<double>(limit.ReadyAt() - loop.clock().MonotonicNanos()), 1e9, 1e6);
  limit.SetRate(10'000);
  EXPECT_NEAR(static_cast<double>(limit.ReadyAt() - loop.clock().MonotonicNanos()), 1e8, 1e6);
  limit.SetRate(100);
  EXPECT_NEAR(static_cast<double>(limit.ReadyAt() - loop.clock().MonotonicNanos()), 1e10, 1e7);
  events.RunUntil(events.now() + 11 * kSimSecond, [] {});
  EXPECT_TRUE(limit.Ready());
  events.RunUntil(events.now() + 100 * kSimSecond, [] {});
  limit.SetRate(1000);
  EXPECT_NEAR(static_cast<double>(limit.NanosFor(200)), 1e8, 1e6) << "a burst is of the new rate";
}

}  // namespace
}  // namespace kvmill
