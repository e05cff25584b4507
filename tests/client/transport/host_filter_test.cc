// The kernel's verdict on the programs of client/transport/host_filter.h: real sockets, in a
// network of their own where that can be had.
#include "client/transport/host_filter.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/transport/host_signatures.h"
#include "client/transport/own_hosts.h"
#include "client/transport/port_guard.h"
#include "client/transport/socket_address.h"
#include "client/transport/transport.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

SocketAddress ToSocket(const HostAddress& host, std::uint16_t port) {
  SocketAddress address;
  if (host.ipv6) {
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint32_t word = htonl(host.words[i]);
      std::memcpy(v6->sin6_addr.s6_addr + 4 * i, &word, sizeof(word));
    }
    address.bytes = sizeof(*v6);
  } else {
    auto* const v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(host.words[3]);
    address.bytes = sizeof(*v4);
  }
  return address.WithPort(port);
}

HostAddress Host(absl::string_view text) {
  const auto host = ParseHost(text);
  EXPECT_TRUE(host.ok()) << host.status();
  return host.ok() ? *host : HostAddress{};
}

// A socket that listens at `own`.
class Listener {
 public:
  explicit Listener(const HostAddress& own) : own_(own) {
    fd_ = socket(own.ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const SocketAddress address = ToSocket(own, 0);
    EXPECT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes), 0)
        << std::strerror(errno);
    EXPECT_EQ(listen(fd_, 1024), 0);
  }
  ~Listener() { close(fd_); }
  int fd() const { return fd_; }
  std::uint16_t port() const {
    SocketAddress address;
    address.bytes = sizeof(address.storage);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes);
    return address.port();
  }
  // Which of `sources` get a connection. Strangers are not refused: nobody answers them.
  std::vector<bool> Reached(const std::vector<HostAddress>& sources) const {
    std::vector<pollfd> polls;
    const SocketAddress target = ToSocket(own_, port());
    for (const HostAddress& source : sources) {
      const int fd =
          socket(source.ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      const int on = 1;
      if (source.ipv6) setsockopt(fd, IPPROTO_IPV6, IPV6_FREEBIND, &on, sizeof(on));
      const SocketAddress own = ToSocket(source, 0);
      EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&own.storage), own.bytes), 0)
          << own.ToString() << ": " << std::strerror(errno);
      connect(fd, reinterpret_cast<const sockaddr*>(&target.storage), target.bytes);
      polls.push_back({.fd = fd, .events = POLLOUT, .revents = 0});
    }
    usleep(100'000);  // Within a host it takes microseconds.
    EXPECT_GE(poll(polls.data(), polls.size(), 0), 0);
    std::vector<bool> reached;
    for (const pollfd& poll : polls) {
      reached.push_back((poll.revents & POLLOUT) != 0 && (poll.revents & POLLERR) == 0);
      close(poll.fd);
    }
    for (;;) {  // Room for the next ones.
      fcntl(fd_, F_SETFL, O_NONBLOCK);
      const int accepted = accept(fd_, nullptr, nullptr);
      if (accepted < 0) break;
      close(accepted);
    }
    return reached;
  }

 private:
  const HostAddress own_;
  int fd_ = -1;
};

class HostFilterTest : public ::testing::Test {
 protected:
  // An own network, so that addresses can be had: IPv4's loopback has 16 million of them.
  static void SetUpTestSuite() {
    if (unshare(CLONE_NEWNET) != 0) return;
    if (std::system("ip link set lo up 2>/dev/null") != 0) GTEST_FAIL() << "no loopback";
    ipv6_ = std::system(
                "ip -6 route add local fd77::/16 dev lo 2>/dev/null && "
                "ip -6 addr add fd77::1/128 dev lo nodad 2>/dev/null") == 0;
  }
  static bool ipv6_;

  // Random hosts, many of which have words in common; and neighbors of theirs.
  static HostAddress Random(bool ipv6, std::mt19937_64* random) {
    HostAddress host;
    host.ipv6 = ipv6;
    const auto word = [&](std::uint32_t mask) {
      return static_cast<std::uint32_t>((*random)()) & mask;
    };
    // High and low values: the program compares without a sign, and JITs differ there.
    if (!ipv6) {
      host.words[3] = 0x7F000000 | 0x00010000 | word(0x00FF0FFF);
    } else {
      host.words = {0xFD770000 | word(1), word(3), word(0x80000001), word(0x8000000F)};
      host.words[3] |= 0x100;
    }
    return host;
  }

