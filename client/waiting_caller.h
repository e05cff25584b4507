// A thread that waits for its operation and meanwhile works for it: what would be a task of a
// worker, and what it takes to receive the answer, runs on the thread that wants the result. That
// saves the switches between threads, which cost more than the work. Internal to client/.
#ifndef KVMILL_CLIENT_WAITING_CALLER_H_
#define KVMILL_CLIENT_WAITING_CALLER_H_

#include <functional>
#include <utility>
#include <vector>

#include "client/transport/transport.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Post and End: any thread. Lives until Work has returned.
class WaitingCaller {
 public:
  using Task = std::function<void()>;

  // Not after End.
  void Post(Task task) {
    MutexLock lock(mu_);
    tasks_.push_back(std::move(task));
    changed_.NotifyOne();
  }

  // Nothing more comes; Work returns.
  void End() {
    MutexLock lock(mu_);
    ended_ = true;
    changed_.NotifyOne();
  }

  // While it waits it may stand in for the transport of `connection`; null: not any more, which
  // comes before End. Whoever posts does so in callbacks of that transport.
  void StandInFor(ConnectionPtr connection) {
    MutexLock lock(mu_);
    connection_ = std::move(connection);
  }

  // Runs what is posted, first in first out, until End. On the one thread that waits.
  void Work() {
    std::vector<Task> running;
    for (;;) {
      ConnectionPtr connection;
      {
        MutexLock lock(mu_);
        if (tasks_.empty() && !ended_) connection = connection_;
      }
      if (connection != nullptr) {
        connection->RunUntil([this] {
          MutexLock lock(mu_);
          return !tasks_.empty() || ended_;
        });
      }
      {
        MutexLock lock(mu_);
        while (tasks_.empty() && !ended_) changed_.Wait(mu_);
        if (tasks_.empty()) return;
        running.swap(tasks_);
      }
      for (Task& task : running) task();
      running.clear();
    }
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  ConnectionPtr connection_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_WAITING_CALLER_H_
