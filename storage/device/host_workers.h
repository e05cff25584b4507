// Threads that lend a hand with one piece of work: attention on HostDevice.
//
// Internal to storage/device. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_HOST_WORKERS_H_
#define KVMILL_STORAGE_DEVICE_HOST_WORKERS_H_

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "storage/core/mutex.h"

namespace kvmill {

class HostWorkers {
 public:
  // The threads start with the first work that has something for them.
  explicit HostWorkers(unsigned thread_count) : thread_count_(thread_count) {}
  ~HostWorkers();

  // Calls work(context, w) once for each w = 0 .. count - 1, on the calling thread and on those
  // that have nothing else to do, and returns after the last has returned.
  void Run(std::uint32_t count, void (*work)(void* context, std::uint32_t worker), void* context);

 private:
  struct Job {
    void (*work)(void*, std::uint32_t);
    void* context;
    std::uint32_t count;
    std::uint32_t next = 0;  // The next worker to call.
    std::uint32_t done = 0;
    CondVar finished;
  };
  void Main();
  void Start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Calls the job's next worker, without the lock. The job is in `jobs_` while it has one.
  void CallNext(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const unsigned thread_count_;
  Mutex mu_;
  CondVar job_there_;
  std::deque<Job*> jobs_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_HOST_WORKERS_H_
