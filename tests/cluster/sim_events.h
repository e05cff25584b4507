// Simulated time: one seeded queue of events for everything that happens in a simulated cluster.
//
// Two runs with one seed are the same run, event by event: nothing in a simulation may ask a real
// clock, an address or the order of a hash table. Single-threaded.
#ifndef KVMILL_TESTS_CLUSTER_SIM_EVENTS_H_
#define KVMILL_TESTS_CLUSTER_SIM_EVENTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvmill {

inline constexpr std::int64_t kSimMs = 1'000'000;
inline constexpr std::int64_t kSimSecond = 1'000'000'000;

class SimEvents {
 public:
  using EventId = std::uint64_t;

  // With `trace` every Trace line goes to standard output.
  SimEvents(std::uint64_t seed, bool trace) : random_(seed), trace_(trace) {}

  std::int64_t now() const { return now_; }

  // Runs `event` when `nanos` has come; events of one time in the order of the calls.
  EventId At(std::int64_t nanos, std::function<void()> event);
  EventId After(std::int64_t nanos, std::function<void()> event) {
    return At(now_ + nanos, std::move(event));
  }
  void Cancel(EventId event);

  // Runs everything up to and at `nanos`, then is there. `after_each` runs after every event.
  void RunUntil(std::int64_t nanos, const std::function<void()>& after_each);

  // Uniform in [low, high].
  std::int64_t Uniform(std::int64_t low, std::int64_t high);
  bool Chance(double probability);
  // Exponential, for the times between things that go wrong.
  std::int64_t Exponential(std::int64_t mean_nanos);

  bool tracing() const { return trace_; }
  void Trace(const std::string& line);

  std::uint64_t events_run() const { return run_; }
  std::size_t pending() const { return events_.size(); }

 private:
  using Place = std::pair<std::int64_t, EventId>;

  std::int64_t now_ = 0;
  EventId next_ = 1;
  std::uint64_t run_ = 0;
  std::map<Place, std::function<void()>> events_;
  std::unordered_map<EventId, std::int64_t> times_;  // Of the events that wait.
  std::mt19937_64 random_;
  bool trace_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_EVENTS_H_
