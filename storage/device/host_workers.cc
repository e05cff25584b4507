#include "storage/device/host_workers.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace kvmill {

HostWorkers::~HostWorkers() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(mu_);
    stop_ = true;
    job_there_.NotifyAll();
    threads = std::move(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void HostWorkers::Start() {
  try {
    while (threads_.size() < thread_count_) threads_.emplace_back([this] { Main(); });
  } catch (const std::system_error&) {
    // With fewer threads, or none, the work is done all the same; the next job tries again.
  }
}

void HostWorkers::CallNext(Job& job) {
  const std::uint32_t worker = job.next++;
  if (job.next == job.count) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  mu_.Unlock();
  job.work(job.context, worker);
  mu_.Lock();
  if (++job.done == job.count) job.finished.NotifyAll();
}

void HostWorkers::Run(std::uint32_t count, void (*work)(void*, std::uint32_t), void* context) {
  if (count == 0) return;
  Job job{work, context, count};
  MutexLock lock(mu_);
  jobs_.push_back(&job);
  if (count > 1) {
    Start();
    job_there_.NotifyAll();
  }
  while (job.next < job.count) CallNext(job);
  while (job.done < job.count) job.finished.Wait(mu_);
}

void HostWorkers::Main() {
  MutexLock lock(mu_);
  for (;;) {
    while (jobs_.empty() && !stop_) job_there_.Wait(mu_);
    if (jobs_.empty()) return;
    CallNext(*jobs_.front());
  }
}

}  // namespace kvmill
