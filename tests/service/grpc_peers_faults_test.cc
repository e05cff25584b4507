// Who is another process, stopped, gone, or says what cannot be, costs a call and nothing else.
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "tests/cluster/sketches.h"
#include "tests/integration/daemon_process.h"
#include "tests/service/grpc_peers_fixture.h"

namespace kvmill {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;

class GrpcPeersFaultsTest : public GrpcPeersTest {};

TEST_F(GrpcPeersFaultsTest, AnotherProcessAtTheAddressIsNobody) {
  ASSERT_TRUE(Put(1).ok());
  const Member before = MemberOf("b", 'x', b_.address);
  const auto answers = Locate(before, {Query({1})});
  EXPECT_EQ(answers.status().code(), absl::StatusCode::kUnavailable) << answers.status();
  EXPECT_TRUE(IsReplaced(answers.status())) << "it is not only silent";
  EXPECT_THAT(std::string(answers.status().message()),
              HasSubstr(absl::BytesToHexString(b_.incarnation)));
  EXPECT_EQ(Announce(before, {{HashOfAnchor(), Places(1)}}).code(), absl::StatusCode::kUnavailable);
  b_loop_.Run([this] { EXPECT_EQ(answers_->pointers().anchors(), 0u); });
  EXPECT_TRUE(Locate(b_, {Query({1})}).ok());
  EXPECT_EQ(peers_->stats().at("b").failures, 2u);
}

TEST_F(GrpcPeersFaultsTest, OnlyMembersAreBelievedToHaveBlocks) {
  b_loop_.Run([this] { answers_->SetView(ViewOf({b_})); });
  const absl::Status status = Announce(b_, {{HashOfAnchor(), Places(1)}});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("node \"a\" is no member"));
  // Who was restarted is another one until the view says so.
  b_loop_.Run([this] { answers_->SetView(ViewOf({MemberOf("a", 'x', "127.0.0.1:1"), b_})); });
  EXPECT_FALSE(Announce(b_, {{HashOfAnchor(), Places(1)}}).ok());
  b_loop_.Run([this] { answers_->SetView(ViewOf({a_, b_})); });
  EXPECT_TRUE(Announce(b_, {{HashOfAnchor(), Places(1)}}).ok());
}

