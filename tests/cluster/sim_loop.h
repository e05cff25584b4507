// The loop of one simulated process: its own clock, which is wrong, and tasks that wait while the
// process is stopped.
#ifndef KVMILL_TESTS_CLUSTER_SIM_LOOP_H_
#define KVMILL_TESTS_CLUSTER_SIM_LOOP_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <unordered_map>
#include <utility>

#include "service/cluster/loop.h"
#include "tests/cluster/sim_events.h"

namespace kvmill {

class SimLoop : public Loop {
 public:
  // The process's clock shows `offset_nanos` more and runs `drift_ppm` parts in a million faster.
  SimLoop(SimEvents& events, std::int64_t offset_nanos, std::int64_t drift_ppm)
      : events_(events), clock_(events, offset_nanos, drift_ppm) {}
  // The process is gone: what waits is destroyed and does not run.
  ~SimLoop() override;

  const Clock& clock() const override { return clock_; }
  void Post(std::function<void()> task) override;
  TimerId At(std::int64_t deadline_nanos, std::function<void()> task) override;
  void Cancel(TimerId timer) override;

  // SIGSTOP and SIGCONT: what became due in between runs then, in order.
  void Stop();
  void Continue();
  bool stopped() const { return stopped_; }

  // Tasks and timers that wait.
  std::size_t waiting() const { return tasks_.size(); }

 private:
  class SkewedClock : public Clock {
   public:
    SkewedClock(SimEvents& events, std::int64_t offset, std::int64_t drift_ppm)
        : events_(events), offset_(offset), drift_ppm_(drift_ppm) {}
    std::int64_t MonotonicNanos() const override { return AtTime(events_.now()); }
    std::int64_t UnixMillis() const override { return MonotonicNanos() / kSimMs; }
    // The first moment at which the clock shows at least `nanos`.
    std::int64_t TimeOf(std::int64_t nanos) const;

   private:
    std::int64_t AtTime(std::int64_t time) const {
      return offset_ + time + time / 1'000'000 * drift_ppm_;
    }
    SimEvents& events_;
    const std::int64_t offset_, drift_ppm_;
  };
  struct Task {
    std::function<void()> run;
    SimEvents::EventId event = 0;  // 0: due, and waiting for the process to continue.
  };

  TimerId Add(std::int64_t time, std::function<void()> task);
  void Due(TimerId id);

  SimEvents& events_;
  SkewedClock clock_;
  bool stopped_ = false;
  TimerId next_ = 1;
  std::unordered_map<TimerId, Task> tasks_;
  std::deque<TimerId> due_;  // While stopped; some may have been cancelled.
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SIM_LOOP_H_
