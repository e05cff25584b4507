// A peer in another process that is killed or stopped while bytes are under way. UCX only: death is
// what the kernel makes of it.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/client/transport/transport_fixture.h"

namespace kvmill::testing {
namespace {

constexpr std::size_t kHuge = 64 << 20;

class PeerProcess {
 public:
  explicit PeerProcess(bool plaintext) {
    int in[2], out[2];
    EXPECT_EQ(pipe2(in, O_CLOEXEC) + pipe2(out, O_CLOEXEC), 0);
    const std::string program = std::string(KVMILL_BIN_DIR) + "/transport_peer";
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], 0);
      dup2(out[1], 1);
      execl(program.c_str(), program.c_str(), plaintext ? "plaintext" : "encrypted", nullptr);
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    out_ = out[0];
  }
  ~PeerProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(in_);
    close(out_);
  }
  void Say(const std::string& line) {
    const std::string text = line + "\n";
    EXPECT_EQ(write(in_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  std::string Ask(const std::string& line) {
    Say(line);
    std::string answer;
    char c = 0;
    while (read(out_, &c, 1) == 1 && c != '\n') answer += c;
    return answer;
  }
  Offer MakeOffer() {
    std::istringstream words(Ask("offer"));
    Offer offer;
    std::string address, id, key;
    words >> address >> id >> key >> offer.node.incarnation;
    offer.addresses = {address};
    offer.node.id = NodeIdentity::IdOf("peer");
    id = absl::HexStringToBytes(id);
    key = absl::HexStringToBytes(key);
    std::memcpy(offer.key_id.data(), id.data(), std::min(id.size(), offer.key_id.size()));
    std::memcpy(offer.key.data(), key.data(), std::min(key.size(), offer.key.size()));
    return offer;
  }
  void Signal(int number) { kill(pid_, number); }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int in_ = -1;
  int out_ = -1;
};

class PeerDeathTest : public ::testing::TestWithParam<bool> {
 protected:
  PeerDeathTest() : pair(TransportKind{true, GetParam()}), peer(GetParam()) {
    pair.client_options.grace_nanos = 300 * kMilli;
    pair.server_options.grace_nanos = 300 * kMilli;
  }
  void TearDown() override { pair.ExpectIdle(); }

  // After whatever happened, the same transport reaches another peer.
  void ExpectWorksWithAnotherPeer() {
    PeerProcess other(GetParam());
    const absl::StatusOr<ConnectionPtr> connection = pair.TryConnect(other.MakeOffer());
    ASSERT_TRUE(connection.ok()) << connection.status();
    const std::vector<std::byte> data = RandomData(1'000'000, 9);
    const CallResultPtr result = pair.Start(*connection, "echo", data);
    EXPECT_TRUE(pair.Wait(result).ok()) << result->status();
    EXPECT_TRUE(result->destination == data);
  }

  Pair pair;
  PeerProcess peer;
};

INSTANTIATE_TEST_SUITE_P(All, PeerDeathTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Plaintext" : "Encrypted");
});

TEST_P(PeerDeathTest, KilledWhileItSends) {
  pair.MakeClient();
  const ConnectionPtr connection = *pair.TryConnect(peer.MakeOffer());
  const CallResultPtr result = pair.Start(connection, absl::StrCat("pull ", kHuge));
  ASSERT_TRUE(pair.WaitFor([&] { return pair.client->stats().bytes_received > (8 << 20); }));
  peer.Kill();
  EXPECT_EQ(pair.Wait(result).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(pair.WaitFor([&] { return pair.client_closed.has(); }));
  pair.ExpectIdle();
  ExpectWorksWithAnotherPeer();
}

TEST_P(PeerDeathTest, KilledWhileItReceives) {
  pair.MakeClient();
  const ConnectionPtr connection = *pair.TryConnect(peer.MakeOffer());
  const std::vector<std::byte> data(kHuge);
  const CallResultPtr result = pair.Start(connection, "sink", data);
  ASSERT_TRUE(pair.WaitFor([&] { return pair.client->stats().bytes_sent > (8 << 20); }));
  peer.Kill();
  EXPECT_EQ(pair.Wait(result).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(pair.WaitFor([&] { return pair.client_closed.has(); }));
  pair.ExpectIdle();
  ExpectWorksWithAnotherPeer();
}

// The same with this process as the one that was dialed.
TEST_P(PeerDeathTest, ADialerKilledWhileItSendsOrReceives) {
  pair.MakeServer();
  pair.MakeClient();
  Box<absl::Status> received;
  std::vector<std::byte> buffer(kHuge);
  Mutex mu;
  std::unique_ptr<IncomingCall> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    if (ToText(call->header()) == "pull") {
      call->Respond({.payload = {absl::MakeConstSpan(buffer)},
                     .done = [&](absl::Status status) { received.Set(status); }});
      return;
    }
    const MutexLock lock(mu);
    kept = std::move(call);
    kept->Receive({absl::MakeSpan(buffer)}, MemoryKind::kHost,
                  [&](absl::Status status) { received.Set(status); });
  });
  const auto dial = [&](PeerProcess* dialer) {
    const Offer offer = *pair.server->MakeOffer(1);
    return dialer->Ask(absl::StrCat("dial ", offer.addresses[0], " ",
                                    absl::BytesToHexString(ToText(offer.key_id)), " ",
                                    absl::BytesToHexString(ToText(offer.key))));
  };
  ASSERT_EQ(dial(&peer), "connected");
  peer.Say(absl::StrCat("push ", buffer.size()));
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server->stats().bytes_received > (4 << 20); }));
  peer.Kill();
  ASSERT_TRUE(pair.WaitFor([&] { return received.has(); }));
  EXPECT_FALSE(received.Get().ok());
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.closed().size() == 1; }));
  {
    const MutexLock lock(mu);
    EXPECT_TRUE(kept->cancelled());
    kept.reset();
  }
  pair.ExpectIdle();

  PeerProcess second(GetParam());
  ASSERT_EQ(dial(&second), "connected");
  second.Say(absl::StrCat("pull ", buffer.size()));
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server->stats().bytes_sent > (4 << 20); }));
  second.Kill();
  ASSERT_TRUE(pair.WaitFor([&] { return received.times() == 2; }));
  ASSERT_TRUE(pair.WaitFor([&] { return pair.server_handler.closed().size() == 2; }));
  pair.ExpectIdle();
}

