#include "service/local_door.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// What is sent to a client and not read yet; descriptors in flight are limited for the whole
// daemon. The kernel rounds up to its least, some ten messages.
constexpr int kSendBufferBytes = 4096;
constexpr int kAcceptsPerRound = 16;
constexpr int kEventsPerRound = 64;
constexpr int kTickMs = 1000;

// What an event is about: a client's number, or one of these.
constexpr std::uint64_t kStopEvent = 0;
constexpr std::uint64_t kListenEvent = ~std::uint64_t{0};
constexpr std::uint64_t kProcessBit = std::uint64_t{1} << 63;  // The client's process ended.

bool Watch(int epoll, int fd, std::uint64_t what) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = what;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

// Without a branch that depends on where they differ.
bool SameToken(const std::array<std::uint8_t, kDoorTokenBytes>& a, absl::string_view b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned>(a[i] ^ static_cast<std::uint8_t>(b[i]));
  }
  return difference == 0;
}

std::size_t AsSize(ssize_t bytes) { return static_cast<std::size_t>(bytes); }

std::uint64_t HeadOf(const void* token) {
  std::uint64_t head = 0;
  std::memcpy(&head, token, sizeof(head));
  return head;
}

}  // namespace

bool DoorPeer::IsAlive() const {
  if (process < 0) return false;
  pollfd ended{process, POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

absl::StatusOr<std::unique_ptr<LocalDoor>> LocalDoor::Create(Options options, const Clock& clock) {
  std::unique_ptr<LocalDoor> door(new LocalDoor(std::move(options), clock));
  KVMILL_ASSIGN_OR_RETURN(door->listener_,
                          UnixListener::Create(door->options_.path, UnixListener::Type::kPackets));
  door->epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  door->stop_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!door->epoll_.valid() || !door->stop_.valid() ||
      !Watch(door->epoll_.get(), door->stop_.get(), kStopEvent) ||
      !Watch(door->epoll_.get(), door->listener_->fd(), kListenEvent)) {
    return absl::ErrnoToStatus(errno, absl::StrCat("epoll for ", door->options_.path));
  }
  return door;
}

LocalDoor::~LocalDoor() { Stop(); }

void LocalDoor::Start(Handlers handlers) {
  handlers_ = std::move(handlers);
  thread_ = std::thread([this] { Run(); });
}

void LocalDoor::Stop() {
  closer_.Stop();  // The thread waits for nobody now.
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  const ssize_t written = write(stop_.get(), &one, sizeof(one));
  static_cast<void>(written);  // It can only fail when the counter is already set.
  thread_.join();
}

std::optional<LocalDoor::Guest> LocalDoor::FindToken(absl::string_view token_hex) const {
  if (token_hex.size() != 2 * kDoorTokenBytes) return std::nullopt;
  for (const char c : token_hex) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return std::nullopt;
  }
  const std::string bytes = absl::HexStringToBytes(token_hex);
  MutexLock lock(mu_);
  const auto it = tokens_.find(HeadOf(bytes.data()));
  if (it == tokens_.end() || !SameToken(it->second.bytes, bytes)) return std::nullopt;
  return it->second.guest;
}

void LocalDoor::Run() {
  std::vector<epoll_event> events(kEventsPerRound);
  for (;;) {
    const bool tick = silent_ > 0 || !accepting_;
    const int count = epoll_wait(epoll_.get(), events.data(), kEventsPerRound, tick ? kTickMs : -1);
    if (!accepting_) {  // A descriptor may have come free.
      accepting_ = true;
      Watch(epoll_.get(), listener_->fd(), kListenEvent);
    }
    bool listen_ready = false;
    bool stop = false;
    for (int i = 0; i < count; ++i) {
      const std::uint64_t what = events[static_cast<std::size_t>(i)].data.u64;
      if (what == kStopEvent) {
        stop = true;
      } else if (what == kListenEvent) {
        listen_ready = true;
      } else {
        const DoorClientId id = what & ~kProcessBit;
        const auto it = clients_.find(id);
        if (it == clients_.end()) continue;  // Gone in this round.
        const bool process_ended = (what & kProcessBit) != 0;
        if (process_ended || !Receive(id, it->second)) Drop(id);
      }
    }
    if (stop) break;
    // After those who are in: a hello that has come makes room.
    if (listen_ready) Accept();
    DropSilent();
  }
  while (!clients_.empty()) Drop(clients_.begin()->first);
  // Who was not let in may have sent descriptors already.
  shutdown(listener_->fd(), SHUT_RDWR);
  for (;;) {
    OwnedFd fd(accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) break;
    closer_.HangUp(std::move(fd));
  }
}

