// Who reaches the ports that UCX opens, in the daemon and in its clients: hosts that asked for it
// over gRPC, while they are there. UCX 1.13 ends its process when a stranger gets through and sends
// what it does not expect, which is what the daemons here would do.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <system_error>

#include "client/transport/own_hosts.h"
#include "client/transport/ucx_transport.h"
#include "kvmill/v1/data.grpc.pb.h"
#include "tests/integration/ucx_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr const char* kClientHost = "127.0.0.1";
constexpr const char* kStranger = "127.0.0.2";

// Ports on which process `pid` listens at `kClientHost`, as the kernel's table says. Others of this
// host may have neighbouring ones.
std::set<std::uint16_t> ListeningPorts(pid_t pid) {
  std::set<std::string> own;  // Inodes of sockets.
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::uint16_t> ports;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string slot, local, remote, state, skipped, inode;
    words >> slot >> local >> remote >> state;
    for (int i = 0; i < 5; ++i) words >> skipped;
    words >> inode;
    constexpr const char* kLoopback = "0100007F:";
    if (state != "0A" || local.rfind(kLoopback, 0) != 0 || own.count(inode) == 0) continue;
    ports.insert(static_cast<std::uint16_t>(std::stoul(local.substr(9), nullptr, 16)));
  }
  return ports;
}