TEST_P(PeerDeathTest, StoppedWhileItSendsOrReceives) {
  pair.MakeClient();
  const bool pull = GetParam();  // One direction each, to save time.
  const ConnectionPtr connection = *pair.TryConnect(peer.MakeOffer());
  const std::vector<std::byte> data(kHuge);
  const auto begin = std::chrono::steady_clock::now();
  const CallResultPtr result =
      pull ? pair.Start(connection, absl::StrCat("pull ", kHuge), {}, 2 * kSecond)
           : pair.Start(connection, "sink", data, 2 * kSecond);
  ASSERT_TRUE(pair.WaitFor(
      [&] {
        return pair.client->stats().bytes_received + pair.client->stats().bytes_sent > (4 << 20);
      },
      2 * kSecond));
  peer.Signal(SIGSTOP);
  // At the deadline, or, when the network had a buffer, at the end of the grace.
  EXPECT_EQ(pair.Wait(result).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  pair.ExpectIdle();
  peer.Signal(SIGCONT);
}

TEST_P(PeerDeathTest, StoppedWhileItOwesAnAnswer) {
  pair.MakeClient();
  pair.client_options.handshake_nanos = 300 * kMilli;
  const ConnectionPtr connection = *pair.TryConnect(peer.MakeOffer());
  const CallResultPtr held = pair.Start(connection, "hold", {}, 200 * kMilli);
  pair.Pass(50 * kMilli);
  peer.Signal(SIGSTOP);
  EXPECT_EQ(pair.Wait(held).code(), absl::StatusCode::kDeadlineExceeded);
  // No buffer was in the way: the connection lives, and works again when the peer does.
  EXPECT_FALSE(pair.client_closed.has());
  peer.Signal(SIGCONT);
  EXPECT_TRUE(pair.Wait(pair.Start(connection, "echo")).ok());
  EXPECT_FALSE(pair.client_closed.has());
}

TEST_P(PeerDeathTest, StoppedBeforeItAnswersTheHandshake) {
  pair.client_options.handshake_nanos = 300 * kMilli;
  pair.MakeClient();
  const Offer offer = peer.MakeOffer();
  peer.Signal(SIGSTOP);
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(pair.WaitFor([&] { return pair.client->stats().connections == 0; }));
  peer.Signal(SIGCONT);
  peer.Kill();
  EXPECT_EQ(pair.TryConnect(offer).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvmill::testing