void LocalDoor::Accept() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    OwnedFd fd(accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        LogWarning(absl::StrCat("door ", options_.path, ": accept: ", std::strerror(errno)));
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_->fd(), nullptr);
        accepting_ = false;
      }
      return;
    }
    AddClient(&fd);
    if (fd.valid()) HangUp(std::move(fd));
  }
}

void LocalDoor::AddClient(OwnedFd* connection) {
  const OwnedFd& fd = *connection;
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return;
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
  if (silent_ >= options_.silent_max) {
    const auto oldest = std::find_if(clients_.begin(), clients_.end(),
                                     [](const auto& entry) { return entry.second.silent; });
    // Its hello may have come since the round began.
    if (!Receive(oldest->first, oldest->second) || oldest->second.silent) Drop(oldest->first);
  }
  if (clients_.size() >= options_.clients_max) {
    Refuse(fd.get(), absl::ResourceExhaustedError(absl::StrCat(
                         clients_.size(), " local clients: at most ", options_.clients_max)));
    return;
  }
  const auto of_uid = clients_of_uid_.find(peer.uid);
  const bool trusted = peer.uid == geteuid() || peer.uid == 0;
  if (!trusted && of_uid != clients_of_uid_.end() &&
      of_uid->second >= options_.clients_of_uid_max) {
    Refuse(fd.get(), absl::ResourceExhaustedError(
                         absl::StrCat(of_uid->second, " local clients of uid ", peer.uid,
                                      ": at most ", options_.clients_of_uid_max)));
    return;
  }
  const DoorClientId id = last_id_ + 1;
  Client client;
  client.uid = peer.uid;
  client.connected_nanos = clock_.MonotonicNanos();
  client.pid = peer.pid;
  if (peer.pid > 0) {
    client.process = OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  }
  if (!Watch(epoll_.get(), fd.get(), id)) return;
  if (client.process.valid() && !Watch(epoll_.get(), client.process.get(), id | kProcessBit)) {
    return;
  }
  client.fd = std::move(*connection);
  last_id_ = id;
  ++silent_;
  ++clients_of_uid_[peer.uid];
  clients_.emplace(id, std::move(client));
}

void LocalDoor::Refuse(int fd, const absl::Status& status, std::uint32_t request) {
  const DoorRefusal refusal = RefusalFrom(status, request);
  const ssize_t sent = send(fd, &refusal, sizeof(refusal), MSG_NOSIGNAL | MSG_DONTWAIT);
  static_cast<void>(sent);  // Whoever does not read does not learn why.
}

bool LocalDoor::Receive(DoorClientId id, Client& client) {
  std::byte packet[kDoorMessageBytesMax];
  // Room for all descriptors that may come along: the kernel would close the others here.
  alignas(cmsghdr) char control[CMSG_SPACE(kPassedDescriptorsMax * sizeof(int))];
  iovec part{packet, sizeof(packet)};
  msghdr received{};
  received.msg_iov = &part;
  received.msg_iovlen = 1;
  received.msg_control = control;
  received.msg_controllen = sizeof(control);
  const ssize_t bytes =
      recvmsg(client.fd.get(), &received, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (bytes < 0) return false;
  std::vector<OwnedFd> passed = PassedDescriptors(received);
  const bool stays =
      Handle(id, client, absl::MakeConstSpan(packet, std::min(sizeof(packet), AsSize(bytes))),
             AsSize(bytes), passed.empty() ? -1 : passed.front().get());
  for (OwnedFd& fd : passed) closer_.Close(std::move(fd));
  return stays;
}

bool LocalDoor::Handle(DoorClientId id, Client& client, absl::Span<const std::byte> message,
                       std::size_t bytes, int passed) {
  if (bytes == 0) return false;
  const auto refuse = [&](const absl::Status& status) {
    Refuse(client.fd.get(), status);
    return false;
  };
  if (bytes > message.size()) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("door message of ", bytes, " bytes, want at most ", kDoorMessageBytesMax)));
  }
  const absl::StatusOr<DoorHeader> header = ParseDoorHeader(message);
  if (!header.ok()) return refuse(header.status());
  if (client.silent) {
    const absl::StatusOr<DoorHello> hello = ParseDoorMessage<DoorHello>(message);
    if (!hello.ok()) return refuse(hello.status());
    return Welcome(id, client, header->request);
  }
  if (header->kind == static_cast<std::uint16_t>(DoorKind::kRegion)) {
    const absl::StatusOr<DoorRegion> region = ParseDoorMessage<DoorRegion>(message);
    if (!region.ok()) return refuse(region.status());
    return AnswerRegion(client, *region, handlers_.region(PeerOf(id, client), *region, passed));
  }
  if (header->kind == static_cast<std::uint16_t>(DoorKind::kDeviceRegion)) {
    const absl::StatusOr<DoorDeviceRegion> region = ParseDoorMessage<DoorDeviceRegion>(message);
    if (!region.ok()) return refuse(region.status());
    return AnswerRegion(client, *region, handlers_.device_region(PeerOf(id, client), *region));
  }
  const absl::StatusOr<DoorArenaRequest> request = ParseDoorMessage<DoorArenaRequest>(message);
  if (!request.ok()) return refuse(request.status());
  return SendArena(id, client, *request);
}

