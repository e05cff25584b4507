// How a daemon comes to its end: who asks for it, who waits for that, and how far it is.
#ifndef KVMILL_SERVICE_LEAVING_H_
#define KVMILL_SERVICE_LEAVING_H_

#include <chrono>
#include <cstdint>

#include "storage/core/mutex.h"

namespace kvmill {

// A signal and an administrator ask for the same thing, and only the first of them starts it.
// Thread-safe.
class Leaving {
 public:
  enum class Phase {
    kServing,
    kHandingOver,  // Asked: other nodes copy what only this one has.
    kEnding,       // Calls in flight end, blocks become durable.
  };
  struct State {
    Phase phase = Phase::kServing;
    // As the handing over ended: blocks that other nodes have now, and that none does.
    std::uint64_t blocks = 0, blocks_left = 0;
    // Tails and others that no node is asked to take.
    std::uint64_t blocks_left_out = 0;
    bool alone = false;  // No other node stays in the cluster.
  };

  // False: somebody has before.
  bool Ask();
  // Who drains the daemon waits here until somebody asks.
  void WaitUntilAsked();

  // What is left is that calls in flight end. `how`: but for its phase.
  void HandedOver(State how);

  State state() const;
  // Returns when the phase is another one than `seen`, or after `limit`.
  State WaitWhile(Phase seen, std::chrono::milliseconds limit);

 private:
  mutable Mutex mu_;
  CondVar changed_;
  State state_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LEAVING_H_