// How many of `count` connections from `source` come about; each sends `bytes` at once if it can.
int Reach(const char* source, std::uint16_t port, int count = 1, absl::string_view bytes = "") {
  std::vector<pollfd> polls;
  for (int i = 0; i < count; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in own{};
    own.sin_family = AF_INET;
    inet_pton(AF_INET, source, &own.sin_addr);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
    sockaddr_in target{};
    target.sin_family = AF_INET;
    target.sin_port = htons(port);
    inet_pton(AF_INET, kClientHost, &target.sin_addr);
    connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
    polls.push_back({.fd = fd, .events = POLLOUT, .revents = 0});
  }
  usleep(100'000);  // Within a host it takes microseconds.
  EXPECT_GE(poll(polls.data(), polls.size(), 0), 0);
  int reached = 0;
  for (const pollfd& poll : polls) {
    if ((poll.revents & POLLOUT) != 0 && (poll.revents & (POLLERR | POLLHUP)) == 0) {
      ++reached;
      EXPECT_GE(send(poll.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    }
    close(poll.fd);
  }
  return reached;
}

class UcxAdmissionTest : public UcxDaemonTest {
 protected:
  // The listening port and the data port.
  std::vector<std::uint16_t> DaemonPorts() const {
    const auto address = ParseHostPort(ready_["ucx"].get<std::string>());
    EXPECT_TRUE(address.ok()) << address.status();
    std::vector<std::uint16_t> found;
    for (const std::uint16_t port : ListeningPorts(daemon_->pid())) {
      if (port >= address->port && port <= address->port + kDataPortsMax) found.push_back(port);
    }
    EXPECT_THAT(found, SizeIs(2));
    return found;
  }
  void ExpectServing(Client& client, const std::string& name) {
    const ClientNamespace ns = Open("n", SmallSpec());
    Sequence sequence(SmallSpec(), 64 * 20, 3);
    const auto stored = client.Store(ns, sequence.Blocks(name), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks_stored, 20u);
    PageCollector pages;
    const auto fetched = client.Fetch(ns, KeysOf(name, 20), pages);
    ASSERT_TRUE(fetched.ok()) << fetched.status();
    EXPECT_THAT(pages.pages, SizeIs(40));
  }
  grpc::Status Ask(const std::vector<std::string>& sources, v1::ConnectReply* reply) const {
    const auto stub = v1::Data::NewStub(grpc::CreateChannel(ready_["listen"].get<std::string>(),
                                                            grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::ConnectRequest request;
    request.set_node_id(std::string(16, 'n'));
    for (const std::string& source : sources) request.add_sources(source);
    return stub->Connect(&context, request, reply);
  }
};

TEST_F(UcxAdmissionTest, StrangersReachNeitherPortWhateverTheySend) {
  StartUcx();
  const std::vector<std::uint16_t> ports = DaemonPorts();
  ASSERT_THAT(ports, SizeIs(2));
  for (const std::uint16_t port : ports) {
    EXPECT_EQ(Reach(kClientHost, port), 0) << "before it asked";
    EXPECT_EQ(Reach(kStranger, port), 0);
  }
  EXPECT_EQ(Metric("data_hosts"), 0);
  const auto client = UcxClient();
  ExpectServing(*client, "a");
  EXPECT_EQ(Metric("data_hosts"), 1);

  std::mt19937_64 random(5);
  std::string garbage(4096, '\0');
  for (char& c : garbage) c = static_cast<char>(random());
  // UCX's TCP frames: an active message's id, then its length, then the message. 29 is a PUT,
  // whose message is an address of this process, a length and a number.
  std::string put(1, 29);
  const std::uint32_t put_bytes = 24;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(&put);
  put.append(reinterpret_cast<const char*>(&put_bytes), sizeof(put_bytes));
  put.append(reinterpret_cast<const char*>(&address), sizeof(address));
  put.append(std::string(64, '\x40'));
  const std::string frame = std::string(1, '\x02') + std::string(4, '\xFF') + garbage;
  for (const std::uint16_t port : ports) {
    for (const std::string& bytes : {garbage.substr(0, 64), garbage, put, frame}) {
      EXPECT_EQ(Reach(kStranger, port, 50, bytes), 0) << port;
    }
    EXPECT_EQ(Reach(kStranger, port, 500, garbage), 0) << "a flood";
  }
  ExpectServing(*client, "b");
  EXPECT_EQ(Metric("data_connections"), 1);
}

TEST_F(UcxAdmissionTest, AHostIsLetInWhileItHasAConnection) {
  StartUcx();
  const std::vector<std::uint16_t> ports = DaemonPorts();
  ASSERT_THAT(ports, SizeIs(2));
  auto first = UcxClient();
  auto second = UcxClient();
  ExpectServing(*first, "a");
  ExpectServing(*second, "b");
  for (const std::uint16_t port : ports) EXPECT_EQ(Reach(kClientHost, port), 1);
  first.reset();
  ExpectIdle(1);
  ExpectServing(*second, "c");
  for (const std::uint16_t port : ports) EXPECT_EQ(Reach(kClientHost, port), 1);
  second.reset();
  ExpectIdle(0);
  EXPECT_TRUE(Eventually([&] { return Metric("data_hosts") == 0; }));
  for (const std::uint16_t port : ports) EXPECT_EQ(Reach(kClientHost, port), 0);
  ExpectServing(*UcxClient(), "d");
}

TEST_F(UcxAdmissionTest, LocalClientsComeFromTheAddressThatTheyGoTo) {
  StartUcx();
  const auto client = UcxClient({.address = absl::StrCat("unix:", socket())});
  ExpectServing(*client, "a");
  EXPECT_EQ(Metric("data_hosts"), 1);
}

TEST_F(UcxAdmissionTest, HostsThatACallerNamesAreLetInToo) {
  StartUcx();
  const std::vector<std::uint16_t> ports = DaemonPorts();
  v1::ConnectReply reply;
  ASSERT_TRUE(Ask({"127.0.0.3"}, &reply).ok());
  EXPECT_THAT(std::vector<std::string>(reply.admitted().begin(), reply.admitted().end()),
              ::testing::IsSupersetOf({kClientHost, "127.0.0.3"}));
  EXPECT_THAT(std::vector<std::string>(reply.sources().begin(), reply.sources().end()),
              ::testing::ElementsAre(kClientHost));
  for (const std::uint16_t port : ports) {
    EXPECT_EQ(Reach("127.0.0.3", port), 1);
    EXPECT_EQ(Reach(kStranger, port), 0);
  }
  const auto expect = [&](const std::vector<std::string>& sources, grpc::StatusCode code,
                          const char* text) {
    const grpc::Status status = Ask(sources, &reply);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  };
  expect({"somewhere"}, grpc::StatusCode::INVALID_ARGUMENT, "\"somewhere\"");
  expect({"0.0.0.0"}, grpc::StatusCode::INVALID_ARGUMENT, "\"0.0.0.0\"");
  expect(std::vector<std::string>(9, "10.0.0.1"), grpc::StatusCode::INVALID_ARGUMENT,
         "9 sources, at most 8");
  std::vector<std::string> some;
  for (int i = 0; i < 8; ++i) some.push_back(absl::StrCat("10.0.0.", i + 1));
  EXPECT_TRUE(Ask(some, &reply).ok());
  for (std::string& host : some) host = absl::StrCat(host, "1");
  expect(some, grpc::StatusCode::RESOURCE_EXHAUSTED, "at most 16");
  EXPECT_EQ(Metric("data_hosts"), 10) << "refusals let nobody in";
}

TEST_F(UcxAdmissionTest, AClientsOwnPortIsOpenToItsDaemonOnly) {
  StartUcx();
  const std::set<std::uint16_t> before = ListeningPorts(getpid());
  const auto client = UcxClient();
  ExpectServing(*client, "a");
  std::vector<std::uint16_t> own;
  for (const std::uint16_t port : ListeningPorts(getpid())) {
    if (before.count(port) == 0) own.push_back(port);
  }
  ASSERT_THAT(own, ::testing::Not(IsEmpty()));
  for (const std::uint16_t port : own) {
    EXPECT_EQ(Reach(kClientHost, port), 1);
    EXPECT_EQ(Reach(kStranger, port, 100, std::string(64, 'x')), 0);
  }
  ExpectServing(*client, "b");
}

TEST_F(UcxAdmissionTest, ADaemonThatWasKilledOpensItsPortsAgainAtOnce) {
  StartUcx();
  const std::string address = ready_["ucx"].get<std::string>();
  for (int round = 0; round < 3; ++round) {
    const auto client = UcxClient();
    ExpectServing(*client, "a");
    Kill();
    StartUcx({}, address);
    EXPECT_EQ(ready_["ucx"].get<std::string>(), address);
    EXPECT_THAT(DaemonPorts(), SizeIs(2));
  }
}

TEST_F(UcxAdmissionTest, APortWithoutRoomForADataPortIsRefused) {
  std::vector<std::string> arguments = DefaultArguments();
  arguments.insert(arguments.end(), {"--ucx", "127.0.0.1:65530"});
  DaemonProcess daemon(DaemonBinary(), arguments);
  EXPECT_EQ(daemon.WaitExit().code, 2);
  EXPECT_THAT(daemon.standard_error(), HasSubstr("port 65530: want at most 65520"));
}

}  // namespace
}  // namespace kvmill::testing