bool LocalDoor::Welcome(DoorClientId id, Client& client, std::uint32_t request) {
  auto welcome = MakeDoorMessage<DoorWelcome>(request);
  std::memcpy(welcome.boot_id.data(), options_.boot_id.data(), welcome.boot_id.size());
  Token token;
  if (getrandom(token.bytes.data(), token.bytes.size(), 0) !=
      static_cast<ssize_t>(token.bytes.size())) {
    LogError("getrandom gave no token");
    return false;
  }
  welcome.token = token.bytes;
  token.guest = {id, client.uid};
  client.token_head = HeadOf(token.bytes.data());
  {
    MutexLock lock(mu_);
    if (!tokens_.emplace(client.token_head, token).second) {
      client.token_head = 0;  // Another one's.
      return false;           // Once in 2^64 clients; it tries again.
    }
  }
  client.silent = false;
  --silent_;
  handlers_.entered(id);
  return send(client.fd.get(), &welcome, sizeof(welcome), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         sizeof(welcome);
}

bool LocalDoor::SendArena(DoorClientId id, Client& client, const DoorArenaRequest& request) {
  const absl::StatusOr<DoorClient::ArenaMemory> memory = handlers_.arena(id, request);
  if (!memory.ok()) {
    const DoorRefusal refusal = RefusalFrom(memory.status(), request.header.request);
    return send(client.fd.get(), &refusal, sizeof(refusal), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           sizeof(refusal);
  }
  auto arena = MakeDoorMessage<DoorArena>(request.header.request);
  arena.arena = request.arena;
  arena.arena_epoch = request.arena_epoch;
  arena.tier = request.tier;
  arena.arena_bytes = memory->arena_bytes;
  iovec part{&arena, sizeof(arena)};
  const int fds[kDoorDescriptorsMax] = {memory->fd.get(), memory->generations.get()};
  const std::size_t fd_bytes = (memory->generations.valid() ? 2 : 1) * sizeof(int);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(fd_bytes);
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fd_bytes);
  std::memcpy(CMSG_DATA(c), fds, fd_bytes);
  return sendmsg(client.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(arena);
}

template <typename Region>
bool LocalDoor::AnswerRegion(Client& client, const Region& region, const absl::Status& taken) {
  if (!taken.ok()) {
    const DoorRefusal refusal = RefusalFrom(taken, region.header.request);
    return send(client.fd.get(), &refusal, sizeof(refusal), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           sizeof(refusal);
  }
  auto answer = MakeDoorMessage<DoorRegionTaken>(region.header.request);
  answer.registration = region.registration;
  answer.region = region.region;
  return send(client.fd.get(), &answer, sizeof(answer), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         sizeof(answer);
}

void LocalDoor::Drop(DoorClientId id) {
  const auto it = clients_.find(id);
  const Client& client = it->second;
  const bool silent = client.silent;
  if (silent) --silent_;
  if (--clients_of_uid_[client.uid] == 0) clients_of_uid_.erase(client.uid);
  if (!silent) {
    MutexLock lock(mu_);
    tokens_.erase(client.token_head);
  }
  HangUp(std::move(it->second.fd));
  clients_.erase(it);  // Closes the pidfd, which so leaves epoll.
  if (!silent) handlers_.left(id);
}

void LocalDoor::HangUp(OwnedFd fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd.get(), nullptr);  // It may stay open for a while.
  closer_.HangUp(std::move(fd));
}

void LocalDoor::DropSilent() {
  if (silent_ == 0) return;
  const std::int64_t now_nanos = clock_.MonotonicNanos();
  for (auto it = clients_.begin(); it != clients_.end();) {
    const DoorClientId id = it->first;
    Client& client = it->second;
    ++it;
    if (now_nanos - client.connected_nanos < options_.silent_nanos_max) break;  // By age.
    // Its hello may have come since the round began: this thread may have been held up for longer
    // than a client may be silent.
    if (client.silent && (!Receive(id, client) || client.silent)) Drop(id);
  }
}

}  // namespace kvmill
