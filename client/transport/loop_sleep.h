// How the transport's loop sleeps and is woken: until its worker (UCX) has something to do, or
// somebody calls. While another thread stands in for the loop, the worker's events are for that
// one, which sleeps beside the loop. Internal to client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_LOOP_SLEEP_H_
#define KVMILL_CLIENT_TRANSPORT_LOOP_SLEEP_H_

#include "absl/status/status.h"

namespace kvmill {

class LoopSleep {
 public:
  LoopSleep() = default;
  ~LoopSleep();
  LoopSleep(const LoopSleep&) = delete;
  LoopSleep& operator=(const LoopSleep&) = delete;

  // Once, before anything else. `worker_fd` (borrowed) is readable when the worker has events.
  absl::Status Open(int worker_fd);

  // The loop's thread. -1: without a limit.
  void Sleep(int timeout_ms);
  // Ends this sleep, or the next one. Any thread.
  void Wake();

  // One thread at a time.
  void BeginStandIn();
  void EndStandIn();  // What the worker has by now wakes the loop.
  void StandInSleep();
  void WakeStandIn();  // As Wake.

 private:
  struct Side {
    int epoll_fd = -1;
    int wake_fd = -1;
  };
  absl::Status Open(Side* side, int worker_fd);
  static void Wait(const Side& side, int timeout_ms);
  void WatchWorker(bool watch);

  int worker_fd_ = -1;
  Side loop_, stand_in_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_LOOP_SLEEP_H_
