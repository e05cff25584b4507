// How gRPC's threads reach the loop, and how a registry that is destroyed waits until they have let
// go of it.
#ifndef KVMILL_SERVICE_ETCD_LOOP_INBOX_H_
#define KVMILL_SERVICE_ETCD_LOOP_INBOX_H_

#include <functional>
#include <memory>
#include <utility>

#include "service/cluster/loop.h"
#include "storage/core/mutex.h"

namespace kvmill {

class LoopInbox : public std::enable_shared_from_this<LoopInbox> {
 public:
  explicit LoopInbox(Loop& loop) : loop_(loop) {}

  // On the loop, for each call that gRPC is given.
  void Begin() {
    MutexLock lock(mu_);
    ++held_;
  }
  // Thread-safe, between Begin and End. What comes after Close is dropped.
  void Post(std::function<void()> task) {
    loop_.Post([self = shared_from_this(), task = std::move(task)] {
      if (self->open_) task();
    });
  }
  // The last thing that a call does, on any thread.
  void End() {
    MutexLock lock(mu_);
    if (--held_ == 0) let_go_.NotifyAll();
  }

  // On the loop, or once it ended. Calls have been cancelled: it takes moments.
  void Close() {
    open_ = false;
    MutexLock lock(mu_);
    while (held_ > 0) let_go_.Wait(mu_);
  }

 private:
  Loop& loop_;
  bool open_ = true;  // On the loop.
  Mutex mu_;
  CondVar let_go_;
  int held_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_LOOP_INBOX_H_
