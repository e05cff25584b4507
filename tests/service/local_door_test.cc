// The local door in this process: who is let in, who is hung up on, and that nobody waits for
// another.
#include "service/local_door.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "client/door_client.h"
#include "service/callers.h"
#include "service/descriptor_closer.h"

namespace kvmill {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;
using Entering = absl::StatusOr<std::shared_ptr<const DoorPass>>;

class LocalDoorTest : public testing::Test {
 protected:
  LocalDoorTest() {
    std::string pattern = testing::TempDir() + "kvmill-door-XXXXXX";
    base_ = mkdtemp(pattern.data());
    options_.path = base_ + "/run/kvmill.sock.door";
    options_.boot_id = "0123456789abcdef";
  }
  ~LocalDoorTest() override {
    door_.reset();
    std::filesystem::remove_all(base_);
  }

  void Open() {
    Create();
    Start();
  }
  void Create(const Clock& clock = SystemClock()) {
    auto door = LocalDoor::Create(options_, clock);
    ASSERT_TRUE(door.ok()) << door.status();
    door_ = *std::move(door);
  }
  void Start() {
    LocalDoor::Handlers handlers;
    handlers.entered = [this](DoorClientId id) {
      MutexLock lock(mu_);
      inside_.insert(id);
      changed_.NotifyAll();
    };
    handlers.left = [this](DoorClientId id) {
      MutexLock lock(mu_);
      EXPECT_EQ(inside_.erase(id), 1u) << "left without having entered";
      changed_.NotifyAll();
    };
    handlers.arena =
        [this](DoorClientId,
               const DoorArenaRequest& request) -> absl::StatusOr<DoorClient::ArenaMemory> {
      if (in_request_) in_request_();
      if (request.lease != 1) return absl::NotFoundError("no such lease");
      OwnedFd fd(memfd_create("arena", MFD_CLOEXEC));
      EXPECT_EQ(ftruncate(fd.get(), 4096), 0);
      EXPECT_EQ(pwrite(fd.get(), "arena", 5, 0), 5);
      return DoorClient::ArenaMemory{std::move(fd), 4096};
    };
    handlers.region = [](const DoorPeer& peer, const DoorRegion& region, int fd) -> absl::Status {
      EXPECT_EQ(peer.uid, getuid());
      char text[6] = {};
      if (pread(fd, text, 5, 0) < 0) return absl::InvalidArgumentError("no descriptor");
      if (region.registration != 1) return absl::NotFoundError(text);
      return absl::OkStatus();
    };
    handlers.device_region = [](const DoorPeer& peer,
                                const DoorDeviceRegion& region) -> absl::Status {
      if (!peer.IsAlive()) return absl::InternalError("the peer has ended");
      return absl::AlreadyExistsError(
          absl::StrCat(peer.client != 0, " ", peer.pid, " ", peer.uid, " ", region.handle[63]));
    };
    door_->Start(std::move(handlers));
  }

