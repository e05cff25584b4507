// Clients of a real daemon as those who pull share them: who answers is who is meant, or nobody is
// asked; they are bounded; and when they end, everything on them has.
#include "service/peer_clients.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "service/cluster/peers.h"
#include "service/thread_loop.h"
#include "tests/integration/ucx_fixture.h"

namespace kvmill::testing {
namespace {

class PeerClientsTest : public UcxDaemonTest {
 protected:
  void SetUp() override {
    StartUcx();
    member_ = MemberThere();
  }
  void TearDown() override {
    if (loop_ != nullptr) loop_->Stop();
    clients_.reset();
  }
  void Open(const PeerClients::Options& options = {}) {
    TearDown();
    loop_ = std::make_unique<ThreadLoop>(SystemClock());
    loop_->Run([&] {
      clients_ = std::make_unique<PeerClients>(*loop_, options);
      clients_->Watch([this] { ++changes_; });
    });
  }
  Member MemberThere() const {
    return {.id = "other",
            .incarnation = absl::HexStringToBytes(client_->Stat()->boot_id),
            .address = ready_["listen"].get<std::string>(),
            .capacity_bytes = 1};
  }
  static Member Another(Member member) {
    member.incarnation[3] = static_cast<char>(member.incarnation[3] ^ 1);
    return member;
  }
  absl::StatusOr<PeerClients::PeerPtr> Get(const Member& member) {
    absl::StatusOr<PeerClients::PeerPtr> peer = absl::UnknownError("");
    loop_->Run([&] { peer = clients_->Get(member); });
    return peer;
  }
  std::future<absl::Status> StartGreet(const PeerClients::PeerPtr& peer) {
    const auto said = std::make_shared<std::promise<absl::Status>>();
    loop_->Run([&] {
      const auto within = std::make_shared<bool>(true);
      clients_->Greet(peer, [said, within](const absl::Status& status) {
        EXPECT_FALSE(*within) << "not within the call";
        said->set_value(status);
      });
      *within = false;
    });
    return said->get_future();
  }
  absl::Status Greet(const PeerClients::PeerPtr& peer) { return StartGreet(peer).get(); }
  absl::Status Check(const PeerClients::PeerPtr& peer) {
    absl::Status status;
    loop_->Run([&] { status = clients_->Check(peer); });
    return status;
  }
  int changes() {
    int count = 0;
    loop_->Run([&] { count = changes_; });
    return count;
  }

