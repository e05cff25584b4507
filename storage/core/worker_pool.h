// A fixed number of threads that run posted tasks, first in first out.
//
// The queue has no limit of its own: whoever posts bounds what it has in flight. Thread-safe.
#ifndef KVMILL_STORAGE_CORE_WORKER_POOL_H_
#define KVMILL_STORAGE_CORE_WORKER_POOL_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "storage/core/mutex.h"

namespace kvmill {

class WorkerPool {
 public:
  using Task = std::function<void()>;

  // `name` (up to 15 characters) is what the threads are called in a debugger.
  WorkerPool(std::size_t thread_count, const std::string& name);
  // Runs what was posted, then joins.
  ~WorkerPool();

  void Post(Task task);

 private:
  void Run();

  Mutex mu_;
  CondVar ready_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // Constant after construction.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_WORKER_POOL_H_
