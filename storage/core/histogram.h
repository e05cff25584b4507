// A histogram with fixed bucket bounds, for metrics: recorded where the event happens, read by
// whoever exports it.
#ifndef KVMILL_STORAGE_CORE_HISTOGRAM_H_
#define KVMILL_STORAGE_CORE_HISTOGRAM_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvmill {

// `kBounds` are the inclusive upper bounds of the buckets, ascending; one more bucket takes what is
// above. Thread-safe, lock-free. A snapshot taken while others record may miss the newest
// observations, never tears one.
template <std::size_t kBoundCount>
class Histogram {
 public:
  struct Snapshot {
    std::array<std::uint64_t, kBoundCount + 1> counts{};  // Not cumulative.
    double sum = 0;
  };

  explicit constexpr Histogram(const std::array<double, kBoundCount>& bounds) : bounds_(bounds) {}

  void Observe(double value) {
    std::size_t bucket = 0;
    while (bucket < kBoundCount && value > bounds_[bucket]) ++bucket;
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }

  const std::array<double, kBoundCount>& bounds() const { return bounds_; }

  Snapshot snapshot() const {
    Snapshot s;
    for (std::size_t i = 0; i <= kBoundCount; ++i) {
      s.counts[i] = counts_[i].load(std::memory_order_relaxed);
    }
    s.sum = sum_.load(std::memory_order_relaxed);
    return s;
  }

 private:
  const std::array<double, kBoundCount> bounds_;
  std::array<std::atomic<std::uint64_t>, kBoundCount + 1> counts_{};
  std::atomic<double> sum_{0};
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_HISTOGRAM_H_
