#include "service/leaving.h"

namespace kvmill {

bool Leaving::Ask() {
  MutexLock lock(mu_);
  if (state_.phase != Phase::kServing) return false;
  state_.phase = Phase::kHandingOver;
  changed_.NotifyAll();
  return true;
}

void Leaving::WaitUntilAsked() {
  MutexLock lock(mu_);
  while (state_.phase == Phase::kServing) changed_.Wait(mu_);
}

void Leaving::HandedOver(State how) {
  how.phase = Phase::kEnding;
  MutexLock lock(mu_);
  state_ = how;
  changed_.NotifyAll();
}

Leaving::State Leaving::state() const {
  MutexLock lock(mu_);
  return state_;
}

Leaving::State Leaving::WaitWhile(Phase seen, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  MutexLock lock(mu_);
  while (state_.phase == seen) {
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) break;
    changed_.WaitFor(mu_, left);
  }
  return state_;
}

}  // namespace kvmill
