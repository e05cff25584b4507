#include "service/thread_loop.h"

#include <algorithm>
#include <chrono>

namespace kvmill {
namespace {

// Without a timer the thread waits for tasks, which wake it.
constexpr std::int64_t kWaitNanosMax = 3'600'000'000'000;

}  // namespace

ThreadLoop::ThreadLoop(const Clock& clock) : clock_(clock), thread_([this] { Work(); }) {}

void ThreadLoop::Post(std::function<void()> task) {
  MutexLock lock(mu_);
  if (stopping_) return;
  posted_.push_back(std::move(task));
  changed_.NotifyAll();
}

Loop::TimerId ThreadLoop::At(std::int64_t deadline_nanos, std::function<void()> task) {
  const TimerId id = next_timer_++;
  timers_[{deadline_nanos, id}] = std::move(task);
  deadlines_[id] = deadline_nanos;
  return id;
}

void ThreadLoop::Cancel(TimerId timer) {
  const auto found = deadlines_.find(timer);
  if (found == deadlines_.end()) return;
  timers_.erase({found->second, timer});
  deadlines_.erase(found);
}

void ThreadLoop::Run(const std::function<void()>& task) {
  Mutex mu;
  CondVar ran;
  bool done = false;
  Post([&] {
    task();
    MutexLock lock(mu);
    done = true;
    ran.NotifyAll();
  });
  MutexLock lock(mu);
  while (!done) ran.Wait(mu);
}

void ThreadLoop::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  // Destroying a task may post another or cancel a timer: none of them under the lock.
  std::deque<std::function<void()>> posted;
  {
    MutexLock lock(mu_);
    posted.swap(posted_);
  }
  posted.clear();
  std::exchange(timers_, {}).clear();
  deadlines_.clear();
}

void ThreadLoop::Work() {
  for (;;) {
    std::deque<std::function<void()>> tasks;
    {
      MutexLock lock(mu_);
      while (!stopping_ && posted_.empty()) {
        std::int64_t wait = kWaitNanosMax;
        if (!timers_.empty()) {
          wait = std::min(wait, timers_.begin()->first.first - clock_.MonotonicNanos());
        }
        if (wait <= 0) break;
        changed_.WaitFor(mu_, std::chrono::nanoseconds(wait));
      }
      if (stopping_) return;
      tasks.swap(posted_);
    }
    while (!tasks.empty()) {
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      task();
    }
    RunTimers();
  }
}

void ThreadLoop::RunTimers() {
  const std::int64_t now = clock_.MonotonicNanos();
  // Those that a timer sets come later, or it would never end.
  const TimerId first_new = next_timer_;
  auto next = timers_.begin();
  while (next != timers_.end() && next->first.first <= now) {
    if (next->first.second >= first_new) {
      ++next;
      continue;
    }
    const std::function<void()> task = std::move(next->second);
    deadlines_.erase(next->first.second);
    timers_.erase(next);
    task();
    next = timers_.begin();  // The task may have cancelled any.
  }
}

}  // namespace kvmill
