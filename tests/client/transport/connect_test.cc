// How connections come about and end: offers, handshakes, addresses; over UCX and in memory.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>

#include "tests/client/transport/transport_fixture.h"

namespace kvmill::testing {
namespace {

class ConnectTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  ConnectTest() : pair(GetParam()) {}
  void TearDown() override { pair.ExpectIdle(); }
  Pair pair;
};

INSTANTIATE_TEST_SUITE_P(All, ConnectTest,
                         ::testing::Values(TransportKind{true, true}, TransportKind{true, false},
                                           TransportKind{false, true}, TransportKind{false, false}),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(ConnectTest, ConnectionsKnowTheirPeer) {
  pair.Make();
  const ConnectionPtr connection = pair.Connect(77);
  EXPECT_EQ(connection->info().peer, pair.server_options.self);
  EXPECT_EQ(connection->info().encrypted, !GetParam().plaintext);
  EXPECT_TRUE(connection->info().dialed);
  EXPECT_EQ(connection->info().version, 1);
  EXPECT_FALSE(connection->info().slower_than_expected);
  EXPECT_THAT(connection->info().transport,
              ::testing::StartsWith(GetParam().ucx ? "tcp/" : "fake/"));
  EXPECT_EQ(connection->info().address, pair.server->addresses()[0]);
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.connections().size() == 1; }));
  const ConnectionInfo& info = pair.server_handler.connections()[0]->info();
  EXPECT_EQ(info.peer, pair.client_options.self);
  EXPECT_EQ(info.owner_tag, 77u);
  EXPECT_FALSE(info.dialed);
  EXPECT_EQ(pair.server->stats().offers, 0u);
}

TEST_P(ConnectTest, OffersAreGoodOnce) {
  pair.Make();
  const Offer offer = *pair.server->MakeOffer(1);
  EXPECT_TRUE(pair.TryConnect(offer).ok());
  const absl::Status again = pair.TryConnect(offer).status();
  EXPECT_EQ(again, absl::UnauthenticatedError("the offer was used before"));

  Offer wrong_key = *pair.server->MakeOffer(1);
  wrong_key.key[5] ^= std::byte{1};
  EXPECT_EQ(pair.TryConnect(wrong_key).status().code(), absl::StatusCode::kUnauthenticated);
  wrong_key.key[5] ^= std::byte{1};
  EXPECT_TRUE(pair.TryConnect(wrong_key).ok());  // Guessing does not use it up.

  Offer unknown = *pair.server->MakeOffer(1);
  unknown.key_id[0] ^= std::byte{1};
  EXPECT_EQ(pair.TryConnect(unknown).status().code(), absl::StatusCode::kUnauthenticated);

  const Offer for_other = *pair.server->MakeOffer(1, NodeIdentity::IdOf("somebody else"));
  EXPECT_EQ(pair.TryConnect(for_other).status().code(), absl::StatusCode::kUnauthenticated);
  const Offer for_us = *pair.server->MakeOffer(1, pair.client_options.self.id);
  EXPECT_TRUE(pair.TryConnect(for_us).ok());
  EXPECT_TRUE(pair.WaitFor([&] { return pair.server->stats().handshakes_refused == 4; }));
}

TEST_P(ConnectTest, OffersAreBounded) {
  pair.server_options.limits.offers_max = 3;
  pair.Make();
  for (const std::uint64_t tag : {1u, 2u, 3u}) EXPECT_TRUE(pair.server->MakeOffer(tag).ok());
  EXPECT_EQ(pair.server->MakeOffer(4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pair.client->MakeOffer(1).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(ConnectTest, OffersExpireAndMakeRoom) {
  pair.server_options.offer_nanos = 30 * kMilli;
  pair.server_options.limits.offers_max = 1;
  pair.Make();
  for (const std::uint64_t tag : {1u, 2u}) {
    const absl::StatusOr<Offer> offer = pair.server->MakeOffer(tag);
    ASSERT_TRUE(offer.ok()) << offer.status();
    pair.Pass(40 * kMilli);
    EXPECT_EQ(pair.TryConnect(*offer).status().code(), absl::StatusCode::kUnauthenticated);
  }
}

TEST_P(ConnectTest, AnotherIncarnationOnTheSameAddressIsNoticed) {
  pair.Make();
  Offer offer = *pair.server->MakeOffer(1);
  ++offer.node.incarnation;
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kAborted);
  offer = *pair.server->MakeOffer(1);
  offer.node.id = NodeIdentity::IdOf("another");
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kAborted);
}

TEST_P(ConnectTest, VersionsOneApartUnderstandEachOther) {
  struct Case {
    std::uint16_t client, server;
    int chosen;  // 0: refused.
  };
  for (const Case& c :
       {Case{7, 7, 7}, Case{6, 7, 6}, Case{7, 6, 6}, Case{5, 7, 0}, Case{7, 5, 0}, Case{9, 7, 0}}) {
    Pair both(GetParam());
    both.client_options.version = c.client;
    both.client_options.version_min = static_cast<std::uint16_t>(c.client - 1);
    both.server_options.version = c.server;
    both.server_options.version_min = static_cast<std::uint16_t>(c.server - 1);
    both.Make();
    const absl::StatusOr<ConnectionPtr> connection = both.TryConnect(*both.server->MakeOffer(1));
    if (c.chosen == 0) {
      EXPECT_EQ(connection.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(connection.status().message()),
                  ::testing::HasSubstr("speaks versions"));
    } else {
      ASSERT_TRUE(connection.ok()) << connection.status();
      EXPECT_EQ((*connection)->info().version, c.chosen);
      EXPECT_TRUE(both.Wait(both.Start(*connection, "echo")).ok());
    }
  }
}

TEST_P(ConnectTest, BothSidesEncryptOrNone) {
  pair.client_options.plaintext = !GetParam().plaintext;
  pair.Make();
  const absl::Status status = pair.TryConnect(*pair.server->MakeOffer(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("plaintext"));
}

TEST_P(ConnectTest, TheNextAddressIsTriedWhereNobodyAnswers) {
  pair.Make();
  Offer offer = *pair.server->MakeOffer(1);
  const std::string nobody = GetParam().ucx ? "127.0.0.1:1" : "nobody";
  offer.addresses.insert(offer.addresses.begin(), nobody);
  EXPECT_TRUE(pair.TryConnect(offer).ok());
  offer = *pair.server->MakeOffer(1);
  offer.addresses = {nobody};
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kUnavailable);
  offer.addresses = {};
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kInvalidArgument);
}

