// Calls a function every so often, from a thread of its own.
#ifndef KVMILL_SERVICE_TICKER_H_
#define KVMILL_SERVICE_TICKER_H_

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "storage/core/mutex.h"

namespace kvmill {

class Ticker {
 public:
  Ticker(std::chrono::milliseconds period, std::function<void()> tick)
      : thread_([this, period, tick = std::move(tick)] { Run(period, tick); }) {}
  // Waits for a call in progress.
  ~Ticker() {
    {
      MutexLock lock(mu_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }

 private:
  void Run(std::chrono::milliseconds period, const std::function<void()>& tick) {
    for (;;) {
      {
        MutexLock lock(mu_);
        if (!stopping_) changed_.WaitFor(mu_, period);
        if (stopping_) return;
      }
      tick();
    }
  }

  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKER_H_
