#include "client/c_api/queue.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "client/c_api/border.h"

namespace kvmill::c_api {
namespace {

using std::chrono::steady_clock;

constexpr std::int64_t kWaitMsMax = std::int64_t{1000} * 3600 * 24 * 365 * 10;

}  // namespace

absl::StatusOr<std::shared_ptr<Queue>> Queue::Create() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return std::shared_ptr<Queue>(new Queue(fd));
}

Queue::~Queue() {
  while (first_ != nullptr) delete std::exchange(first_, first_->next);
  close(fd_);
}

void Queue::Begin() {
  MutexLock lock(mu_);
  ++running_;
}

void Queue::Finish(kvmill_result* result) {
  MutexLock lock(mu_);
  Append(result);
  --running_;
}

void Queue::Tell(std::unique_ptr<kvmill_result> result) {
  const SessionNotice& told = std::get<SessionNotice>(result->value);
  MutexLock lock(mu_);
  for (kvmill_result* waiting = first_; waiting != nullptr; waiting = waiting->next) {
    auto* const earlier = std::get_if<SessionNotice>(&waiting->value);
    if (earlier == nullptr || waiting->tag != result->tag || earlier->event != told.event) continue;
    earlier->leases += told.leases;
    return;
  }
  Append(result.release());
}

void Queue::Add(std::unique_ptr<kvmill_result> result) {
  MutexLock lock(mu_);
  Append(result.release());
}

void Queue::Append(kvmill_result* result) {
  // The counter of the descriptor is 1 exactly while events are there, so it changes with them,
  // under the lock; neither call can block.
  result->next = nullptr;
  (last_ == nullptr ? first_ : last_->next) = result;
  if (last_ == nullptr) eventfd_write(fd_, 1);
  last_ = result;
  changed_.NotifyAll();
}

absl::Status Queue::Next(std::int64_t timeout_ms, kvmill_event* event) {
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kWaitMsMax));
  MutexLock lock(mu_);
  while (first_ == nullptr) {
    if (timeout_ms < 0) {
      changed_.Wait(mu_);
      continue;
    }
    const auto left = deadline - steady_clock::now();
    if (timeout_ms == 0 || left.count() <= 0) {
      return absl::DeadlineExceededError("no event came in time");
    }
    static_cast<void>(changed_.WaitFor(mu_, left));
  }
  kvmill_result* const result = first_;
  result->Prepare();  // May fail for want of memory: then the event is still there.
  kvmill_event value = {};
  value.tag = result->tag;
  value.operation = result->operation;
  value.code = static_cast<kvmill_code>(result->status.code());
  value.retry_after_ms =
      static_cast<std::uint64_t>(absl::ToInt64Milliseconds(RetryAfter(result->status)));
  value.result = result;
  if (absl::Status s = WriteStruct("event", value, event); !s.ok()) return s;
  first_ = result->next;
  if (first_ == nullptr) {
    last_ = nullptr;
    eventfd_t count = 0;
    eventfd_read(fd_, &count);
  }
  return absl::OkStatus();
}

absl::Status Queue::Drain(std::int64_t timeout_ms) {
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kWaitMsMax));
  MutexLock lock(mu_);
  while (running_ > 0) {
    if (timeout_ms < 0) {
      changed_.Wait(mu_);
      continue;
    }
    const auto left = deadline - steady_clock::now();
    if (timeout_ms == 0 || left.count() <= 0) {
      return absl::DeadlineExceededError(absl::StrCat(running_, " operations still run"));
    }
    static_cast<void>(changed_.WaitFor(mu_, left));
  }
  return absl::OkStatus();
}

std::size_t Queue::running() {
  MutexLock lock(mu_);
  return running_;
}

}  // namespace kvmill::c_api

using kvmill::c_api::CheckProcess;
using kvmill::c_api::CheckStructBytes;
using kvmill::c_api::Guard;
using kvmill::c_api::Null;
using kvmill::c_api::Queue;

extern "C" {

kvmill_code kvmill_queue_create(kvmill_queue** queue) {
  return Guard([&]() -> absl::Status {
    if (queue == nullptr) return Null("queue");
    *queue = nullptr;
    absl::StatusOr<std::shared_ptr<Queue>> made = Queue::Create();
    if (!made.ok()) return made.status();
    *queue = new kvmill_queue{*std::move(made)};
    return absl::OkStatus();
  });
}

kvmill_code kvmill_queue_destroy(kvmill_queue* queue) {
  return Guard([&]() -> absl::Status {
    if (queue == nullptr) return absl::OkStatus();
    // In a child of fork() nobody releases the lock, and nothing runs.
    if (CheckProcess(queue->queue->pid()).ok()) {
      if (const std::size_t running = queue->queue->running(); running > 0) {
        return absl::FailedPreconditionError(
            absl::StrCat(running, " operations that will report to the queue still run"));
      }
    }
    delete queue;
    return absl::OkStatus();
  });
}

int kvmill_queue_fd(const kvmill_queue* queue) {
  return queue == nullptr ? -1 : queue->queue->fd();
}

kvmill_code kvmill_queue_next(kvmill_queue* queue, int64_t timeout_ms, kvmill_event* event) {
  return Guard([&]() -> absl::Status {
    if (queue == nullptr) return Null("queue");
    if (absl::Status s = CheckProcess(queue->queue->pid()); !s.ok()) return s;
    if (event == nullptr) return Null("event");
    // Checked before the wait; and a result that is not handed over would be lost.
    constexpr std::size_t kLeast = offsetof(kvmill_event, result) + sizeof(kvmill_result*);
    if (absl::Status s = CheckStructBytes("event", event->struct_bytes, kLeast); !s.ok()) return s;
    return queue->queue->Next(timeout_ms, event);
  });
}

kvmill_code kvmill_queue_drain(kvmill_queue* queue, int64_t timeout_ms) {
  return Guard([&]() -> absl::Status {
    if (queue == nullptr) return Null("queue");
    if (absl::Status s = CheckProcess(queue->queue->pid()); !s.ok()) return s;
    return queue->queue->Drain(timeout_ms);
  });
}

size_t kvmill_queue_running(const kvmill_queue* queue) {
  if (queue == nullptr || !CheckProcess(queue->queue->pid()).ok()) return 0;
  return queue->queue->running();
}

}  // extern "C"