TEST_F(GrpcPeersFaultsTest, WhatIsOutOfBoundsIsRefusedByValueAndLimit) {
  const auto locate = [&](const std::function<void(v1::LocateRequest*)>& spoil) {
    v1::LocateRequest request;
    request.set_fingerprint(std::string(AsBytes(fingerprint_)));
    v1::LocateRun* run = request.add_runs();
    run->set_anchor("anchor");
    run->add_keys("key");
    spoil(&request);
    const grpc::Status status =
        Ask<v1::LocateRequest, v1::LocateReply>(&v1::Peer::Stub::Locate, request);
    return absl::StrCat(status.error_code(), " ", status.error_message());
  };
  EXPECT_EQ(locate([](auto*) {}), "0 ");
  EXPECT_EQ(locate([](auto* request) {
              for (int i = 0; i < 64; ++i) *request->add_runs() = request->runs(0);
            }),
            "3 65 runs in one request: at most 64");
  EXPECT_EQ(locate([](auto* request) {
              for (int i = 0; i < 32; ++i) request->mutable_runs(0)->add_keys("key");
            }),
            "3 33 keys of a run from place 0 on: want 1 to 32");
  EXPECT_EQ(locate([](auto* request) {
              request->mutable_runs(0)->set_first(31);
              request->mutable_runs(0)->add_keys("key");
            }),
            "3 2 keys of a run from place 31 on: want 1 to 1");
  EXPECT_EQ(locate([](auto* request) { request->mutable_runs(0)->set_first(32); }),
            "3 place 32 in a run: it has 32 blocks");
  EXPECT_EQ(locate([](auto* request) { request->mutable_runs(0)->clear_keys(); }),
            "3 0 keys of a run from place 0 on: want 1 to 32");
  EXPECT_THAT(locate([](auto* request) { request->mutable_runs(0)->set_keys(0, ""); }),
              HasSubstr("3 "));
  EXPECT_THAT(
      locate([](auto* request) { request->mutable_runs(0)->set_anchor(std::string(65, 'x')); }),
      HasSubstr("65"));
  EXPECT_EQ(locate([](auto* request) { request->set_fingerprint("short"); }),
            "3 namespace fingerprint of 5 bytes: want 16");
  EXPECT_EQ(locate([](auto* request) { request->set_incarnation("short"); }),
            "3 incarnation of 5 bytes: want 16");
  EXPECT_THAT(locate([](auto* request) { request->set_incarnation(std::string(16, 'x')); }),
              HasSubstr("10 meant for incarnation 7878"));

  const auto announce = [&](const std::function<void(v1::AnnounceRequest*)>& spoil) {
    v1::AnnounceRequest request;
    request.set_holder("a");
    request.set_holder_incarnation(a_.incarnation);
    request.add_anchor_hashes(1);
    request.add_counts(32);
    spoil(&request);
    const grpc::Status status =
        Ask<v1::AnnounceRequest, v1::AnnounceReply>(&v1::Peer::Stub::Announce, request);
    return absl::StrCat(status.error_code(), " ", status.error_message());
  };
  EXPECT_EQ(announce([](auto*) {}), "0 ");
  EXPECT_EQ(announce([](auto* request) {
              for (int i = 0; i < 1024; ++i) request->add_anchor_hashes(1), request->add_counts(1);
            }),
            "3 1025 announcements in one request: at most 1024");
  EXPECT_EQ(announce([](auto* request) { request->set_counts(0, 33); }),
            "3 count 33: a run has 32 blocks");
  EXPECT_EQ(announce([](auto* request) { request->add_counts(1); }),
            "3 2 counts: want one for each of 1 anchors");
  EXPECT_EQ(announce([](auto* request) { request->add_sums(1), request->add_sums(1); }),
            "3 2 sums: want one for each of 1 anchors");
  EXPECT_EQ(announce([](auto* request) { request->add_blocks(1), request->add_blocks(1); }),
            "3 2 numbers of blocks: want one for each of 1 anchors");
  EXPECT_EQ(announce([](auto* request) { request->add_blocks(0); }),
            "3 0 blocks in 32 places: want 32 to 131072");
  EXPECT_EQ(announce([](auto* request) { request->set_tags("abc"); }),
            "3 3 bytes of tags: want 2 for each of 32 places");
  EXPECT_THAT(announce([](auto* request) { request->set_holder("a b"); }), HasSubstr("\"a b\""));
  EXPECT_EQ(announce([](auto* request) { request->set_holder_incarnation(""); }),
            "3 incarnation of 0 bytes: want 16");
  b_loop_.Run([this] { EXPECT_EQ(answers_->pointers().anchors(), 1u) << "of the good one"; });

  v1::ListRunsRequest list;
  for (int i = 0; i < 65; ++i) list.add_anchor_hashes(1);
  EXPECT_EQ((Ask<v1::ListRunsRequest, v1::ListRunsReply>(&v1::Peer::Stub::ListRuns, list)
                 .error_message()),
            "65 anchors in one request: at most 64");
  list.clear_anchor_hashes();
  list.add_anchor_hashes(1);
  for (int i = 0; i < 2; ++i) list.add_after_places(1), list.add_after_hashes(1);
  EXPECT_EQ((Ask<v1::ListRunsRequest, v1::ListRunsReply>(&v1::Peer::Stub::ListRuns, list)
                 .error_message()),
            "2 hashes and 2 places to begin after: want one of each for each of 1 anchors");
  v1::CompareRequest compare;
  compare.set_holder("a");
  compare.set_holder_incarnation(a_.incarnation);
  compare.add_digests(1);
  EXPECT_EQ((Ask<v1::CompareRequest, v1::CompareReply>(&v1::Peer::Stub::Compare, compare)
                 .error_message()),
            "1 digests: want 64");

  context_->peer_answers = nullptr;
  EXPECT_EQ(locate([](auto*) {}), "9 this daemon is in no cluster");
}

// Answers whatever the test wants.
class LyingPeer final : public v1::Peer::Service {
 public:
  grpc::Status Locate(grpc::ServerContext*, const v1::LocateRequest*,
                      v1::LocateReply* reply) override {
    *reply = lie;
    return status;
  }
  v1::LocateReply lie;
  grpc::Status status;
};

