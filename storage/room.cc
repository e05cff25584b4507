#include "storage/room.h"

#include <algorithm>
#include <chrono>

namespace kvmill {

void Room::Attempt::Look() {
  MutexLock lock(room_.mu_);
  epoch_ = room_.epoch_;
}

bool Room::Attempt::Wait() {
  const std::int64_t now_nanos = room_.clock_.MonotonicNanos();
  std::int64_t full_since_nanos = kHasRoom;
  if (room_.full_since_nanos_.compare_exchange_strong(full_since_nanos, start_nanos_,
                                                      std::memory_order_relaxed)) {
    full_since_nanos = start_nanos_;
  }
  if (now_nanos - std::min(start_nanos_, full_since_nanos) >= wait_nanos_) return false;
  // Everything is referenced or on its way to the disk. The time slice bounds what a missed notice
  // can cost.
  room_.waiters_.fetch_add(1, std::memory_order_relaxed);
  {
    MutexLock lock(room_.mu_);
    if (room_.epoch_ == epoch_) room_.changed_.WaitFor(room_.mu_, std::chrono::milliseconds(20));
  }
  room_.waiters_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void Room::MayHaveComeFree() {
  if (waiters_.load(std::memory_order_relaxed) == 0) return;
  {
    MutexLock lock(mu_);
    ++epoch_;
  }
  changed_.NotifyAll();
}

}  // namespace kvmill
