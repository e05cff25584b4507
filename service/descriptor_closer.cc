#include "service/descriptor_closer.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

constexpr std::chrono::seconds kIdleMax{1};

void ClosePassed(OwnedFd fd) {
  const linger none{};
  setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));  // Fails for what is no socket.
}

void Drain(const OwnedFd& connection) {
  for (;;) {
    char byte = 0;
    alignas(cmsghdr) char control[CMSG_SPACE(kPassedDescriptorsMax * sizeof(int))];
    iovec part{&byte, sizeof(byte)};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t bytes = recvmsg(connection.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return;
    std::vector<OwnedFd> passed = PassedDescriptors(message);
    if (bytes == 0 && passed.empty()) return;  // The end, or a message of nothing.
    for (OwnedFd& fd : passed) ClosePassed(std::move(fd));
  }
}

}  // namespace

std::vector<OwnedFd> PassedDescriptors(msghdr& message) {
  std::vector<OwnedFd> passed;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(c) + at, sizeof(fd));
      passed.emplace_back(fd);
    }
  }
  return passed;
}

struct DescriptorCloser::State {
  struct Item {
    OwnedFd fd;
    bool connection = false;
  };

  // A thread: until there has been nothing to do for a while.
  void Run() {
    MutexLock lock(mu);
    for (;;) {
      if (waiting.empty()) {
        if (stopping) break;
        ++idle;
        const bool woken = work.WaitFor(mu, kIdleMax);
        --idle;
        if (!woken && waiting.empty()) break;
        continue;
      }
      Item item = std::move(waiting.front());
      waiting.pop_front();
      room.NotifyAll();
      mu.Unlock();
      if (item.connection) {
        Drain(item.fd);
        item.fd = OwnedFd();
      } else {
        ClosePassed(std::move(item.fd));
      }
      mu.Lock();
    }
    --threads;
  }

  Mutex mu;
  CondVar work;  // For a thread.
  CondVar room;
  std::deque<Item> waiting ABSL_GUARDED_BY(mu);
  std::size_t threads ABSL_GUARDED_BY(mu) = 0;
  std::size_t idle ABSL_GUARDED_BY(mu) = 0;
  bool stopping ABSL_GUARDED_BY(mu) = false;
};

DescriptorCloser::DescriptorCloser() : state_(std::make_shared<State>()) {}

DescriptorCloser::~DescriptorCloser() { Stop(); }

void DescriptorCloser::Stop() {
  MutexLock lock(state_->mu);
  state_->stopping = true;
  state_->work.NotifyAll();
  state_->room.NotifyAll();
}

void DescriptorCloser::Close(OwnedFd passed) { Add(std::move(passed), false); }

void DescriptorCloser::HangUp(OwnedFd connection) {
  shutdown(connection.get(), SHUT_RDWR);
  Add(std::move(connection), true);
}

void DescriptorCloser::Add(OwnedFd fd, bool connection) {
  if (!fd.valid()) return;
  State& state = *state_;
  MutexLock lock(state.mu);
  while (state.waiting.size() >= kWaitingMax && !state.stopping) state.room.Wait(state.mu);
  state.waiting.push_back({std::move(fd), connection});
  if (state.idle >= state.waiting.size()) {
    state.work.NotifyOne();
    return;
  }
  if (state.threads == kThreadsMax) return;
  try {
    std::thread([kept = state_] { kept->Run(); }).detach();
    ++state.threads;
  } catch (const std::system_error& error) {
    // It waits for the next one that is closed.
    LogWarning(absl::StrCat("no thread to close descriptors on: ", error.what()));
  }
}

}  // namespace kvmill