// An IPv6 address of this machine that is neither loopback nor link-local; empty when it has none.
std::string GlobalIpv6Address() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET6) continue;
    const auto* const address = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr);
    if (IN6_IS_ADDR_LOOPBACK(&address->sin6_addr) || IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) {
      continue;
    }
    std::array<char, INET6_ADDRSTRLEN> text{};
    inet_ntop(AF_INET6, &address->sin6_addr, text.data(), text.size());
    found = text.data();
  }
  freeifaddrs(all);
  return found;
}

TEST(UcxAddressTest, Ipv6) {
  const std::string address = GlobalIpv6Address();
  if (address.empty()) GTEST_SKIP() << "this machine has no IPv6 address";
  ScriptedHandler handler;
  TransportOptions options;
  options.self = {NodeIdentity::IdOf("server"), 11};
  options.handler = &handler;
  const auto server = MakeUcxTransport(
      options, {.listen = {"[" + address + "]:0"}, .family = AddressFamily::kIpv6});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->addresses()[0], ::testing::StartsWith("[" + address + "]:"));
  Pair pair(TransportKind{true, false});
  pair.client = *MakeUcxTransport(pair.client_options, {.family = AddressFamily::kIpv6});
  const absl::StatusOr<ConnectionPtr> connection = pair.TryConnect(*(*server)->MakeOffer(1));
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ((*connection)->info().address, (*server)->addresses()[0]);
  const std::vector<std::byte> data = RandomData(1'000'000, 1);
  const CallResultPtr result = pair.Start(*connection, "echo", data);
  EXPECT_TRUE(pair.Wait(result).ok()) << result->status();
  EXPECT_TRUE(result->destination == data);
}

TEST(UcxAddressTest, WhatUcxCannotUseIsRefusedByName) {
  TransportOptions options;
  const auto code = [&](const UcxOptions& ucx) {
    return MakeUcxTransport(options, ucx).status().code();
  };
  const auto bad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code({.listen = {"localhost:0"}}), bad);
  EXPECT_EQ(code({.listen = {"[fd00::2]:0"}}), bad);  // Of the other family.
  EXPECT_EQ(code({.listen = {"127.0.0.1:0"}, .family = AddressFamily::kIpv6}), bad);
  EXPECT_EQ(code({.listen = {"[::1]:0"}, .family = AddressFamily::kIpv6}), bad);
  EXPECT_EQ(code({.listen = {"0.0.0.0:0"}}), bad);
  EXPECT_EQ(code({.listen = {"127.0.0.1:0"}, .advertise = {"1.2.3.4", "1.2.3.5"}}), bad);
  EXPECT_EQ(code({.listen = {"192.0.2.77:0"}}), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code({.listen = {}, .settings = {{"NET_DEVICES", "nowhere0"}}}),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code({.tls = "self"}), absl::StatusCode::kOk);  // TCP is added.
}

// Local addresses of the listening IPv4 sockets of this process, as /proc/net/tcp writes them.
std::set<std::string> ListeningAddresses() {
  std::set<std::string> own;  // Inodes of sockets.
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::string> addresses;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string number, local, remote, state, skipped, inode;
    fields >> number >> local >> remote >> state;
    for (int i = 0; i < 5; ++i) fields >> skipped;
    fields >> inode;
    constexpr const char* kListening = "0A";
    if (state == kListening && own.contains(inode)) addresses.insert(local.substr(0, 8));
  }
  return addresses;
}

