// Time as a dependency, so that tests own it.
#ifndef KVMILL_STORAGE_CORE_CLOCK_H_
#define KVMILL_STORAGE_CORE_CLOCK_H_

#include <atomic>
#include <cstdint>

namespace kvmill {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic, from an arbitrary start; for ages, leases and deadlines.
  virtual std::int64_t MonotonicNanos() const = 0;
  // Since the Unix epoch; for what people read.
  virtual std::int64_t UnixMillis() const = 0;
};

// The machine's clocks. Lives as long as the process.
const Clock& SystemClock();

// A clock that only moves when told to.
class ManualClock : public Clock {
 public:
  std::int64_t MonotonicNanos() const override { return nanos_.load(std::memory_order_relaxed); }
  std::int64_t UnixMillis() const override { return MonotonicNanos() / 1'000'000; }
  void AdvanceNanos(std::int64_t nanos) { nanos_.fetch_add(nanos, std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> nanos_{
      1'000'000'000};  // Any stale value is a time that was true a moment ago.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_CLOCK_H_