  Member member_;
  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<PeerClients> clients_;
  int changes_ = 0;  // On the loop.
};

TEST_F(PeerClientsTest, AllShareTheClientOfAMember) {
  Open();
  const auto peer = *Get(member_);
  EXPECT_EQ(*Get(member_), peer);
  EXPECT_EQ(clients_->size(), 1u);
  EXPECT_FALSE(peer->known()) << "nobody has answered yet";
  EXPECT_TRUE(Check(peer).ok());
  auto first = StartGreet(peer);
  auto second = StartGreet(peer);
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(peer->known());
  EXPECT_TRUE(peer->client()->Stat().ok());
  EXPECT_TRUE(Check(peer).ok());
}

TEST_F(PeerClientsTest, AnotherProcessIsNotAskedAndInQuarantine) {
  Open({.replaced_nanos = 300'000'000});
  const Member meant = Another(member_);
  const auto peer = *Get(meant);
  const absl::Status said = Greet(peer);
  EXPECT_TRUE(IsReplaced(said)) << said;
  EXPECT_TRUE(absl::StrContains(said.message(), client_->Stat()->boot_id)) << said;
  EXPECT_EQ(peer->closed(), said);
  EXPECT_EQ(peer->client(), nullptr);
  EXPECT_EQ(Check(peer), said);
  EXPECT_EQ(Greet(peer), said) << "whoever holds it still";
  EXPECT_EQ(clients_->size(), 0u);
  EXPECT_EQ(changes(), 1);
  EXPECT_EQ(Get(meant).status(), said) << "nobody is asked";
  EXPECT_TRUE(Get(member_).ok()) << "another member";
  EXPECT_TRUE(Eventually([&] { return Get(meant).ok(); })) << "not for ever";
}

TEST_F(PeerClientsTest, ARestartAtTheSameAddressIsNoticedWithItsFirstAnswer) {
  Open();
  const auto peer = *Get(member_);
  ASSERT_TRUE(Greet(peer).ok());
  Kill();
  EXPECT_TRUE(Check(peer).ok()) << "nothing is known of it";
  const absl::Status silent = Greet(peer);
  EXPECT_TRUE(absl::IsUnavailable(silent) || silent.ok()) << silent;
  EXPECT_FALSE(IsReplaced(silent)) << silent;
  Start({"--ucx", "127.0.0.1", "--listen", member_.address, "--metrics", "127.0.0.1:0",
         "--insecure"});
  EXPECT_TRUE(Eventually([&] { return IsReplaced(Greet(peer)); }));
  EXPECT_FALSE(peer->known());
  EXPECT_TRUE(Greet(*Get(MemberThere())).ok());
}

TEST_F(PeerClientsTest, WhereNobodyAnswersIsNobodyElse) {
  Open();
  member_.address = "127.0.0.1:1";
  const auto peer = *Get(member_);
  const absl::Status said = Greet(peer);
  EXPECT_TRUE(absl::IsUnavailable(said)) << said;
  EXPECT_FALSE(IsReplaced(said)) << said;
  EXPECT_TRUE(Check(peer).ok()) << "it may come";
  EXPECT_EQ(clients_->size(), 1u);
  member_.address = "nowhere";
  EXPECT_TRUE(absl::IsUnavailable(Get(member_).status()));
}

TEST_F(PeerClientsTest, ThereAreOnlySoManyAndWhoIsUsedStays) {
  Open({.clients_max = 1});
  const auto peer = *Get(member_);
  loop_->Run([&] { clients_->Begin(peer); });
  const Member second = Another(member_);
  EXPECT_TRUE(absl::IsResourceExhausted(Get(second).status()));
  EXPECT_EQ(changes(), 0);
  loop_->Run([&] { clients_->End(peer); });
  EXPECT_TRUE(Eventually([&] { return changes() == 1; })) << "there is room";
  EXPECT_TRUE(Get(second).ok());
  EXPECT_EQ(clients_->size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(peer->closed())) << peer->closed();
  EXPECT_FALSE(IsReplaced(peer->closed()));
}

TEST_F(PeerClientsTest, IdleOnesGoAndUsedOnesDoNot) {
  Open({.idle_nanos = 50'000'000});
  PeerClients::PeerPtr used;
  loop_->Run([&] {
    used = *clients_->Get(member_);
    clients_->Begin(used);
  });
  EXPECT_TRUE(Get(Another(member_)).ok());
  EXPECT_TRUE(Eventually([&] { return clients_->size() == 1; }));
  EXPECT_EQ(*Get(member_), used);
  loop_->Run([&] { clients_->End(used); });
  EXPECT_TRUE(Eventually([&] { return clients_->size() == 0; }));
}

TEST_F(PeerClientsTest, WhoIsNoMemberAnyMoreIsClosed) {
  Open();
  const auto peer = *Get(member_);
  loop_->Run([&] { clients_->Keep({member_}); });
  EXPECT_EQ(*Get(member_), peer);
  daemon_->Signal(SIGSTOP);
  auto greeting = StartGreet(peer);
  loop_->Run([&] { clients_->Keep({}); });
  const absl::Status said = greeting.get();
  EXPECT_EQ(said, absl::UnavailableError("node \"other\" is no member any more"));
  const auto again = *Get(member_);
  loop_->Run([&] { clients_->Keep({Another(member_)}); });
  EXPECT_TRUE(IsReplaced(again->closed())) << again->closed();
  EXPECT_EQ(clients_->size(), 0u);
  daemon_->Signal(SIGCONT);
}

// Whoever gave memory to a call may take it back when Close has returned, whatever peers do.
TEST_F(PeerClientsTest, CloseWaitsForCallsAndForNoPeer) {
  for (const bool on_the_loop : {true, false}) {
    Open();
    const auto peer = *Get(member_);
    ASSERT_TRUE(Greet(peer).ok());
    daemon_->Signal(SIGSTOP);
    auto greeting = StartGreet(peer);
    auto ended = std::make_unique<std::atomic<bool>>(false);
    loop_->Run([&] {
      clients_->Begin(peer);
      peer->client()->StatAsync({.timeout = absl::Minutes(5)},
                                [told = ended.get()](const auto&) { told->store(true); });
    });
    const auto begin = std::chrono::steady_clock::now();
    if (on_the_loop) {
      loop_->Run([&] { clients_->Close(); });
    } else {
      loop_->Stop();
      clients_->Close();
    }
    EXPECT_TRUE(ended->load());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    EXPECT_THROW(greeting.get().IgnoreError(), std::future_error)
        << "nobody is told of anything any more";
    EXPECT_TRUE(absl::IsUnavailable(clients_->Get(member_).status()));
    daemon_->Signal(SIGCONT);
  }
}

}  // namespace
}  // namespace kvmill::testing
