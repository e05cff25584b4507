// Sessions of a real daemon over time: connections that break at any moment, graces, thousands of
// registrations, neighbouring versions on every way in, and a daemon that stops under its readers.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/convert.h"
#include "client/door_protocol.h"
#include "client/mapped_blocks.h"
#include "client/transport/ucx_transport.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class SessionTest : public DaemonTest {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--host-bytes", "64MiB", "--listen", "127.0.0.1:0",
                                          "--insecure"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    DaemonTest::Start(arguments);
  }
  std::unique_ptr<Client> ClientAt(const std::string& address, std::atomic<int>* ended) const {
    Client::Options options;
    options.address = address;
    options.timeout = absl::Seconds(20);
    options.on_session_event = [ended](SessionEvent event, std::uint64_t) {
      if (event == SessionEvent::kEnded) ++*ended;
    };
    return *Client::Create(options);
  }
  std::string unix_address() const { return absl::StrCat("unix:", socket()); }
  bool WaitForSessions(std::uint64_t sessions) {
    return WaitForStat([sessions](const ServerStat& s) { return s.sessions == sessions; });
  }
  // Hangs up on every connection of this process to the daemon's TCP address.
  int CutTcp() const {
    const std::string listen = ready_["listen"];
    const int port = std::atoi(listen.substr(listen.rfind(':') + 1).c_str());
    int cut = 0;
    for (int fd = 3; fd < 512; ++fd) {
      sockaddr_in peer{};
      sockaddr_in6 mapped{};
      sockaddr_storage any{};
      socklen_t bytes = sizeof(any);
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&any), &bytes) != 0) continue;
      std::memcpy(&peer, &any, sizeof(peer));
      std::memcpy(&mapped, &any, sizeof(mapped));
      const bool there = (any.ss_family == AF_INET && ntohs(peer.sin_port) == port) ||
                         (any.ss_family == AF_INET6 && ntohs(mapped.sin6_port) == port);
      if (there && shutdown(fd, SHUT_RDWR) == 0) ++cut;
    }
    return cut;
  }
};

TEST_F(SessionTest, ARemoteSessionIsResumedAfterItsConnectionBroke) {
  Start();
  std::atomic<int> ended{0};
  const auto engine = ClientAt(ready_["listen"], &ended);
  const ClientNamespace ns = Open("n", SmallSpec());
  std::vector<std::uint64_t> registrations;
  // As long as the client has not noticed that its connection broke, or is not connected again, its
  // calls are UNAVAILABLE: whether the daemon heard them it cannot know, so it does not repeat
  // them.
  const auto until_available = [](const std::function<absl::Status()>& call) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    absl::Status status = call();
    for (; absl::IsUnavailable(status) && absl::Now() < deadline; status = call()) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    return status;
  };
  for (int round = 0; round < 5; ++round) {
    const absl::Status registered = until_available([&] {
      const auto registration = engine->RegisterMemory(ns, SmallGeometry());
      if (registration.ok()) registrations.push_back(*registration);
      return registration.status();
    });
    ASSERT_TRUE(registered.ok()) << registered;
    EXPECT_GT(CutTcp(), 0);
    EXPECT_EQ(client_->Stat()->sessions, 1u);
  }
  // The same session still has all of them.
  for (const std::uint64_t registration : registrations) {
    const absl::Status gone =
        until_available([&] { return engine->UnregisterMemory(registration); });
    EXPECT_TRUE(gone.ok()) << gone;
  }
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(client_->Stat()->sessions, 1u);
}

// A session below the client library, which would resume it.
class RawSession {
 public:
  explicit RawSession(const std::string& address, std::uint32_t version = kProtocolVersion,
                      const LocalPass* pass = nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::Engine::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    if (pass != nullptr) pass->AddTo(&context_);
    stream_ = stub_->Session(&context_);
    v1::SessionRequest open;
    open.mutable_open()->mutable_client()->set_protocol_version(version);
    v1::SessionReply reply;
    opened_ = stream_->Write(open) && stream_->Read(&reply) && reply.has_opened();
    id_ = reply.opened().session_id();
    if (!opened_) status_ = stream_->Finish();
  }
  ~RawSession() { context_.TryCancel(); }
  bool opened() const { return opened_; }
  const grpc::Status& status() const { return status_; }
  grpc::Status Register(const EngineGeometry& geometry) {
    grpc::ClientContext context;
    v1::RegisterMemoryRequest request;
    request.mutable_namespace_()->set_name("n");
    request.set_session_id(id_);
    ToProto(geometry, request.mutable_geometry());
    v1::RegisterMemoryReply reply;
    return stub_->RegisterMemory(&context, request, &reply);
  }

