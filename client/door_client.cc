#include "client/door_client.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/connection_hints.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetryPause{20};
constexpr int kPollMsMax = 60'000;
// The door hangs up on who lets its answers pile up.
constexpr std::size_t kUnansweredMax = 4;

template <typename Time>
int MillisUntil(Time deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - Time::clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, kPollMsMax));
}

// The process that listens at the other end.
OwnedFd DaemonOf(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.pid <= 0) return {};
  return OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

}  // namespace

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (this == &other) return *this;
  if (fd_ >= 0) close(fd_);
  fd_ = other.Release();
  return *this;
}

OwnedFd::~OwnedFd() {
  if (fd_ >= 0) close(fd_);
}

int OwnedFd::Release() { return std::exchange(fd_, -1); }

DoorClient::DoorClient(std::string path, std::function<void(std::uint64_t)> lost)
    : path_(std::move(path)),
      lost_(std::move(lost)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

DoorClient::~DoorClient() { Stop(); }

void DoorClient::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  Wake();
  if (thread_.joinable()) thread_.join();
}

void DoorClient::Wake() {
  const std::uint64_t one = 1;
  const ssize_t written = write(wake_fd_.get(), &one, sizeof(one));
  static_cast<void>(written);  // It can only fail when the counter is already set.
}

bool DoorClient::Stopping() {
  MutexLock lock(mu_);
  return stopping_;
}

std::shared_ptr<const DoorPass> DoorClient::pass() const {
  MutexLock lock(mu_);
  return pass_;
}

void DoorClient::Enter(Deadline deadline, Entered done) {
  std::shared_ptr<const DoorPass> pass;
  bool stopping = false;
  {
    MutexLock lock(mu_);
    stopping = stopping_;
    pass = pass_;
    if (!stopping && pass == nullptr) {
      waiters_.push_back({deadline, std::move(done)});
      changed_.NotifyAll();
    }
  }
  if (stopping) {
    done(absl::CancelledError("the client is being destroyed"));
  } else if (pass != nullptr) {
    done(std::move(pass));
  } else {
    Wake();
  }
}

void DoorClient::Refused(std::uint64_t number) {
  MutexLock lock(mu_);
  refused_ = std::max(refused_, number);
  if (pass_ != nullptr && pass_->number <= refused_) pass_.reset();
  Wake();
}