TEST_F(GrpcPeersFaultsTest, AnAnswerThatCannotBeIsSeenAsOne) {
  LyingPeer liar;
  PeerServer server(&liar);
  const Member member = MemberOf("liar", 'l', server.address());
  const std::vector<RunQuery> queries = {Query({1, 2})};
  const auto is_believed = [&](const std::function<void(v1::LocatedRun*)>& lie, int runs = 1) {
    liar.lie.Clear();
    for (int i = 0; i < runs; ++i) lie(liar.lie.add_runs());
    const auto answers = Locate(member, queries);
    EXPECT_TRUE(answers.ok()) << answers.status();
    return answers.ok() && ValidAnswer(queries, *answers);
  };
  const auto add_pointer = [](v1::LocatedRun* run) {
    run->add_pointers()->set_holder("a");
    run->mutable_pointers(0)->set_incarnation(std::string(16, 'a'));
    run->mutable_pointers(0)->set_blocks(1);
  };
  EXPECT_TRUE(is_believed(add_pointer));
  EXPECT_TRUE(is_believed([](v1::LocatedRun* run) { run->set_present(3); }));
  EXPECT_FALSE(is_believed([](v1::LocatedRun* run) { run->set_present(4); }));
  EXPECT_FALSE(is_believed([](v1::LocatedRun*) {}, 0));
  EXPECT_FALSE(is_believed([](v1::LocatedRun*) {}, 2));
  // Blocks that were not asked for, and such as are there and perhaps not.
  for (const std::uint32_t perhaps : {1u, 4u, 0xFFFFFFFEu}) {
    EXPECT_FALSE(is_believed([&](v1::LocatedRun* run) {
      add_pointer(run);
      run->mutable_pointers(0)->set_perhaps(perhaps);
    })) << perhaps;
  }
  EXPECT_FALSE(is_believed([&](v1::LocatedRun* run) {
    add_pointer(run);
    run->mutable_pointers(0)->set_blocks(4);
  }));
  EXPECT_FALSE(is_believed([&](v1::LocatedRun* run) {
    for (int i = 0; i < 9; ++i) add_pointer(run), *run->add_pointers() = run->pointers(0);
  }));
  EXPECT_FALSE(is_believed([&](v1::LocatedRun* run) {
    add_pointer(run);
    run->mutable_pointers(0)->set_holder(std::string(65, 'x'));
  }));
  EXPECT_FALSE(is_believed([&](v1::LocatedRun* run) {
    add_pointer(run);
    run->mutable_pointers(0)->set_incarnation("x");
  }));
  // Longer than any answer is.
  liar.lie.Clear();
  for (int i = 0; i < 100'000; ++i) add_pointer(liar.lie.add_runs());
  EXPECT_EQ(Locate(member, queries).status().code(), absl::StatusCode::kResourceExhausted);
  // An error's text is not passed on for ever.
  liar.status = grpc::Status(grpc::StatusCode::INTERNAL, std::string(4000, 'x'));
  const absl::Status status = Locate(member, queries).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_LT(status.message().size(), 400u);
}

TEST_F(GrpcPeersFaultsTest, WhoIsStoppedOrGoneCostsADeadline) {
  testing::DaemonProcess daemon(testing::DaemonBinary(),
                                {"--socket", directory_ / "kvmill.sock", "--listen", "127.0.0.1:0",
                                 "--insecure", "--host-bytes", "64MiB", "--device", "host"});
  const nlohmann::json ready = daemon.WaitReady();
  ASSERT_FALSE(ready.is_null()) << daemon.standard_error();
  Member member = MemberOf("c", 'c', ready["listen"].get<std::string>());
  member.incarnation = absl::HexStringToBytes(ready["boot_id"].get<std::string>());
  EXPECT_EQ(Locate(member, {Query({1})}).status().code(), absl::StatusCode::kFailedPrecondition)
      << "it is in no cluster";
  daemon.Signal(SIGSTOP);
  EXPECT_EQ(Locate(member, {Query({1})}, 200 * kMs).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(took_, std::chrono::milliseconds(200));
  EXPECT_LT(took_, std::chrono::seconds(10));  // It never answers.
  daemon.Signal(SIGCONT);
  EXPECT_EQ(Locate(member, {Query({1})}).status().code(), absl::StatusCode::kFailedPrecondition)
      << "it is back, on the connection that there was";
  daemon.Signal(SIGKILL);
  daemon.WaitExit();
  EXPECT_EQ(Locate(member, {Query({1})}).status().code(), absl::StatusCode::kUnavailable);
  // A deadline that has passed already is one, too.
  EXPECT_EQ(Locate(b_, {Query({1})}, -5 * kMs).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(GrpcPeersFaultsTest, ConnectionsEndWithTheMember) {
  const auto connections = [this](const std::vector<Member>& members) {
    std::size_t count = 0;
    loop_.Run([&] {
      peers_->Keep(*ViewOf(members));
      count = peers_->connections();
    });
    return count;
  };
  ASSERT_TRUE(Locate(b_, {Query({1})}).ok());
  EXPECT_EQ(connections({a_, b_}), 1u);
  EXPECT_EQ(peers_->stats().count("b"), 1u);
  EXPECT_EQ(connections({a_, MemberOf("b", 'x', b_.address)}), 0u) << "another process";
  ASSERT_TRUE(Locate(b_, {Query({1})}).ok());
  EXPECT_EQ(connections({a_, MemberOf("b", 'b', "127.0.0.1:1")}), 0u) << "at another address";
  ASSERT_TRUE(Locate(b_, {Query({1})}).ok());
  EXPECT_EQ(connections({a_}), 0u);
  EXPECT_TRUE(peers_->stats().empty());
  // A call that runs on the connection goes on.
  std::promise<absl::Status> told;
  loop_.Run([&] {
    peers_->Locate(b_, fingerprint_, {Query({1})}, loop_.clock().MonotonicNanos() + 30'000 * kMs,
                   [&](const auto& answers) { told.set_value(answers.status()); });
    peers_->Keep(*ViewOf({a_}));
    EXPECT_EQ(peers_->connections(), 0u);
  });
  EXPECT_TRUE(told.get_future().get().ok());
}

// Cancellations at any moment of a call, from within the callbacks of others, and at the end of
// all: none runs twice, none after it was cancelled, and with some deadline each runs.
TEST_F(GrpcPeersFaultsTest, CallsEndOnceWheneverTheyAreCancelled) {
  ASSERT_TRUE(Put(1).ok());
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  struct Started {
    Peers::CallId id = 0;
    bool ended = false, cancelled = false;
  };
  const Member nobody = MemberOf("c", 'c', "127.0.0.1:1");
  const Member another = MemberOf("d", 'x', b_.address);
  for (int round = 0; round < 4; ++round) {
    std::vector<std::shared_ptr<Started>> started;
    std::atomic<int> wrong{0};
    std::atomic<std::size_t> open{0};
    const auto cancel_any = [&] {
      Started& any = *started[random() % started.size()];
      if (!any.ended && !any.cancelled) --open;
      if (!any.ended) any.cancelled = true;
      peers_->Cancel(any.id);
    };
    for (int i = 0; i < 150; ++i) {
      loop_.Run([&] {
        auto call = std::make_shared<Started>();
        started.push_back(call);
        ++open;
        const Member& to = random() % 4 == 0 ? nobody : random() % 4 == 0 ? another : b_;
        const std::int64_t nanos = static_cast<std::int64_t>(random() % 4) * kMs;
        call->id = peers_->Locate(to, fingerprint_, {Query({1, 2})},
                                  loop_.clock().MonotonicNanos() + nanos, [&, call](const auto&) {
                                    if (call->ended || call->cancelled) ++wrong;
                                    call->ended = true;
                                    --open;
                                    if (random() % 4 == 0) cancel_any();
                                  });
        if (random() % 3 == 0) cancel_any();
      });
      if (random() % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    if (round % 2 == 0) {
      const auto begin = steady_clock::now();
      while (open > 0 && steady_clock::now() - begin < std::chrono::seconds(30)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_EQ(open, 0u) << "a call without an end";
      loop_.Run([&] { EXPECT_EQ(peers_->open(), 0u); });
    }
    StopPeers();
    loop_.Run([&] {
      for (const auto& call : started) call->cancelled |= !call->ended;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    loop_.Run([] {});
    EXPECT_EQ(wrong, 0);
    StartPeers();
  }
}

}  // namespace
}  // namespace kvmill
