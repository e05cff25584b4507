// Threads that help a caller with work that comes in independent parts, such as reading one block
// in pieces: while one piece is copied, the disk works on the next.
#ifndef KVMILL_STORAGE_PART_WORKERS_H_
#define KVMILL_STORAGE_PART_WORKERS_H_

#include <cstddef>
#include <deque>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. Must outlive its calls of Run().
class PartWorkers {
 public:
  explicit PartWorkers(std::size_t thread_count);
  ~PartWorkers();

  // Calls work(part) once for every part < part_count, on this thread and on the workers that are
  // idle, and returns when all calls have returned. Never waits for a busy worker to become idle:
  // without one the caller does everything itself.
  void Run(std::size_t part_count, absl::FunctionRef<void(std::size_t part)> work);

 private:
  struct Job {
    absl::FunctionRef<void(std::size_t part)> work;
    std::size_t part_count;
    std::size_t next_part = 0;
    std::size_t running_parts = 0;
  };

  void Help();
  // Does one part of the job, without the lock.
  void DoPart(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;                             // For workers: a job came, or the end.
  CondVar finished_;                            // For callers: a worker finished a part.
  std::deque<Job*> jobs_ ABSL_GUARDED_BY(mu_);  // With parts that nobody has begun.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_PART_WORKERS_H_