TEST(UcxAddressTest, OnlyTheInterfacesThatAreNamedAreListenedOn) {
  const std::set<std::string> loopback = {"0100007F"};
  {
    const auto server = MakeUcxTransport({}, {.listen = {"127.0.0.1:0"}});
    ASSERT_TRUE(server.ok()) << server.status();
    EXPECT_EQ(ListeningAddresses(), loopback);
  }
  const auto client = MakeUcxTransport({}, {.dial = {"127.0.0.1:1"}});
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(ListeningAddresses(), loopback);
}

TEST(UcxAddressTest, OffersSayWhatIsAdvertised) {
  const auto server = MakeUcxTransport({}, {.listen = {"0.0.0.0:0"}, .advertise = {"127.0.0.1"}});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->addresses()[0], ::testing::StartsWith("127.0.0.1:"));
  Pair pair(TransportKind{true, false});
  pair.MakeClient();
  Offer offer = *(*server)->MakeOffer(1);
  EXPECT_TRUE(pair.TryConnect(offer).ok());
}

// There is no RDMA on loopback: what was expected is said, what was required is refused.
TEST(UcxAddressTest, OnlyTcpWhereRdmaWasExpectedIsNotSilent) {
  const auto server = MakeUcxTransport({}, {.listen = {"127.0.0.1:0"}});
  ASSERT_TRUE(server.ok()) << server.status();
  Pair pair(TransportKind{true, false});
  pair.client = *MakeUcxTransport(pair.client_options, {.rdma = RdmaUse::kExpected, .tls = "tcp"});
  const absl::StatusOr<ConnectionPtr> expected = pair.TryConnect(*(*server)->MakeOffer(1));
  ASSERT_TRUE(expected.ok()) << expected.status();
  EXPECT_TRUE((*expected)->info().slower_than_expected);
  EXPECT_TRUE(pair.client->Supports(MemoryKind::kHost));
  // A host without it cannot do what is required.
  const absl::Status none =
      MakeUcxTransport(pair.client_options, {.rdma = RdmaUse::kRequired, .tls = "tcp"}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.message()), ::testing::HasSubstr("RDMA is required"));
  EXPECT_THAT(std::string(none.message()), ::testing::HasSubstr("tcp/lo"));
}

// Between hosts that have it: what was negotiated counts.
TEST(RdmaTest, AConnectionWithoutItIsRefusedWhereItIsRequired) {
  const struct {
    std::string transport;
    bool is_rdma;
  } cases[] = {{"tcp/eth0", false},
               {"tcp/eth0,tcp/eth1", false},
               {"rc_mlx5/mlx5_0:1", true},
               {"rc_mlx5/mlx5_0:1,tcp/eth0", true}};
  for (const auto& c : cases) {
    for (const RdmaUse use : {RdmaUse::kExpected, RdmaUse::kRequired}) {
      Pair pair(TransportKind{});
      pair.MakeServer();
      pair.network()->set_nature({.transport = c.transport, .rdma = use});
      pair.MakeClient();
      const absl::StatusOr<ConnectionPtr> made = pair.TryConnect(*pair.server->MakeOffer(1));
      const bool refused = !c.is_rdma && use == RdmaUse::kRequired;
      ASSERT_EQ(made.ok(), !refused) << c.transport << ": " << made.status();
      if (made.ok()) {
        EXPECT_EQ((*made)->info().slower_than_expected, !c.is_rdma);
      } else {
        EXPECT_EQ(made.status().code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_THAT(std::string(made.status().message()), ::testing::HasSubstr(c.transport));
      }
    }
  }
}

// UCX reads UCX_TLS, and without TCP nobody could be dialed.
TEST(UcxAddressTest, AnEnvironmentWithoutTcpIsRefused) {
  ASSERT_EQ(setenv("UCX_TLS", "self", /*overwrite=*/1), 0);
  const absl::Status status = MakeUcxTransport({}, {.listen = {"127.0.0.1:0"}}).status();
  const absl::Status added =
      MakeUcxTransport({}, {.listen = {"127.0.0.1:0"}, .tls = "self"}).status();
  unsetenv("UCX_TLS");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("UCX has no TCP here"));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("UCX_TLS"));
  EXPECT_TRUE(added.ok()) << added;  // What a program says wins, and has TCP added.
}

std::size_t OpenDescriptors() {
  const std::filesystem::directory_iterator begin("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

TEST_P(ConnectTest, ConnectionsThatComeAndGoLeaveNothing) {
  pair.Make();
  std::size_t after_first = 0;
  const std::vector<std::byte> data = RandomData(100'000, 1);
  constexpr int kCycles = 30;
  for (int i = 0; i < kCycles; ++i) {
    const ConnectionPtr connection = pair.Connect();
    ASSERT_NE(connection, nullptr);
    EXPECT_TRUE(pair.Wait(pair.Start(connection, "echo", data)).ok());
    connection->Close();
    ASSERT_TRUE(pair.WaitFor(
        [&] { return pair.client->stats().connections + pair.server->stats().connections == 0; }));
    if (i == 9) after_first = OpenDescriptors();
  }
  EXPECT_LE(OpenDescriptors(), after_first + 4);
  EXPECT_EQ(pair.server_handler.closed().size(), static_cast<std::size_t>(kCycles));
}

}  // namespace
}  // namespace kvmill::testing
