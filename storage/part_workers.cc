#include "storage/part_workers.h"

#include <algorithm>

namespace kvmill {

PartWorkers::PartWorkers(std::size_t thread_count) {
  for (std::size_t i = 0; i < thread_count; ++i) {
    threads_.emplace_back([this] { Help(); });
  }
}

PartWorkers::~PartWorkers() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void PartWorkers::Run(std::size_t part_count, absl::FunctionRef<void(std::size_t)> work) {
  if (part_count == 0) return;
  Job job{work, part_count};
  MutexLock lock(mu_);
  jobs_.push_back(&job);
  for (std::size_t i = 1; i < std::min(part_count, threads_.size() + 1); ++i) {
    changed_.NotifyOne();
  }
  while (job.next_part < job.part_count) DoPart(job);
  while (job.running_parts > 0) finished_.Wait(mu_);
}

void PartWorkers::DoPart(Job& job) {
  const std::size_t part = job.next_part++;
  ++job.running_parts;
  if (job.next_part == job.part_count) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  mu_.Unlock();
  job.work(part);
  mu_.Lock();
  --job.running_parts;
}

void PartWorkers::Help() {
  MutexLock lock(mu_);
  for (;;) {
    while (!stopping_ && jobs_.empty()) changed_.Wait(mu_);
    if (stopping_) return;
    DoPart(*jobs_.front());
    finished_.NotifyAll();  // The job itself may be gone from here on.
  }
}

}  // namespace kvmill
