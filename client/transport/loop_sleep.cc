#include "client/transport/loop_sleep.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

void Signal(int fd) {
  const std::uint64_t one = 1;
  // A full counter means that a wake-up is under way already.
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof(one));
}

epoll_event Readable(int fd, bool watch = true) {
  epoll_event event{};
  if (watch) event.events = EPOLLIN;
  event.data.fd = fd;
  return event;
}

}  // namespace

LoopSleep::~LoopSleep() {
  for (const int fd : {loop_.epoll_fd, loop_.wake_fd, stand_in_.epoll_fd, stand_in_.wake_fd}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status LoopSleep::Open(int worker_fd) {
  worker_fd_ = worker_fd;
  KVMILL_RETURN_IF_ERROR(Open(&loop_, worker_fd));
  return Open(&stand_in_, worker_fd);
}

absl::Status LoopSleep::Open(Side* side, int worker_fd) {
  side->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  side->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  if (side->wake_fd < 0 || side->epoll_fd < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no descriptors for the transport: ", std::strerror(errno)));
  }
  for (const int fd : {side->wake_fd, worker_fd}) {
    epoll_event event = Readable(fd);
    KVMILL_CHECK(epoll_ctl(side->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0);
  }
  return absl::OkStatus();
}

void LoopSleep::Wait(const Side& side, int timeout_ms) {
  std::array<epoll_event, 2> events;
  const int count =
      epoll_wait(side.epoll_fd, events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    if (events[static_cast<std::size_t>(i)].data.fd != side.wake_fd) continue;
    std::uint64_t value = 0;
    [[maybe_unused]] const ssize_t read_bytes = read(side.wake_fd, &value, sizeof(value));
  }
}

void LoopSleep::WatchWorker(bool watch) {
  epoll_event event = Readable(worker_fd_, watch);
  KVMILL_CHECK(epoll_ctl(loop_.epoll_fd, EPOLL_CTL_MOD, worker_fd_, &event) == 0);
}

void LoopSleep::Sleep(int timeout_ms) { Wait(loop_, timeout_ms); }
void LoopSleep::Wake() { Signal(loop_.wake_fd); }
void LoopSleep::BeginStandIn() { WatchWorker(false); }
void LoopSleep::EndStandIn() { WatchWorker(true); }
void LoopSleep::StandInSleep() { Wait(stand_in_, -1); }
void LoopSleep::WakeStandIn() { Signal(stand_in_.wake_fd); }

}  // namespace kvmill