  // A connection below DoorClient.
  OwnedFd Connect() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, options_.path.data(), options_.path.size());
    OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0)
        << std::strerror(errno);
    return fd;
  }
  static bool Send(const OwnedFd& fd, absl::Span<const std::byte> packet) {
    return send(fd.get(), packet.data(), packet.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(packet.size());
  }
  static bool SendWith(const OwnedFd& fd, absl::Span<const std::byte> packet,
                       const std::vector<int>& passed) {
    iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(kPassedDescriptorsMax * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!passed.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(passed.size() * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(passed.size() * sizeof(int));
      std::memcpy(CMSG_DATA(c), passed.data(), passed.size() * sizeof(int));
    }
    return sendmsg(fd.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size());
  }
  // The next packet; empty when the door hung up, or after 10 s without one (which fails).
  static std::vector<std::byte> Read(const OwnedFd& fd) {
    pollfd p{fd.get(), POLLIN, 0};
    EXPECT_EQ(poll(&p, 1, 10'000), 1) << "the door says nothing";
    std::vector<std::byte> packet(kDoorMessageBytesMax);
    const ssize_t bytes = recv(fd.get(), packet.data(), packet.size(), MSG_DONTWAIT);
    packet.resize(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
    return packet;
  }
  // What the door says before it hangs up; OK when it hung up without a word.
  static absl::Status Refusal(const OwnedFd& fd) {
    const std::vector<std::byte> packet = Read(fd);
    if (packet.empty()) return absl::OkStatus();
    const auto refusal = ParseDoorMessage<DoorRefusal>(packet);
    EXPECT_TRUE(refusal.ok()) << refusal.status();
    EXPECT_TRUE(Read(fd).empty()) << "it should have hung up";
    return StatusFrom(*refusal);
  }
  static OwnedFd Hello(OwnedFd fd) {
    EXPECT_TRUE(Send(fd, BytesOf(MakeDoorMessage<DoorHello>())));
    EXPECT_TRUE(ParseDoorMessage<DoorWelcome>(Read(fd)).ok());
    return fd;
  }

  static Entering Enter(DoorClient& client, std::chrono::milliseconds timeout) {
    std::promise<Entering> entered;
    client.Enter(std::chrono::system_clock::now() + timeout,
                 [&](Entering pass) { entered.set_value(std::move(pass)); });
    return entered.get_future().get();
  }
  static std::ptrdiff_t Descriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  }
  // Those of earlier tests may still be being closed.
  static std::ptrdiff_t SettledDescriptors() {
    std::ptrdiff_t count = Descriptors();
    for (int same = 0; same < 40; ++same) {
      usleep(5'000);
      const std::ptrdiff_t now = Descriptors();
      if (now != count) same = 0;
      count = now;
    }
    return count;
  }
  // What is not wanted is closed beside the door's thread. That of an earlier test may have been
  // closed so late that `count` had it.
  static bool WaitDescriptors(std::ptrdiff_t count) {
    const auto deadline = steady_clock::now() + std::chrono::seconds(10);
    while (Descriptors() > count && steady_clock::now() < deadline) usleep(5'000);
    EXPECT_LE(Descriptors(), count);
    return Descriptors() <= count;
  }
  std::size_t inside() {
    MutexLock lock(mu_);
    return inside_.size();
  }
  bool WaitInside(std::size_t count) {
    const auto deadline = steady_clock::now() + std::chrono::seconds(10);
    MutexLock lock(mu_);
    while (inside_.size() != count && steady_clock::now() < deadline) {
      changed_.WaitFor(mu_, std::chrono::milliseconds(50));
    }
    return inside_.size() == count;
  }

  std::string base_;
  LocalDoor::Options options_;
  std::function<void()> in_request_;  // On the door's thread, in each request for an arena.
  std::unique_ptr<LocalDoor> door_;

 private:
  Mutex mu_;
  CondVar changed_;
  std::set<DoorClientId> inside_ ABSL_GUARDED_BY(mu_);
};

TEST_F(LocalDoorTest, WhoSaysHelloGetsATokenOfItsOwnThatEndsWithTheConnection) {
  Open();
  std::atomic<std::uint64_t> lost{0};
  DoorClient one(options_.path, [&](std::uint64_t number) { lost = number; });
  DoorClient two(options_.path, [](std::uint64_t) {});
  EXPECT_EQ(one.pass(), nullptr);
  const Entering first = Enter(one, std::chrono::seconds(10));
  const Entering second = Enter(two, std::chrono::seconds(10));
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_EQ((*first)->boot_id_hex, "30313233343536373839616263646566");
  EXPECT_NE((*first)->token_hex, (*second)->token_hex);
  EXPECT_EQ(one.pass(), *first);
  const auto guest = door_->FindToken((*first)->token_hex);
  ASSERT_TRUE(guest.has_value());
  EXPECT_EQ(guest->uid, getuid());
  EXPECT_NE(guest->client, door_->FindToken((*second)->token_hex)->client);

  std::string other = (*first)->token_hex;
  other.back() = other.back() == '0' ? '1' : '0';
  EXPECT_FALSE(door_->FindToken(other).has_value()) << "the last digit counts";
  for (const std::string& wrong : {std::string(), std::string("0"), std::string(64, 'x'),
                                   (*first)->token_hex + "0", std::string(64, '0')}) {
    EXPECT_FALSE(door_->FindToken(wrong).has_value()) << wrong;
  }

  EXPECT_TRUE(WaitInside(2));
  one.Stop();
  EXPECT_TRUE(WaitInside(1));
  EXPECT_FALSE(door_->FindToken((*first)->token_hex).has_value());
  EXPECT_TRUE(door_->FindToken((*second)->token_hex).has_value());
}

TEST_F(LocalDoorTest, AClientComesBackAfterTheDoorWasGoneAndSaysWhenItIs) {
  Open();
  std::promise<std::uint64_t> lost;
  DoorClient client(options_.path, [&](std::uint64_t number) { lost.set_value(number); });
  const Entering before = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(before.ok()) << before.status();
  door_.reset();
  EXPECT_EQ(lost.get_future().get(), (*before)->number);
  EXPECT_EQ(client.pass(), nullptr);
  const Entering nobody = Enter(client, std::chrono::seconds(10));
  EXPECT_EQ(nobody.status().code(), absl::StatusCode::kUnavailable) << nobody.status();
  options_.boot_id = "fedcba9876543210";
  Open();
  const Entering after = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_GT((*after)->number, (*before)->number);
  EXPECT_NE((*after)->boot_id_hex, (*before)->boot_id_hex);
  lost = std::promise<std::uint64_t>();
  client.Refused((*before)->number);
  EXPECT_EQ(client.pass(), *after) << "an old pass that is refused does not cost the new one";
  client.Refused((*after)->number);
  EXPECT_EQ(lost.get_future().get(), (*after)->number);
  lost = std::promise<std::uint64_t>();
  EXPECT_TRUE(Enter(client, std::chrono::seconds(10)).ok());
}

TEST_F(LocalDoorTest, ADoorThatDoesNotAnswerMeetsTheDeadlines) {
  auto listener = UnixListener::Create(options_.path, UnixListener::Type::kPackets);
  ASSERT_TRUE(listener.ok());  // Nobody accepts.
  DoorClient client(options_.path, [](std::uint64_t) {});
  const auto start = steady_clock::now();
  EXPECT_EQ(Enter(client, std::chrono::milliseconds(200)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
  std::promise<Entering> cancelled;
  client.Enter(std::chrono::system_clock::now() + std::chrono::minutes(1),
               [&](Entering pass) { cancelled.set_value(std::move(pass)); });
  client.Stop();
  EXPECT_EQ(cancelled.get_future().get().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(LocalDoorTest, GarbageIsAnsweredAndHungUpOnAndOthersGoOn) {
  Open();
  DoorClient good(options_.path, [](std::uint64_t) {});
  ASSERT_TRUE(Enter(good, std::chrono::seconds(10)).ok());
  auto hello = MakeDoorMessage<DoorHello>();
  const auto send_and_hear = [&](absl::Span<const std::byte> packet) {
    const OwnedFd fd = Connect();
    EXPECT_TRUE(Send(fd, packet));
    return Refusal(fd);
  };
  const std::vector<std::byte> zeros(kDoorMessageBytesMax);
  EXPECT_THAT(send_and_hear(zeros).ToString(), HasSubstr("INVALID_ARGUMENT: door message: magic"));
  const std::vector<std::byte> longer(5000);
  EXPECT_THAT(send_and_hear(longer).ToString(), HasSubstr("5000 bytes, want at most 512"));
  EXPECT_THAT(send_and_hear(BytesOf(hello).first(9)).ToString(), HasSubstr("9 bytes"));
  for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t(kDoorVersion + 2)}) {
    hello.header.version = version;
    EXPECT_EQ(send_and_hear(BytesOf(hello)).code(), absl::StatusCode::kFailedPrecondition);
  }
  const auto request = MakeDoorMessage<DoorArenaRequest>(1);
  EXPECT_THAT(send_and_hear(BytesOf(request)).ToString(), HasSubstr("kind 4, want 1"));
  const OwnedFd inside = Hello(Connect());
  EXPECT_TRUE(Send(inside, BytesOf(MakeDoorMessage<DoorHello>())));
  EXPECT_THAT(Refusal(inside).ToString(), HasSubstr("kind 1, want 4"));
  const OwnedFd next_version = Connect();
  hello.header.version = kDoorVersion + 1;
  EXPECT_TRUE(Send(next_version, BytesOf(hello)));
  EXPECT_TRUE(ParseDoorMessage<DoorWelcome>(Read(next_version)).ok());

  EXPECT_TRUE(WaitInside(2));
  EXPECT_NE(good.pass(), nullptr);
}

TEST_F(LocalDoorTest, TheSilentGoAndMakeRoomForOthers) {
  options_.silent_max = 8;
  options_.silent_nanos_max = 300'000'000;
  Open();
  std::vector<OwnedFd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(Connect());
  DoorClient client(options_.path, [](std::uint64_t) {});
  // It is silent, too, when it gets no processor for as long.
  bool entered = false;
  for (int i = 0; i < 10 && !entered; ++i) entered = Enter(client, std::chrono::seconds(10)).ok();
  EXPECT_TRUE(entered);
  const auto start = steady_clock::now();
  for (const OwnedFd& fd : silent) EXPECT_TRUE(Refusal(fd).ok());  // Hung up, without a word.
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(8));
  EXPECT_EQ(inside(), 1u);
}

// The door's thread is held up, longer than a client may be silent, and the hello comes meanwhile.
TEST_F(LocalDoorTest, AHelloThatHasComeIsNoSilence) {
  ManualClock clock;
  Create(clock);
  std::promise<void> held_up;
  std::promise<void> go_on;
  in_request_ = [&] {
    held_up.set_value();
    go_on.get_future().wait();
  };
  Start();
  const OwnedFd inside = Hello(Connect());
  const OwnedFd late = Connect();
  const OwnedFd behind = Hello(Connect());  // The door has taken the one before it, too.
  ASSERT_TRUE(Send(inside, BytesOf(MakeDoorMessage<DoorArenaRequest>(1))));
  held_up.get_future().wait();
  clock.AdvanceNanos(options_.silent_nanos_max);
  ASSERT_TRUE(Send(late, BytesOf(MakeDoorMessage<DoorHello>())));
  go_on.set_value();
  EXPECT_TRUE(ParseDoorMessage<DoorWelcome>(Read(late)).ok());
  EXPECT_TRUE(WaitInside(3));
}

TEST_F(LocalDoorTest, ClientsAreCountedAndTheLimitIsNamed) {
  options_.clients_max = 5;
  Open();
  std::vector<OwnedFd> clients;
  for (int i = 0; i < 5; ++i) clients.push_back(Hello(Connect()));
  const absl::Status full = Refusal(Connect());
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("5 local clients: at most 5"));
  clients.pop_back();
  EXPECT_TRUE(WaitInside(4));
  clients.push_back(Hello(Connect()));
}

TEST_F(LocalDoorTest, ThousandsOfConnectionsLeaveNothingBehind) {
  Open();
  Hello(Connect());
  ASSERT_TRUE(WaitInside(0));
  const auto before = SettledDescriptors();
  for (int i = 0; i < 5000; ++i) {
    OwnedFd fd = Connect();
    if (i % 3 == 0) fd = Hello(std::move(fd));
    if (i % 3 == 1) Send(fd, BytesOf(MakeDoorMessage<DoorHello>()));
  }
  EXPECT_TRUE(WaitInside(0));
  EXPECT_TRUE(WaitDescriptors(before));
  Hello(Connect());
}

TEST_F(LocalDoorTest, WhoDoesNotReadIsHungUpOnAndNobodyWaits) {
  Open();
  const OwnedFd deaf = Hello(Connect());
  auto request = MakeDoorMessage<DoorArenaRequest>(1);
  request.lease = 1;
  const auto deadline = steady_clock::now() + std::chrono::seconds(10);
  int sent = 0;
  while (Send(deaf, BytesOf(request)) && steady_clock::now() < deadline) ++sent;
  EXPECT_TRUE(WaitInside(0));
  EXPECT_LT(sent, 5000) << "the answers to all of them were kept";
  DoorClient client(options_.path, [](std::uint64_t) {});
  EXPECT_TRUE(Enter(client, std::chrono::seconds(10)).ok());
}

TEST_F(LocalDoorTest, MemoryComesThroughAndRefusalsAreAnswers) {
  Open();
  DoorClient client(options_.path, [](std::uint64_t) {});
  const Entering pass = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(pass.ok());
  const auto ask = [&](std::uint64_t number, std::uint64_t lease) {
    auto request = MakeDoorMessage<DoorArenaRequest>();
    request.lease = lease;
    request.arena = 3;
    request.arena_epoch = 4;
    std::promise<absl::StatusOr<DoorClient::ArenaMemory>> got;
    client.RequestArena(number, request,
                        std::chrono::system_clock::now() + std::chrono::seconds(10),
                        [&](auto memory) { got.set_value(std::move(memory)); });
    return got.get_future().get();
  };
  for (int i = 0; i < 100; ++i) {
    const auto memory = ask((*pass)->number, 1);
    ASSERT_TRUE(memory.ok()) << memory.status();
    char text[5];
    EXPECT_EQ(pread(memory->fd.get(), text, 5, 0), 5);
    EXPECT_EQ(std::string(text, 5), "arena");
    EXPECT_EQ(memory->arena_bytes, 4096u);
  }
  EXPECT_EQ(ask((*pass)->number, 2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ask((*pass)->number + 1, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client.pass(), *pass) << "a refusal of one request ends nothing";
}

TEST_F(LocalDoorTest, ADeadProcessIsGoneThoughAChildHoldsItsConnection) {
  Open();
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const OwnedFd fd = Hello(Connect());
    const pid_t child = fork();
    if (child == 0) {
      pause();  // Holds a copy of the connection.
      _exit(0);
    }
    if (write(ready[1], &child, sizeof(child)) != sizeof(child)) _exit(1);
    pause();
    _exit(0);
  }
  pid_t child = 0;
  ASSERT_EQ(read(ready[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  EXPECT_TRUE(WaitInside(1));
  kill(parent, SIGKILL);
  EXPECT_TRUE(WaitInside(0));
  waitpid(parent, nullptr, 0);
  kill(child, SIGKILL);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(LocalDoorTest, CallsOnTheSocketNeedTheTokenOfTheirUser) {
  Open();
  const LocalPeers peers;
  const Callers callers(peers, *door_, getuid());
  DoorClient client(options_.path, [](std::uint64_t) {});
  const Entering pass = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(pass.ok());
  const auto caller = callers.IdentifyLocal(getuid(), (*pass)->token_hex);
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_EQ(caller->tenant, "default");
  EXPECT_NE(caller->door_client, 0u);
  EXPECT_EQ(callers.IdentifyLocal(getuid(), "").status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(callers.IdentifyLocal(getuid(), "").status().message()),
              HasSubstr(".door"));
  EXPECT_EQ(callers.IdentifyLocal(getuid(), std::string(64, 'a')).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(callers.IdentifyLocal(getuid() + 1, (*pass)->token_hex).status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(TenantOf(0, 1000), "default");
  EXPECT_EQ(TenantOf(1000, 1000), "default");
  EXPECT_EQ(TenantOf(1001, 1000), "uid-1001");
}

TEST_F(LocalDoorTest, MemoryGoesInAndDescriptorsThatNobodyWantsAreClosed) {
  Open();
  DoorClient client(options_.path, [](std::uint64_t) {});
  const Entering pass = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(pass.ok());
  EXPECT_TRUE((*pass)->process.valid());
  EXPECT_FALSE((*pass)->DaemonIsGone());
  const OwnedFd memory(memfd_create("region", MFD_CLOEXEC));
  ASSERT_EQ(pwrite(memory.get(), "bytes", 5, 0), 5);
  const auto before = SettledDescriptors();
  // Many at once: the door hangs up on who lets answers pile up.
  std::vector<std::promise<absl::Status>> taken(200);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    auto region = MakeDoorMessage<DoorRegion>();
    region.registration = 1 + i % 2;
    client.SendRegion((*pass)->number, region, memory.get(),
                      std::chrono::system_clock::now() + std::chrono::seconds(10),
                      [&taken, i](const absl::Status& status) { taken[i].set_value(status); });
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const absl::Status status = taken[i].get_future().get();
    EXPECT_EQ(status.ToString(), i % 2 == 0 ? "OK" : "NOT_FOUND: bytes");
  }
  EXPECT_EQ(client.pass(), *pass);

  // Below the client: descriptors where none belongs, and none or two where one does.
  const OwnedFd raw = Hello(Connect());
  const auto send_with = [&](absl::Span<const std::byte> packet, std::size_t count) {
    return SendWith(raw, packet, std::vector<int>(count, memory.get()));
  };
  const auto with_raw = before + 3;  // Both ends of a connection, and the process behind it.
  EXPECT_TRUE(WaitDescriptors(with_raw));
  for (int round = 0; round < 50; ++round) {
    auto request = MakeDoorMessage<DoorArenaRequest>(1);
    ASSERT_TRUE(send_with(BytesOf(request), 1 + static_cast<std::size_t>(round) % 4));
    EXPECT_EQ(StatusFrom(*ParseDoorMessage<DoorRefusal>(Read(raw))).message(), "no such lease");
    auto region = MakeDoorMessage<DoorRegion>(2);
    region.registration = 1;
    ASSERT_TRUE(send_with(BytesOf(region), 3));
    EXPECT_TRUE(ParseDoorMessage<DoorRegionTaken>(Read(raw)).ok()) << "the first counts";
    ASSERT_TRUE(send_with(BytesOf(region), 0));
    EXPECT_EQ(StatusFrom(*ParseDoorMessage<DoorRefusal>(Read(raw))).message(), "no descriptor");
  }
  EXPECT_TRUE(WaitDescriptors(with_raw));

  // As many as the kernel takes, and with a message of no bytes, after which the door hangs up.
  ASSERT_TRUE(send_with(BytesOf(MakeDoorMessage<DoorArenaRequest>(1)), kPassedDescriptorsMax));
  EXPECT_EQ(StatusFrom(*ParseDoorMessage<DoorRefusal>(Read(raw))).message(), "no such lease");
  EXPECT_TRUE(WaitDescriptors(with_raw));
  ASSERT_TRUE(send_with({}, 1));
  EXPECT_TRUE(Read(raw).empty());
  EXPECT_TRUE(WaitDescriptors(before + 1)) << "this end of the connection";
}

// A connection whose buffers are full and whose close() waits for `seconds`.
struct Lingering {
  explicit Lingering(int seconds) {
    const OwnedFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener.get(), any, bytes), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &bytes), 0);
    fd = OwnedFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), any, bytes), 0);
    peer = OwnedFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::vector<char> zeros(1 << 20);
    while (send(fd.get(), zeros.data(), zeros.size(), MSG_DONTWAIT) > 0) {
    }
    const linger on{1, seconds};
    EXPECT_EQ(setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &on, sizeof(on)), 0);
  }
  OwnedFd fd;
  OwnedFd peer;  // Reads nothing.
};

// Everything is sent before the door opens, so that it has the last copy of each descriptor.
TEST_F(LocalDoorTest, WhatTakesLongToCloseKeepsNobodyWaiting) {
  constexpr int kSeconds = 60;
  std::vector<OwnedFd> peers;
  const auto lingering = [&] {
    Lingering made(kSeconds);
    peers.push_back(std::move(made.peer));
    return std::move(made.fd);
  };
  const auto hello_message = MakeDoorMessage<DoorHello>();
  const auto hello = BytesOf(hello_message);
  const auto request = MakeDoorMessage<DoorArenaRequest>(1);
  const OwnedFd memory(memfd_create("region", MFD_CLOEXEC));
  ASSERT_EQ(pwrite(memory.get(), "bytes", 5, 0), 5);
  const auto in_time = [](const char* what, const std::function<void()>& does) {
    const auto start = steady_clock::now();
    does();
    EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(20)) << what;
  };
  const auto try_it = [&](const char* what, const std::function<bool(const OwnedFd&)>& send_it) {
    Create();
    const OwnedFd client = Connect();
    EXPECT_TRUE(send_it(client)) << what;
    in_time(what, [&] {
      Start();
      DoorClient other(options_.path, [](std::uint64_t) {});
      const Entering pass = Enter(other, std::chrono::seconds(10));
      EXPECT_TRUE(pass.ok()) << what << ": " << pass.status();
      door_.reset();
    });
  };
  const auto before = SettledDescriptors();
  try_it("with hello",
         [&](const OwnedFd& client) { return SendWith(client, hello, {lingering().get()}); });
  try_it("with a request", [&](const OwnedFd& client) {
    return Send(client, hello) && SendWith(client, BytesOf(request), {lingering().get()});
  });
  try_it("behind others", [&](const OwnedFd& client) {
    return Send(client, hello) && SendWith(client, BytesOf(MakeDoorMessage<DoorRegion>(2)),
                                           {memory.get(), memory.get(), lingering().get()});
  });
  try_it("unread, on a connection that is hung up on", [&](const OwnedFd& client) {
    return Send(client, hello.first(3)) && SendWith(client, hello, {lingering().get()});
  });
  try_it("with no bytes",
         [&](const OwnedFd& client) { return SendWith(client, {}, {lingering().get()}); });
  Create();
  {
    const OwnedFd client = Connect();
    ASSERT_TRUE(SendWith(client, hello, {lingering().get()}));
  }
  in_time("on a connection that nobody took", [&] {
    Start();
    door_.reset();
  });
  EXPECT_TRUE(WaitDescriptors(before + static_cast<std::ptrdiff_t>(peers.size())))
      << "SO_LINGER was kept";
  try_it("in a socket that was passed", [&](const OwnedFd& client) {
    int pair[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    const OwnedFd inner(pair[0]);
    const OwnedFd outer(pair[1]);
    return SendWith(inner, hello, {lingering().get()}) && SendWith(client, hello, {outer.get()});
  });
}

TEST_F(LocalDoorTest, WhatWaitsToBeClosedIsBoundedAndTheEndDoesNotWaitForIt) {
  DescriptorCloser closer;
  std::vector<Lingering> lingering;
  for (std::size_t i = 0; i < DescriptorCloser::kThreadsMax; ++i) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    lingering.emplace_back(60);
    const OwnedFd inner(pair[0]);
    ASSERT_TRUE(SendWith(inner, BytesOf(MakeDoorMessage<DoorHello>()), {lingering[i].fd.get()}));
    lingering[i].fd = OwnedFd();
    closer.Close(OwnedFd(pair[1]));
  }
  std::atomic<std::size_t> closed{0};
  std::thread caller([&] {
    for (std::size_t i = 0; i < DescriptorCloser::kWaitingMax + 100; ++i) {
      closer.Close(OwnedFd(dup(0)));
      ++closed;
    }
  });
  const auto deadline = steady_clock::now() + std::chrono::seconds(10);
  while (closed < DescriptorCloser::kWaitingMax && steady_clock::now() < deadline) usleep(1000);
  usleep(20'000);
  EXPECT_EQ(closed, DescriptorCloser::kWaitingMax);
  closer.Stop();
  caller.join();
}

TEST_F(LocalDoorTest, AHandleOfMemoryComesWithWhoSentIt) {
  Open();
  DoorClient client(options_.path, [](std::uint64_t) {});
  const Entering pass = Enter(client, std::chrono::seconds(10));
  ASSERT_TRUE(pass.ok()) << pass.status();
  EXPECT_EQ((*pass)->version, kDoorVersion);
  auto region = MakeDoorMessage<DoorDeviceRegion>();
  region.handle[63] = 77;
  std::promise<absl::Status> taken;
  client.SendDeviceRegion((*pass)->number, region,
                          std::chrono::system_clock::now() + std::chrono::seconds(10),
                          [&](const absl::Status& status) { taken.set_value(status); });
  EXPECT_EQ(taken.get_future().get().ToString(),
            absl::StrCat("ALREADY_EXISTS: 1 ", getpid(), " ", getuid(), " 77"));
}

// A daemon of the version before hangs up on what it does not know: it is not sent.
TEST_F(LocalDoorTest, AnOlderDaemonIsNotSentAHandle) {
  Open();  // And beside it an older one.
  const std::string path = options_.path + ".old";
  const OwnedFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  OwnedFd served;
  std::thread daemon([&] {
    served = OwnedFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Read(served);
    auto welcome = MakeDoorMessage<DoorWelcome>();
    welcome.header.version = kDoorDeviceRegionVersion - 1;
    EXPECT_TRUE(Send(served, BytesOf(welcome)));
  });
  DoorClient client(path, [](std::uint64_t) {});
  const Entering pass = Enter(client, std::chrono::seconds(10));
  daemon.join();
  ASSERT_TRUE(pass.ok()) << pass.status();
  absl::Status said;
  client.SendDeviceRegion((*pass)->number, MakeDoorMessage<DoorDeviceRegion>(),
                          std::chrono::system_clock::now() + std::chrono::seconds(10),
                          [&](const absl::Status& status) { said = status; });
  EXPECT_EQ(said.ToString(),
            "UNIMPLEMENTED: memory of a GPU: the daemon's door is of version 1, want 2");
  EXPECT_EQ(client.pass(), *pass);
  unlink(path.c_str());
}

}  // namespace
}  // namespace kvmill