  using LetIn = std::function<absl::Status(int fd, const std::vector<HostAddress>& hosts)>;
  void CheckVerdicts(bool ipv6, const std::vector<std::size_t>& counts, const LetIn& let_in_only) {
    std::mt19937_64 random(7);
    Listener listener(ipv6 ? Host("fd77::1") : Host("127.0.0.1"));
    for (const std::size_t count : counts) {
      std::vector<HostAddress> admitted;
      for (std::size_t i = 0; i < count; ++i) admitted.push_back(Random(ipv6, &random));
      std::vector<HostAddress> with_others = admitted;  // Of the other family: they change nothing.
      if (count > 2 && count < 100) with_others.push_back(Host(ipv6 ? "127.0.0.1" : "fd77::1"));
      const absl::Status attached = let_in_only(listener.fd(), with_others);
      ASSERT_TRUE(attached.ok()) << attached;
      std::vector<HostAddress> sources = admitted;
      for (std::size_t i = 0; i < 60; ++i) {
        HostAddress near = admitted.empty() ? Random(ipv6, &random) : admitted[i % admitted.size()];
        near.words[ipv6 ? i % 3 + 1 : 3] ^= std::uint32_t{1} << random() % 12;
        sources.push_back(near);
        sources.push_back(Random(ipv6, &random));
      }
      const std::vector<bool> reached = listener.Reached(sources);
      std::size_t let_in = 0;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const bool want = std::find(admitted.begin(), admitted.end(), sources[i]) != admitted.end();
        EXPECT_EQ(reached[i], want) << ToSocket(sources[i], 0).ToString() << " of " << count;
        let_in += want ? 1 : 0;
      }
      EXPECT_GE(let_in, count);
      EXPECT_LT(let_in, sources.size());
    }
  }
};
bool HostFilterTest::ipv6_ = false;

TEST_F(HostFilterTest, HostsAreReadAsTheyAreWritten) {
  EXPECT_EQ(Host("10.1.2.3").words[3], 0x0A010203u);
  EXPECT_EQ(Host("::ffff:10.1.2.3"), Host("10.1.2.3"));
  EXPECT_EQ(Host("[fe80::1%eth0]"), Host("fe80::1"));
  EXPECT_EQ(Host("fd77::1:2").words, (std::array<std::uint32_t, 4>{0xFD770000, 0, 0, 0x00010002}));
  EXPECT_FALSE(Host("fd77::1") == Host("0.0.0.1"));
  EXPECT_TRUE(Host("127.9.9.9").is_loopback() && Host("::1").is_loopback());
  EXPECT_FALSE(Host("126.255.255.255").is_loopback() || Host("::2").is_loopback());
  for (const char* const bad : {"", "host", "10.1.2", "10.1.2.3:80", "0.0.0.0", "::", "224.0.0.1",
                                "255.255.255.255", "ff02::1", "[fd77::1]:1"}) {
    const auto host = ParseHost(bad);
    EXPECT_EQ(host.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(host.status().message()), HasSubstr(bad));
  }
}

absl::Status Filter(int fd, const std::vector<HostAddress>& hosts) {
  return AttachHostFilter(fd, HostFilterProgram(hosts));
}

TEST_F(HostFilterTest, OnlyAdmittedHostsOfIpv4GetThrough) {
  CheckVerdicts(false, {0, 1, 2, 8, 9, 40, 128}, Filter);
}

TEST_F(HostFilterTest, OnlyAdmittedHostsOfIpv6GetThrough) {
  if (!ipv6_) GTEST_SKIP() << "needs root and the program ip (package iproute2)";
  CheckVerdicts(true, {0, 1, 2, 8, 9, 40, 128}, Filter);
}

TEST_F(HostFilterTest, SignaturesAreDemandedOfAllOthers) {
  for (const bool ipv6 : {false, true}) {
    if (ipv6 && !ipv6_) continue;
    std::set<HostRange> had;
    // From few to many and back: keys come and go.
    CheckVerdicts(ipv6,
                  ipv6 ? std::vector<std::size_t>{0, 1, 3, 2, 0}
                       : std::vector<std::size_t>{0, 1, 2, 14, 3, 0},
                  [&](int fd, const std::vector<HostAddress>& hosts) {
                    const std::set<HostRange> wanted = AllBut(hosts, ipv6);
                    const absl::Status status = DemandSignatures(fd, had, wanted);
                    had = wanted;
                    return status;
                  });
  }
}