 private:
  std::unique_ptr<v1::Engine::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> stream_;
  bool opened_ = false;
  std::string id_;
  grpc::Status status_;
};

TEST_F(SessionTest, ARemoteSessionThatNobodyResumesEndsAGraceAfterItsConnection) {
  Start({"--session-grace", "700ms"});
  Open("n", SmallSpec());
  absl::Time cut;
  {
    RawSession session(ready_["listen"]);
    ASSERT_TRUE(session.opened()) << session.status().error_message();
    ASSERT_TRUE(session.Register(SmallGeometry()).ok());
    absl::SleepFor(absl::Seconds(1));  // Longer than the grace: it is not of sessions that live.
    EXPECT_EQ(client_->Stat()->sessions, 1u);
    cut = absl::Now();
  }
  const auto still = client_->Stat();
  ASSERT_TRUE(still.ok()) << still.status();
  if (absl::Now() - cut < absl::Milliseconds(700)) {
    EXPECT_EQ(still->sessions, 1u);
  }
  EXPECT_TRUE(WaitForSessions(0));
  EXPECT_GE(absl::Now() - cut, absl::Milliseconds(700));
}

TEST_F(SessionTest, ThousandsOfRegistrationsLeaveNothing) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  std::atomic<int> ended{0};
  const auto local = ClientAt(unix_address(), &ended);
  const auto remote = ClientAt(ready_["listen"], &ended);
  const auto cycle = [&](int count) {
    for (int i = 0; i < count; ++i) {
      Client& engine = i % 2 == 0 ? *local : *remote;
      const auto registration = engine.RegisterMemory(ns, SmallGeometry());
      ASSERT_TRUE(registration.ok()) << i << ": " << registration.status();
      ASSERT_TRUE(engine.UnregisterMemory(*registration).ok()) << i;
    }
  };
  cycle(100);
  const int descriptors = daemon_->OpenDescriptors();
  const std::uint64_t resident = daemon_->ResidentKiB();
  cycle(10'000);
  EXPECT_EQ(client_->Stat()->sessions, 2u);
  EXPECT_LE(daemon_->OpenDescriptors(), descriptors + 2);
  EXPECT_LT(daemon_->ResidentKiB(), resident + (4 << 10)) << "KiB";
  EXPECT_EQ(ended, 0);
  // All 64 places are free.
  for (int i = 0; i < 64; ++i) {
    EXPECT_TRUE(local->RegisterMemory(ns, SmallGeometry()).ok()) << i;
  }
  EXPECT_EQ(local->RegisterMemory(ns, SmallGeometry()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(SessionTest, NeighbouringVersionsTalkOnEveryWayInAndOthersAreRefusedNamingBoth) {
  Start({"--ucx", "127.0.0.1"});
  const std::string address = unix_address();
  const LocalPass pass(socket());
  grpc::ChannelArguments arguments;
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  const auto channel =
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  const auto engine = v1::Engine::NewStub(channel);
  const auto door = [&](std::uint32_t version) -> absl::Status {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, DoorPath(socket()).data(), DoorPath(socket()).size());
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    auto hello = MakeDoorMessage<DoorHello>();
    hello.header.version = static_cast<std::uint16_t>(version);
    EXPECT_EQ(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL), sizeof(hello));
    std::byte packet[kDoorMessageBytesMax];
    const ssize_t bytes = recv(fd, packet, sizeof(packet), 0);
    close(fd);
    const auto answer =
        absl::MakeConstSpan(packet, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    const auto refusal = ParseDoorMessage<DoorRefusal>(answer);
    return refusal.ok() ? StatusFrom(*refusal) : ParseDoorMessage<DoorWelcome>(answer).status();
  };
  const auto hello = [&](std::uint32_t version) {
    grpc::ClientContext context;
    pass.AddTo(&context);
    v1::HelloRequest request;
    request.mutable_client()->set_protocol_version(version);
    v1::HelloReply reply;
    return FromGrpc(engine->Hello(&context, request, &reply));
  };
  const auto open_namespace = [&](std::uint32_t version) {
    grpc::ClientContext context;
    pass.AddTo(&context);
    v1::RegisterRequest request;
    request.mutable_client()->set_protocol_version(version);
    request.set_name("n");
    ToProto(SmallSpec(), request.mutable_spec());
    v1::RegisterReply reply;
    return FromGrpc(engine->Register(&context, request, &reply));
  };
  const auto session = [&](std::uint32_t version) {
    const RawSession opened(address, version, &pass);
    return opened.opened() ? absl::OkStatus() : FromGrpc(opened.status());
  };
  const auto data = [&](std::uint32_t version) -> absl::Status {
    TransportOptions options;
    options.self.id = NodeIdentity::IdOf("of another version");
    options.version = static_cast<std::uint16_t>(version);
    options.version_min = static_cast<std::uint16_t>(std::max(version, 2u) - 1);
    const auto transport = MakeUcxTransport(options, {});
    if (!transport.ok()) return transport.status();
    grpc::ClientContext context;
    pass.AddTo(&context);
    v1::ConnectRequest request;
    request.set_node_id(std::string(reinterpret_cast<const char*>(options.self.id.data()), 16));
    v1::ConnectReply reply;
    EXPECT_TRUE(v1::Data::NewStub(channel)->Connect(&context, request, &reply).ok());
    Offer offer;
    offer.addresses.assign(reply.addresses().begin(), reply.addresses().end());
    std::memcpy(offer.node.id.data(), reply.node_id().data(), 16);
    offer.node.incarnation = reply.incarnation();
    std::memcpy(offer.key_id.data(), reply.key_id().data(), 16);
    std::memcpy(offer.key.data(), reply.key().data(), 32);
    std::promise<absl::Status> connected;
    (*transport)->Connect(offer, {.done = [&](absl::StatusOr<ConnectionPtr> connection) {
                            connected.set_value(connection.status());
                          }});
    return connected.get_future().get();
  };
  struct Way {
    const char* name;
    std::uint32_t ours;
    std::uint32_t oldest;  // Versions begin there.
    std::function<absl::Status(std::uint32_t version)> enter;
  };
  const std::uint32_t ucx = TransportOptions().version;
  for (const Way& way : {Way{"hello", kProtocolVersion, 0, hello},
                         Way{"register", kProtocolVersion, 0, open_namespace},
                         Way{"session", kProtocolVersion, 0, session},
                         Way{"door", kDoorVersion, 1, door}, Way{"ucx", ucx, 1, data}}) {
    for (std::uint32_t version = way.ours < 2 ? 0 : way.ours - 2; version <= way.ours + 2;
         ++version) {
      SCOPED_TRACE(absl::StrCat(way.name, " ", version));
      const absl::Status entered = way.enter(version);
      if (version >= way.oldest && version + 1 >= way.ours && version <= way.ours + 1) {
        EXPECT_TRUE(entered.ok()) << entered;
        continue;
      }
      if (version < way.oldest) {  // No version at all.
        EXPECT_FALSE(entered.ok());
        continue;
      }
      EXPECT_EQ(entered.code(), absl::StatusCode::kFailedPrecondition) << entered;
      EXPECT_THAT(std::string(entered.message()), HasSubstr(absl::StrCat(version)));
      EXPECT_THAT(std::string(entered.message()), HasSubstr(absl::StrCat(way.ours)));
    }
  }
}

TEST_F(SessionTest, ReadersOfADaemonThatStopsAreToldSo) {
  Start({"--drain-timeout", "1ms"});
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 1);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 4u);
  std::atomic<int> ended{0};
  const auto reader = ClientAt(unix_address(), &ended);
  const auto mapped = reader->Map(ns, KeysOf("s", 4), {.lease = absl::Seconds(60)});
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  // Calls of all kinds are under way when it comes.
  std::vector<std::thread> callers;
  std::atomic<int> running{0};
  for (int kind = 0; kind < 4; ++kind) {
    callers.emplace_back([&, kind] {
      PageCollector pages;
      for (absl::Status status; status.ok(); ++running) {
        const auto more = reader->Map(ns, KeysOf("s", 4));
        if (kind == 0) status = reader->Renew(**mapped, absl::Seconds(60));
        if (kind == 1) status = more.status();
        if (kind == 2) status = reader->Fetch(ns, KeysOf("s", 4), pages).status();
        if (kind == 3) status = reader->Store(ns, sequence.Blocks("t"), {}).status();
        if (status.ok()) continue;
        EXPECT_TRUE(absl::IsUnavailable(status) || (kind == 0 && absl::IsAborted(status)))
            << kind << ": " << status;
      }
    });
  }
  while (running < 100) usleep(1000);
  daemon_->Signal(SIGTERM);
  for (int i = 0; i < 30'000 && (*mapped)->Check().ok(); ++i) usleep(1000);
  const absl::Status told = (*mapped)->Check();
  EXPECT_TRUE(absl::IsAborted(told)) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("session"));
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
  EXPECT_GE(ended, 1);
}

}  // namespace
}  // namespace kvmill::testing
