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

  // How a call ended whose peer was lost in the middle of it. `lose(peer, attempt)`, attempts from
  // 1, says so for one peer: a machine on which this process gets its turns late may let the call
  // end well before that, and then it is another peer's turn.
  absl::Status EndInTheMiddle(const std::function<absl::Status(PeerProcess*, int)>& lose) {
    absl::Status status;
    for (int attempt = 1; status.ok() && attempt <= 20 && !HasFailure(); ++attempt) {
      PeerProcess one(GetParam());
      status = lose(&one, attempt);
    }
    return status;
  }

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
  const absl::Status ended = EndInTheMiddle([&](PeerProcess* other, int attempt) {
    const ConnectionPtr connection = *pair.TryConnect(other->MakeOffer());
    const std::uint64_t before = pair.client->stats().bytes_received;
    const CallResultPtr result = pair.Start(connection, absl::StrCat("pull ", kHuge));
    EXPECT_TRUE(
        pair.WaitFor([&] { return pair.client->stats().bytes_received > before + (8 << 20); }));
    other->Kill();
    const absl::Status status = pair.Wait(result);
    EXPECT_TRUE(pair.WaitFor([&] { return pair.client_closed.times() == attempt; }));
    return status;
  });
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  pair.ExpectIdle();
  ExpectWorksWithAnotherPeer();
}

TEST_P(PeerDeathTest, KilledWhileItReceives) {
  pair.MakeClient();
  const std::vector<std::byte> data(kHuge);
  const absl::Status ended = EndInTheMiddle([&](PeerProcess* other, int attempt) {
    const ConnectionPtr connection = *pair.TryConnect(other->MakeOffer());
    const std::uint64_t before = pair.client->stats().bytes_sent;
    const CallResultPtr result = pair.Start(connection, "sink", data);
    EXPECT_TRUE(pair.WaitFor([&] { return pair.client->stats().bytes_sent > before + (8 << 20); }));
    other->Kill();
    const absl::Status status = pair.Wait(result);
    EXPECT_TRUE(pair.WaitFor([&] { return pair.client_closed.times() == attempt; }));
    return status;
  });
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  pair.ExpectIdle();
  ExpectWorksWithAnotherPeer();
}

// The same with this process as the one that was dialed.
TEST_P(PeerDeathTest, ADialerKilledWhileItSendsOrReceives) {
  pair.MakeServer();
  pair.MakeClient();
  Box<absl::Status> moved;
  std::vector<std::byte> buffer(kHuge);
  Mutex mu;
  std::unique_ptr<IncomingCall> kept;
  pair.server_handler.set_on_call([&](std::unique_ptr<IncomingCall> call) {
    if (ToText(call->header()) == "pull") {
      call->Respond({.payload = {absl::MakeConstSpan(buffer)},
                     .done = [&](absl::Status status) { moved.Set(status); }});
      return;
    }
    const MutexLock lock(mu);
    kept = std::move(call);
    kept->Receive({absl::MakeSpan(buffer)}, MemoryKind::kHost,
                  [&](absl::Status status) { moved.Set(status); });
  });
  const auto dial = [&](PeerProcess* dialer) {
    const Offer offer = *pair.server->MakeOffer(1);
    return dialer->Ask(absl::StrCat("dial ", offer.addresses[0], " ",
                                    absl::BytesToHexString(ToText(offer.key_id)), " ",
                                    absl::BytesToHexString(ToText(offer.key))));
  };
  const auto bytes = [&] {
    const TransportStats stats = pair.server->stats();
    return stats.bytes_received + stats.bytes_sent;
  };
  std::size_t dialers = 0;
  for (const char* const command : {"push", "pull"}) {
    const absl::Status ended = EndInTheMiddle([&](PeerProcess* dialer, int /*attempt*/) {
      ++dialers;
      EXPECT_EQ(dial(dialer), "connected");
      const std::uint64_t before = bytes();
      dialer->Say(absl::StrCat(command, " ", buffer.size()));
      EXPECT_TRUE(pair.WaitFor([&] { return bytes() > before + (4 << 20); }));
      dialer->Kill();
      EXPECT_TRUE(pair.WaitFor([&] { return moved.times() == static_cast<int>(dialers); }));
      EXPECT_TRUE(pair.WaitFor([&] { return pair.server_handler.closed().size() == dialers; }));
      const MutexLock lock(mu);
      EXPECT_TRUE(kept == nullptr || kept->cancelled());
      kept.reset();
      return moved.Get();
    });
    EXPECT_FALSE(ended.ok()) << command;
    pair.ExpectIdle();
  }
}

TEST_P(PeerDeathTest, StoppedWhileItSendsOrReceives) {
  pair.MakeClient();
  const bool pull = GetParam();  // One direction each, to save time.
  const std::vector<std::byte> data(kHuge);
  const auto bytes = [&] {
    const TransportStats stats = pair.client->stats();
    return stats.bytes_received + stats.bytes_sent;
  };
  const absl::Status ended = EndInTheMiddle([&](PeerProcess* other, int /*attempt*/) {
    const ConnectionPtr connection = *pair.TryConnect(other->MakeOffer());
    const std::uint64_t before = bytes();
    const auto begin = std::chrono::steady_clock::now();
    const CallResultPtr result =
        pull ? pair.Start(connection, absl::StrCat("pull ", kHuge), {}, 2 * kSecond)
             : pair.Start(connection, "sink", data, 2 * kSecond);
    // Or its deadline came first.
    EXPECT_TRUE(pair.WaitFor([&] { return bytes() > before + (4 << 20) || result->done.has(); }));
    other->Signal(SIGSTOP);
    // At the deadline, or, when the network had a buffer, at the end of the grace.
    const absl::Status status = pair.Wait(result);
    const auto passed = std::chrono::steady_clock::now() - begin;
    EXPECT_LT(passed, std::chrono::seconds(15));
    pair.ExpectIdle();
    other->Signal(SIGCONT);
    // This process got its turns so late that UCX had given the peer up by then.
    const bool too_late = absl::IsUnavailable(status) && passed > std::chrono::seconds(5);
    return too_late ? absl::OkStatus() : status;
  });
  EXPECT_EQ(ended.code(), absl::StatusCode::kDeadlineExceeded) << ended;
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