TEST_F(HostFilterTest, SignaturesThatFindNoRoomChangeNothing) {
  Listener listener(Host("127.0.0.1"));
  const std::set<HostRange> few = AllBut({Host("127.0.0.1")}, false);
  EXPECT_EQ(few.size(), 32u);
  ASSERT_TRUE(DemandSignatures(listener.fd(), {}, few).ok());
  std::vector<HostAddress> many;
  std::mt19937_64 random(3);
  for (int i = 0; i < 4000; ++i) many.push_back(Random(false, &random));
  EXPECT_EQ(DemandSignatures(listener.fd(), few, AllBut(many, false)).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(listener.Reached({Host("127.0.0.1"), many[0], many[3999]}),
            (std::vector<bool>{true, false, false}));
}

TEST_F(HostFilterTest, TheLargestProgramsFitIntoWhatKernelsTake) {
  std::vector<HostAddress> hosts;
  for (std::uint32_t i = 0; i < kAdmittedHostsMax; ++i) {
    // No two have a word in common, and all look negative.
    hosts.push_back({.ipv6 = true, .words = {~i, ~(i * 977), ~(i * 7919), ~(i * 104729)}});
  }
  // The kernel turns an instruction into up to two of 8 bytes, and Linux before 6.7 has room for
  // 20480 bytes; the loads are longer.
  EXPECT_LT(HostFilterProgram(hosts).size() * 2 * 8 + 1000, 20480u);
  Listener listener(Host("127.0.0.1"));
  EXPECT_TRUE(AttachHostFilter(listener.fd(), HostFilterProgram(hosts)).ok());
  EXPECT_EQ(AttachHostFilter(-1, HostFilterProgram(hosts)).code(), absl::StatusCode::kUnavailable);
}

TEST_F(HostFilterTest, TheGuardShutsWhatListensOnAPortAndNothingElse) {
  const std::vector<HostAddress> both = {Host("127.0.0.1"), Host("127.0.0.2")};
  Listener other(Host("127.0.0.1"));
  const auto port = FreePort(false, 0, 0);
  ASSERT_TRUE(port.ok()) << port.status();
  Listener listener(Host("127.0.0.1"));
  EXPECT_EQ(ListenersOn(listener.port()).size(), 1u);
  PortGuard guard;
  EXPECT_EQ(guard.Shut(*port, {}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(guard.Shut(listener.port(), ListenersOn(listener.port())).code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(guard.Admit({"127.0.0.2"}).ok());
  ASSERT_TRUE(guard.Shut(listener.port(), {}).ok());
  EXPECT_EQ(listener.Reached(both), (std::vector<bool>{false, true}));
  ASSERT_TRUE(guard.Admit({"127.0.0.1"}).ok());
  EXPECT_EQ(listener.Reached(both), (std::vector<bool>{true, false}));
  EXPECT_EQ(other.Reached(both), (std::vector<bool>{true, true}));

  EXPECT_EQ(guard.Admit({"127.0.0.2", "nobody"}).code(), absl::StatusCode::kInvalidArgument);
  std::vector<std::string> many;
  for (std::size_t i = 0; i <= kAdmittedHostsMax; ++i) many.push_back(absl::StrCat("10.0.0.", i));
  const absl::Status too_many = guard.Admit(many);
  EXPECT_EQ(too_many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(too_many.message()), HasSubstr("129 hosts"));
  EXPECT_EQ(listener.Reached(both), (std::vector<bool>{true, false})) << "an error changed that";
  ASSERT_TRUE(guard.Admit({}).ok());
  EXPECT_EQ(listener.Reached(both), (std::vector<bool>{false, false}));
}

TEST_F(HostFilterTest, WhoConnectedBeforeThePortWasShutIsNoticed) {
  Listener listener(Host("127.0.0.1"));
  const SocketAddress target = ToSocket(Host("127.0.0.1"), listener.port());
  const int early = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(early, reinterpret_cast<const sockaddr*>(&target.storage), target.bytes), 0);
  EXPECT_EQ(PortGuard().Shut(listener.port(), {}).code(), absl::StatusCode::kAborted);
  const int accepted = accept(listener.fd(), nullptr, nullptr);
  ASSERT_GE(accepted, 0);
  EXPECT_EQ(PortGuard().Shut(listener.port(), {}).code(), absl::StatusCode::kAborted);
  close(accepted);
  close(early);
  PortGuard guard;
  EXPECT_TRUE(guard.Shut(listener.port(), {}).ok());
}

TEST_F(HostFilterTest, PortsThatAreInUseAreNotFree) {
  Listener listener(Host("127.0.0.1"));
  const auto taken = FreePort(false, listener.port(), listener.port());
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kResourceExhausted);
  const auto next = FreePort(false, listener.port(),
                             static_cast<std::uint16_t>(std::min(listener.port() + 15, 65535)));
  if (listener.port() < 65535) {
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_GT(*next, listener.port());
  }
}

TEST_F(HostFilterTest, AHostKnowsItsAddresses) {
  EXPECT_EQ(HostOf("10.0.0.1:5"), "10.0.0.1");
  EXPECT_EQ(HostOf("[fd77::1]:5"), "fd77::1");
  EXPECT_EQ(HostOf("nothing"), "");
  EXPECT_TRUE(IsThisHost("127.0.0.1") && IsThisHost("::1"));
  EXPECT_FALSE(IsThisHost("192.0.2.1") || IsThisHost("host"));
  EXPECT_EQ(SourceTowards("127.0.0.1:80"), "127.0.0.1");
  EXPECT_EQ(SourcesTowards({"127.0.0.1:80", "127.0.0.1:81"}),
            (std::vector<std::string>{"127.0.0.1"}));
  EXPECT_EQ(HostsOfInterfaces({"lo"}, false), (std::vector<std::string>{"127.0.0.1"}));
  if (!ipv6_) return;
  EXPECT_TRUE(IsThisHost("fd77::1"));
  EXPECT_EQ(SourceTowards("[fd77::1]:80"), "fd77::1");
}

}  // namespace
}  // namespace kvmill::testing
