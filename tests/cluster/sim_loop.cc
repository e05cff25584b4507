#include "tests/cluster/sim_loop.h"

#include <algorithm>

namespace kvmill {

std::int64_t SimLoop::SkewedClock::TimeOf(std::int64_t nanos) const {
  std::int64_t time = std::max(events_.now(), nanos - offset_);
  // The drift is thousandths at most: a few rounds find the moment, and then its edge.
  for (int i = 0; i < 8 && AtTime(time) != nanos; ++i) time += nanos - AtTime(time);
  time = std::max(time, events_.now());
  while (AtTime(time) < nanos) ++time;
  return time;
}

SimLoop::~SimLoop() {
  // Destroying a task may cancel others, or add some, which go the same way.
  while (!tasks_.empty()) Cancel(tasks_.begin()->first);
}

void SimLoop::Post(std::function<void()> task) { Add(events_.now(), std::move(task)); }

Loop::TimerId SimLoop::At(std::int64_t deadline_nanos, std::function<void()> task) {
  return Add(clock_.TimeOf(deadline_nanos), std::move(task));
}

Loop::TimerId SimLoop::Add(std::int64_t time, std::function<void()> task) {
  const TimerId id = next_++;
  const SimEvents::EventId event = events_.At(time, [this, id] { Due(id); });
  tasks_.emplace(id, Task{std::move(task), event});
  return id;
}

void SimLoop::Cancel(TimerId timer) {
  const auto found = tasks_.find(timer);
  if (found == tasks_.end()) return;
  const Task destroyed = std::move(found->second);
  tasks_.erase(found);
  if (destroyed.event != 0) events_.Cancel(destroyed.event);
}

void SimLoop::Due(TimerId id) {
  const auto found = tasks_.find(id);
  if (stopped_ || !due_.empty()) {
    found->second.event = 0;
    due_.push_back(id);
    return;
  }
  const Task task = std::move(found->second);
  tasks_.erase(found);
  task.run();
}

void SimLoop::Stop() { stopped_ = true; }

void SimLoop::Continue() {
  stopped_ = false;
  // One event each, before anything that becomes due from now on.
  std::deque<TimerId> due = std::move(due_);
  due_.clear();
  for (const TimerId id : due) {
    const auto found = tasks_.find(id);
    if (found == tasks_.end()) continue;
    found->second.event = events_.At(events_.now(), [this, id] { Due(id); });
  }
}

}  // namespace kvmill
