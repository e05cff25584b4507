// The one thread on which a node decides about its cluster: membership, placement, copies, tickets.
//
// Everything of service/cluster/ runs here, so it needs no locks, and the simulator
// (tests/cluster/) runs the same code for hundreds of nodes with a clock of its own. Nothing on it
// may block: what waits for a peer or for the registry is asynchronous and calls back on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_LOOP_H_
#define KVMILL_SERVICE_CLUSTER_LOOP_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "storage/core/clock.h"

namespace kvmill {

class Loop {
 public:
  using TimerId = std::uint64_t;  // Never 0, never used again.

  virtual ~Loop() = default;

  // The time that timers go by. Thread-safe.
  virtual const Clock& clock() const = 0;

  // Runs `task` on the loop, after what was posted before. Thread-safe. Dropped without running
  // when the loop ends first.
  virtual void Post(std::function<void()> task) = 0;

  // The rest is called on the loop only.

  // Runs `task` when `deadline_nanos` of clock() has come; at once, but not within this call, when
  // it has passed already. Equal deadlines run in the order of the calls.
  virtual TimerId At(std::int64_t deadline_nanos, std::function<void()> task) = 0;
  TimerId After(std::int64_t nanos, std::function<void()> task) {
    return At(clock().MonotonicNanos() + nanos, std::move(task));
  }
  // The timer's task will not run, and is destroyed. Nothing when it ran, or runs now.
  virtual void Cancel(TimerId timer) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_LOOP_H_
