#include "storage/core/worker_pool.h"

#include <pthread.h>

#include <utility>

namespace kvmill {

WorkerPool::WorkerPool(std::size_t thread_count, const std::string& name) {
  for (std::size_t i = 0; i < thread_count; ++i) {
    threads_.emplace_back([this] { Run(); });
    pthread_setname_np(threads_.back().native_handle(), name.c_str());
  }
}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  ready_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Post(Task task) {
  {
    MutexLock lock(mu_);
    tasks_.push_back(std::move(task));
  }
  ready_.NotifyOne();
}

void WorkerPool::Run() {
  for (;;) {
    Task task;
    {
      MutexLock lock(mu_);
      while (tasks_.empty() && !stopping_) ready_.Wait(mu_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace kvmill
