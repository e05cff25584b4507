// How other threads reach the loop for an object that lives there, and may be gone by then.
#ifndef KVMILL_SERVICE_LOOP_MAIL_H_
#define KVMILL_SERVICE_LOOP_MAIL_H_

#include <functional>
#include <memory>
#include <utility>

#include "service/cluster/loop.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Shared by the object and by whoever may have something to tell it, even after the loop's end.
class LoopMail : public std::enable_shared_from_this<LoopMail> {
 public:
  explicit LoopMail(Loop& loop) : loop_(&loop) {}

  // Thread-safe. Runs `task` on the loop unless Close comes first; then it is dropped.
  void Post(std::function<void()> task) {
    MutexLock lock(mu_);
    if (loop_ == nullptr) return;
    loop_->Post([self = shared_from_this(), task = std::move(task)] {
      if (self->open_) task();
    });
  }
  // By the object, on the loop or once it ended.
  void Close() {
    open_ = false;
    MutexLock lock(mu_);
    loop_ = nullptr;
  }

 private:
  bool open_ = true;  // On the loop.
  Mutex mu_;
  Loop* loop_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOOP_MAIL_H_