bool DoorPass::DaemonIsGone() const {
  if (!process.valid()) return false;
  pollfd ended{process.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 1 && (ended.revents & POLLIN) != 0;
}

void DoorClient::Ask(std::uint64_t pass_number, Request request) {
  bool open = false;
  {
    MutexLock lock(mu_);
    open = !stopping_ && pass_ != nullptr && pass_->number == pass_number;
    if (open) requests_.push_back(std::move(request));
  }
  if (open) {
    Wake();
  } else {
    request.done(absl::UnavailableError("the connection to the daemon's door was lost"));
  }
}

void DoorClient::RequestArena(std::uint64_t number, DoorArenaRequest arena, Deadline deadline,
                              GotArena done) {
  Request request;
  const auto bytes = BytesOf(arena);
  request.packet.assign(bytes.begin(), bytes.end());
  request.deadline = deadline;
  request.done = [arena, done = std::move(done)](absl::StatusOr<Answer> answer) {
    if (!answer.ok()) return done(answer.status());
    const absl::StatusOr<DoorArena> got = ParseDoorMessage<DoorArena>(answer->packet);
    if (!got.ok()) return done(got.status());
    if (got->arena != arena.arena || got->tier != arena.tier ||
        got->arena_epoch != arena.arena_epoch) {
      return done(absl::InternalError("the door answered for another arena"));
    }
    if (!answer->fd.valid()) return done(absl::InternalError("the door sent no memory"));
    done(ArenaMemory{std::move(answer->fd), got->arena_bytes, std::move(answer->more)});
  };
  Ask(number, std::move(request));
}

void DoorClient::SendRegion(std::uint64_t number, const DoorRegion& region, int fd,
                            Deadline deadline, RegionTaken done) {
  AskToTake(number, BytesOf(region), fd, deadline, std::move(done));
}

void DoorClient::SendDeviceRegion(std::uint64_t number, const DoorDeviceRegion& region,
                                  Deadline deadline, RegionTaken done) {
  const std::shared_ptr<const DoorPass> entered = pass();
  if (entered != nullptr && entered->version < kDoorDeviceRegionVersion) {
    return done(absl::UnimplementedError(
        absl::StrCat("memory of a GPU: the daemon's door is of version ", entered->version,
                     ", want ", kDoorDeviceRegionVersion)));
  }
  AskToTake(number, BytesOf(region), -1, deadline, std::move(done));
}

void DoorClient::AskToTake(std::uint64_t number, absl::Span<const std::byte> packet, int fd,
                           Deadline deadline, RegionTaken done) {
  Request request;
  request.packet.assign(packet.begin(), packet.end());
  request.fd = fd;
  request.deadline = deadline;
  request.done = [done = std::move(done)](const absl::StatusOr<Answer>& answer) {
    if (!answer.ok()) return done(answer.status());
    done(ParseDoorMessage<DoorRegionTaken>(answer->packet).status());
  };
  Ask(number, std::move(request));
}

void DoorClient::Run() {
  for (;;) {
    {
      MutexLock lock(mu_);
      while (waiters_.empty() && !stopping_) changed_.Wait(mu_);
      if (stopping_) break;
    }
    DoorWelcome welcome;
    OwnedFd process;
    const absl::StatusOr<OwnedFd> fd = Attempt(&welcome, &process);
    if (!fd.ok()) {
      FailAll(fd.status());
      continue;
    }
    auto pass = std::make_shared<DoorPass>();
    const auto hex = [](const auto& bytes) {
      return absl::BytesToHexString(
          absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    };
    pass->token_hex = hex(welcome.token);
    pass->boot_id_hex = hex(welcome.boot_id);
    pass->version = welcome.header.version;
    pass->process = std::move(process);
    std::vector<Waiter> entered;
    {
      MutexLock lock(mu_);
      pass->number = ++passes_;
      pass_ = pass;
      entered.swap(waiters_);
    }
    for (const Waiter& waiter : entered) waiter.done(pass);
    Serve(fd->get());
    {
      MutexLock lock(mu_);
      pass_.reset();
    }
    FailRequests(absl::UnavailableError("the connection to the daemon's door was lost"));
    lost_(pass->number);
  }
  FailAll(absl::CancelledError("the client is being destroyed"));
  FailRequests(absl::CancelledError("the client is being destroyed"));
}

absl::StatusOr<OwnedFd> DoorClient::Connect(steady_clock::time_point give_up) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "door path of ", path_.size(), " bytes, want at most ", sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path_.data(), path_.size());
  for (;;) {
    OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket");
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      return fd;
    }
    const int error = errno;
    // EAGAIN: so many wait to be let in that the kernel takes no more; nothing tells when it does.
    if (error != EAGAIN && error != EINTR) {
      const std::string why = absl::StrCat("the daemon's door ", path_, ": ", std::strerror(error));
      return error == EACCES || error == EPERM
                 ? absl::PermissionDeniedError(absl::StrCat(why, WhoMayConnect(path_)))
                 : absl::UnavailableError(why);
    }
    FailExpired();
    if (Stopping()) return absl::CancelledError("the client is being destroyed");
    if (steady_clock::now() >= give_up) {
      return absl::UnavailableError(absl::StrCat("the daemon's door ", path_, " lets nobody in"));
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

absl::StatusOr<OwnedFd> DoorClient::Attempt(DoorWelcome* welcome, OwnedFd* process) {
  const auto give_up = steady_clock::now() + kAttemptMax;
  for (;;) {
    KVMILL_ASSIGN_OR_RETURN(OwnedFd fd, Connect(give_up));
    // Before the hello: whoever answers that was alive afterwards, so its number was not another's.
    *process = DaemonOf(fd.get());
    const auto hello = MakeDoorMessage<DoorHello>();
    bool heard = send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello);
    while (heard) {
      pollfd fds[2] = {{fd.get(), POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
      poll(fds, 2, std::min(PollTimeoutMs(), MillisUntil(give_up)));
      std::uint64_t count = 0;
      if (fds[1].revents != 0 && read(wake_fd_.get(), &count, sizeof(count)) < 0) continue;
      FailExpired();
      if (Stopping()) return absl::CancelledError("the client is being destroyed");
      if (fds[0].revents == 0) {
        if (steady_clock::now() < give_up) continue;
        return absl::UnavailableError(
            absl::StrCat("the daemon's door ", path_, " does not answer"));
      }
      std::byte packet[kDoorMessageBytesMax];
      const ssize_t bytes = recv(fd.get(), packet, sizeof(packet), 0);
      if (bytes <= 0) break;  // Others pushed in before us.
      const auto message = absl::MakeConstSpan(packet, static_cast<std::size_t>(bytes));
      KVMILL_ASSIGN_OR_RETURN(const DoorHeader header, ParseDoorHeader(message));
      if (header.kind == static_cast<std::uint16_t>(DoorKind::kRefusal)) {
        KVMILL_ASSIGN_OR_RETURN(const auto refusal, ParseDoorMessage<DoorRefusal>(message));
        return StatusFrom(refusal);
      }
      KVMILL_ASSIGN_OR_RETURN(*welcome, ParseDoorMessage<DoorWelcome>(message));
      return fd;
    }
    if (steady_clock::now() >= give_up) {
      return absl::UnavailableError(absl::StrCat("the daemon's door ", path_, " hangs up"));
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

void DoorClient::Serve(int fd) {
  for (;;) {
    SendRequests(fd);
    pollfd fds[2] = {{fd, POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
    poll(fds, 2, PollTimeoutMs());
    std::uint64_t count = 0;
    if (fds[1].revents != 0 && read(wake_fd_.get(), &count, sizeof(count)) < 0) continue;
    FailExpired();
    {
      MutexLock lock(mu_);
      if (stopping_ || pass_ == nullptr) return;
    }
    if (fds[0].revents != 0 && !Receive(fd)) return;
  }
}

void DoorClient::SendRequests(int fd) {
  MutexLock lock(mu_);
  std::size_t unanswered = 0;
  for (Request& request : requests_) {
    if (++unanswered > kUnansweredMax) return;
    if (request.number != 0) continue;
    const std::uint32_t number = next_request_;
    std::memcpy(request.packet.data() + offsetof(DoorHeader, request), &number, sizeof(number));
    iovec part{request.packet.data(), request.packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (request.fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(c), &request.fd, sizeof(request.fd));
    }
    // A full socket, or too many descriptors on their way: again when an answer came.
    if (sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
    request.number = number;
    ++next_request_;
  }
}

bool DoorClient::Receive(int fd) {
  std::byte packet[kDoorMessageBytesMax];
  alignas(cmsghdr) char control[CMSG_SPACE(kDoorDescriptorsMax * sizeof(int))];
  iovec part{packet, sizeof(packet)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (bytes <= 0) return false;
  // Further ones, for which there is no room, the kernel closes.
  std::array<OwnedFd, kDoorDescriptorsMax> passed;
  std::size_t passed_count = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
      int fd_passed = -1;
      std::memcpy(&fd_passed, reinterpret_cast<const char*>(c) + at, sizeof(fd_passed));
      OwnedFd owned(fd_passed);
      if (passed_count < passed.size()) passed[passed_count++] = std::move(owned);
    }
  }
  const auto content = absl::MakeConstSpan(packet, static_cast<std::size_t>(bytes));
  const absl::StatusOr<DoorHeader> header = ParseDoorHeader(content);
  if (!header.ok()) return false;
  if (header->request == 0) return false;  // The end, or nothing that was asked for.
  absl::StatusOr<Answer> answer = Answer{std::vector<std::byte>(content.begin(), content.end()),
                                         std::move(passed[0]), std::move(passed[1])};
  if (header->kind == static_cast<std::uint16_t>(DoorKind::kRefusal)) {
    const absl::StatusOr<DoorRefusal> refusal = ParseDoorMessage<DoorRefusal>(content);
    if (!refusal.ok()) return false;
    answer = StatusFrom(*refusal);
  }
  std::function<void(absl::StatusOr<Answer>)> done;
  {
    MutexLock lock(mu_);
    const auto it = std::find_if(requests_.begin(), requests_.end(), [&](const Request& request) {
      return request.number == header->request;
    });
    if (it == requests_.end()) return true;  // It did not wait that long.
    done = std::move(it->done);
    requests_.erase(it);
  }
  done(std::move(answer));
  return true;
}

int DoorClient::PollTimeoutMs() {
  MutexLock lock(mu_);
  int timeout = kPollMsMax;
  for (const Waiter& waiter : waiters_) timeout = std::min(timeout, MillisUntil(waiter.deadline));
  for (const Request& request : requests_) {
    timeout = std::min(timeout, MillisUntil(request.deadline));
  }
  return timeout;
}

void DoorClient::FailExpired() {
  const auto now = std::chrono::system_clock::now();
  std::vector<Waiter> expired;
  std::vector<Request> expired_requests;
  {
    MutexLock lock(mu_);
    const auto take = [now](auto& from, auto& to) {
      const auto first = std::stable_partition(from.begin(), from.end(),
                                               [now](const auto& w) { return w.deadline > now; });
      std::move(first, from.end(), std::back_inserter(to));
      from.erase(first, from.end());
    };
    take(waiters_, expired);
    take(requests_, expired_requests);
  }
  const absl::Status late =
      absl::DeadlineExceededError(absl::StrCat("the daemon's door ", path_, " does not answer"));
  for (const Waiter& waiter : expired) waiter.done(late);
  for (const Request& request : expired_requests) request.done(late);
}

void DoorClient::FailAll(const absl::Status& status) {
  std::vector<Waiter> failed;
  {
    MutexLock lock(mu_);
    failed.swap(waiters_);
  }
  for (const Waiter& waiter : failed) waiter.done(status);
}

void DoorClient::FailRequests(const absl::Status& status) {
  std::vector<Request> failed;
  {
    MutexLock lock(mu_);
    failed.swap(requests_);
  }
  for (const Request& request : failed) request.done(status);
}

}  // namespace kvmill
