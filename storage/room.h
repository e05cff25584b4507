// Waiting for room in a pool that is full of what cannot leave at once.
//
// Internal to storage/. Thread-safe.
#ifndef KVMILL_STORAGE_ROOM_H_
#define KVMILL_STORAGE_ROOM_H_

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"

namespace kvmill {

class Room {
 public:
  explicit Room(const Clock& clock) : clock_(clock) {}

  // One caller's attempt to get room: made before the first look at the pool.
  class Attempt {
   public:
    Attempt(Room& room, absl::Duration wait)
        : room_(room),
          wait_nanos_(absl::ToInt64Nanoseconds(wait)),
          start_nanos_(room.clock_.MonotonicNanos()) {}

    // Before every look at the pool.
    void Look();
    // The look found room.
    void Found() { room_.full_since_nanos_.store(kHasRoom, std::memory_order_relaxed); }
    // It found none. Waits until it may be worth another look and returns true; false when the
    // caller has waited long enough, and at once when others have waited that long and nobody got
    // room since: callers queue for few threads, and one wait after the other never ends.
    bool Wait();

   private:
    Room& room_;
    const std::int64_t wait_nanos_;
    const std::int64_t start_nanos_;
    std::uint64_t epoch_ = 0;
  };

  // Something that callers may be waiting for happened: a block was written or released.
  void MayHaveComeFree();

 private:
  static constexpr std::int64_t kHasRoom = std::numeric_limits<std::int64_t>::max();

  const Clock& clock_;
  Mutex mu_;
  CondVar changed_;
  std::uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<std::uint32_t> waiters_{0};  // A stale 0 costs a waiter one time slice.
  // When the first of the calls that found no room came; kHasRoom after one that did.
  std::atomic<std::int64_t> full_since_nanos_{kHasRoom};
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROOM_H_
