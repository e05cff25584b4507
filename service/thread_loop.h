// The loop of service/cluster/ on a thread of its own, by a real clock.
#ifndef KVMILL_SERVICE_THREAD_LOOP_H_
#define KVMILL_SERVICE_THREAD_LOOP_H_

#include <deque>
#include <map>
#include <thread>
#include <unordered_map>
#include <utility>

#include "service/cluster/loop.h"
#include "storage/core/mutex.h"

namespace kvmill {

class ThreadLoop final : public Loop {
 public:
  // `clock` must outlive it and go by real time: the thread sleeps by it.
  explicit ThreadLoop(const Clock& clock);
  ~ThreadLoop() override { Stop(); }

  const Clock& clock() const override { return clock_; }
  void Post(std::function<void()> task) override;
  TimerId At(std::int64_t deadline_nanos, std::function<void()> task) override;
  void Cancel(TimerId timer) override;

  // Runs `task` on the loop and returns when it ran. Not from the loop, and not once it stops.
  void Run(const std::function<void()>& task);

  // Returns when the thread has ended; then whoever called may use what lived on it. What did not
  // run is destroyed. Idempotent; not from the loop.
  void Stop();

 private:
  void Work();
  void RunTimers();

  const Clock& clock_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::function<void()>> posted_ ABSL_GUARDED_BY(mu_);

  // On the thread only.
  TimerId next_timer_ = 1;
  std::map<std::pair<std::int64_t, TimerId>, std::function<void()>> timers_;  // By deadline.
  std::unordered_map<TimerId, std::int64_t> deadlines_;

  std::thread thread_;  // Last: it uses the others.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_THREAD_LOOP_H_
