// GrpcPeers and PeerService over real connections: what nodes say to each other arrives, and who
// is another process, stopped, gone, or says what cannot be, costs a call and nothing else.
#include "service/grpc_peers.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/request_context.h"
#include "service/peer_answers.h"
#include "service/peer_codec.h"
#include "service/peer_service.h"
#include "service/thread_loop.h"
#include "storage/core/mutex.h"
#include "tests/cluster/sketches.h"
#include "tests/integration/daemon_process.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;
constexpr std::int64_t kMs = 1'000'000;

Member MemberOf(const std::string& id, char incarnation, const std::string& address) {
  return {.id = id,
          .incarnation = std::string(kIncarnationBytes, incarnation),
          .address = address,
          .capacity_bytes = 1};
}

std::shared_ptr<const ClusterView> ViewOf(std::vector<Member> members) {
  return *ClusterView::Make(std::move(members), 1, 4, nullptr);
}

// A server of the Peer service at a port of its own.
class PeerServer {
 public:
  explicit PeerServer(grpc::Service* service) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~PeerServer() { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// Node "b": a store with blocks, and its answers. The fixture's own store is its.
class GrpcPeersTest : public TieredStoreTest {
 protected:
  void SetUp() override {
    Open(false);
    LocalDoor::Options door;
    door.path = directory_ / "b.door";
    door_ = *LocalDoor::Create(door, SystemClock());
    callers_ = std::make_unique<Callers>(local_peers_, *door_, geteuid());
    sessions_ = std::make_unique<SessionTable>(SessionTable::Options(), SystemClock());
    context_.reset(new ServiceContext{*store_, pool_, pool_, SystemClock(), *callers_, *sessions_});
    context_->boot_id = std::string(kIncarnationBytes, 'b');
    answers_ = std::make_unique<PeerAnswers>(b_loop_, *store_, PointerTable::Options());
    context_->peer_answers = answers_.get();
    service_ = std::make_unique<PeerService>(*context_);
    server_ = std::make_unique<PeerServer>(service_.get());
    b_ = MemberOf("b", 'b', server_->address());
    b_loop_.Run([this] { answers_->SetView(ViewOf({a_, b_})); });
    StartPeers();
  }
  void TearDown() override {
    StopPeers();
    server_ = nullptr;
    b_loop_.Stop();
    answers_ = nullptr;
    context_ = nullptr;
  }

  void StartPeers() {
    loop_.Run([this] {
      peers_ = std::make_unique<GrpcPeers>(
          loop_, a_,
          GrpcPeers::Puller{
              [this](Peers::CallId call, const Member& member, const Fingerprint&, RunKeys blocks,
                     std::int64_t, Peers::Done<std::vector<absl::Status>> done) {
                pulled_ = absl::StrCat(member.id, " ", blocks.keys.size());
                pulls_[call] = std::move(done);
              },
              [this](Peers::CallId call) { pulls_.erase(call); }});
    });
  }
  void StopPeers() {
    loop_.Run([this] { peers_ = nullptr; });
  }

  // What `start(deadline, done)` on the loop is told, and after how long.
  template <typename Answer>
  absl::StatusOr<Answer> Wait(std::int64_t timeout_nanos,
                              const std::function<void(std::int64_t, Peers::Done<Answer>)>& start) {
    std::promise<absl::StatusOr<Answer>> told;
    const auto begin = steady_clock::now();
    loop_.Post([&] {
      start(loop_.clock().MonotonicNanos() + timeout_nanos,
            [&told](absl::StatusOr<Answer> answer) { told.set_value(std::move(answer)); });
    });
    absl::StatusOr<Answer> answer = told.get_future().get();
    took_ = steady_clock::now() - begin;
    return answer;
  }
  absl::StatusOr<std::vector<RunAnswer>> Locate(const Member& member,
                                                const std::vector<RunQuery>& queries,
                                                std::int64_t timeout_nanos = 30'000 * kMs) {
    return Wait<std::vector<RunAnswer>>(timeout_nanos, [&](std::int64_t deadline, auto done) {
      peers_->Locate(member, fingerprint_, queries, deadline, done);
    });
  }
  absl::Status Announce(const Member& member, const std::vector<Announcement>& announcements) {
    return Wait<bool>(30'000 * kMs,
                      [&](std::int64_t deadline, auto done) {
                        peers_->Announce(member, announcements, deadline,
                                         [done](const absl::Status& status) {
                                           status.ok() ? done(true) : done(status);
                                         });
                      })
        .status();
  }
  RunQuery Query(const std::vector<std::uint64_t>& numbers) {
    RunQuery query;
    query.anchor = Id(1).key;
    for (const std::uint64_t number : numbers) query.keys.push_back(Id(number).key);
    return query;
  }
  std::uint64_t HashOfKey(std::uint64_t number) { return KeyHash(fingerprint_, Id(number).key); }
  std::uint64_t HashOfAnchor() { return AnchorHash(fingerprint_, Id(1).key); }

  // The server's side of one call, without GrpcPeers in between.
  template <typename Request, typename Reply>
  grpc::Status Ask(grpc::Status (v1::Peer::Stub::*method)(grpc::ClientContext*, const Request&,
                                                          Reply*),
                   Request request) {
    if (request.incarnation().empty()) request.set_incarnation(b_.incarnation);
    const auto stub = v1::Peer::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    Reply reply;
    return (stub.get()->*method)(&context, request, &reply);
  }

  Fingerprint fingerprint_ = FingerprintOf(Spec());
  testing::TemporaryDirectory directory_;
  const Member a_ = MemberOf("a", 'a', "127.0.0.1:1");
  Member b_;
  LocalPeers local_peers_;
  std::unique_ptr<LocalDoor> door_;
  std::unique_ptr<Callers> callers_;
  std::unique_ptr<SessionTable> sessions_;
  WorkerPool pool_{1, "test"};
  std::unique_ptr<ServiceContext> context_;
  ThreadLoop b_loop_{SystemClock()};
  std::unique_ptr<PeerAnswers> answers_;
  std::unique_ptr<PeerService> service_;
  std::unique_ptr<PeerServer> server_;

  ThreadLoop loop_{SystemClock()};
  std::unique_ptr<GrpcPeers> peers_;  // Of node "a", on loop_.
  std::string pulled_;
  std::map<Peers::CallId, Peers::Done<std::vector<absl::Status>>> pulls_;
  steady_clock::duration took_{};
};

TEST_F(GrpcPeersTest, ANodeSaysWhatItHasAndWhoToldIt) {
  for (const std::uint64_t number : {1, 2, 4}) ASSERT_TRUE(Put(number).ok());
  // Of its first three blocks the last is another one than is asked for here.
  RunSketch said = SketchOfBlocks({{0, HashOfKey(1)}, {1, HashOfKey(2)}, {2, 3000}});
  ASSERT_TRUE(Announce(b_, {{HashOfAnchor(), said}, {77, Places(1)}}).ok());
  b_loop_.Run([&] {
    ASSERT_EQ(answers_->pointers().HoldersOf(HashOfAnchor()).size(), 1u);
    EXPECT_EQ(answers_->pointers().HoldersOf(HashOfAnchor())[0].sketch, said);
  });
  const auto answers = Locate(b_, {Query({1, 2}), Query({1, 2, 3, 4}), Query({3})});
  ASSERT_TRUE(answers.ok()) << answers.status();
  ASSERT_EQ(answers->size(), 3u);
  EXPECT_EQ((*answers)[0].present, 0b11u);
  EXPECT_TRUE((*answers)[0].pointers.empty()) << "it has all of them itself";
  EXPECT_EQ((*answers)[1].present, 0b1011u);
  EXPECT_TRUE((*answers)[1].pointers.empty()) << "block 3 is not what was announced";
  EXPECT_EQ((*answers)[2].present, 0u);
  EXPECT_TRUE((*answers)[2].pointers.empty());
  const auto pointers = [&](const RunSketch& sketch) {
    EXPECT_TRUE(Announce(b_, {{HashOfAnchor(), sketch}}).ok());
    return (*Locate(b_, {Query({1, 2, 3, 4})}))[0].pointers;
  };
  said = SketchOfBlocks({{0, HashOfKey(1)}, {1, HashOfKey(2)}, {2, HashOfKey(3)}});
  EXPECT_EQ(pointers(said), (std::vector<Pointer>{{"a", a_.incarnation, 0b100, 0}}));
  said = SketchOfBlocks({{0, HashOfKey(1)}, {1, HashOfKey(2)}, {2, 3000}, {2, HashOfKey(3)}});
  EXPECT_EQ(pointers(said), (std::vector<Pointer>{{"a", a_.incarnation, 0, 0b100}}));
  // It takes its word back.
  EXPECT_TRUE(pointers({}).empty());
  loop_.Run([this] {
    EXPECT_EQ(peers_->open(), 0u);
    EXPECT_EQ(peers_->connections(), 1u) << "one for all calls";
    const GrpcPeers::PeerStats stats = peers_->stats().at("b");
    EXPECT_EQ(stats.requests, 8u);
    EXPECT_EQ(stats.failures, 0u);
  });
  // What peers ask is no lookup of an engine.
  EXPECT_EQ(store_->stats().lookup_blocks, 0u);
}

TEST_F(GrpcPeersTest, AHomeListsTakesOverAndCompares) {
  const std::uint64_t hash = HashOfAnchor();
  HeldRun run{.anchor_hash = hash,
              .fingerprint = fingerprint_,
              .blocks = {.anchor = Id(1).key, .keys = {Id(4).key, Id(5).key}, .places = {3, 4}},
              .bytes = 12345,
              .more = true};
  answers_->SetLister([&](const std::vector<RunList>& lists) {
    const bool right = lists.size() == 2 && lists[0].anchor_hash == hash &&
                       lists[0].after_place == 3 && lists[0].after_hash == 77 &&
                       lists[1].anchor_hash == 7 && lists[1].after_hash == 0;
    return right ? std::vector<HeldRun>{run} : std::vector<HeldRun>();
  });
  const auto runs = Wait<std::vector<HeldRun>>(5000 * kMs, [&](std::int64_t deadline, auto done) {
    peers_->ListRuns(b_, {{hash, 3, 77}, {7}}, deadline, done);
  });
  ASSERT_TRUE(runs.ok()) << runs.status();
  ASSERT_EQ(runs->size(), 1u);
  EXPECT_TRUE(ValidRuns({{hash, 3, 77}, {7}}, *runs));
  EXPECT_EQ((*runs)[0].blocks.keys, run.blocks.keys);
  EXPECT_EQ((*runs)[0].blocks.places, run.blocks.places);
  EXPECT_EQ((*runs)[0].bytes, 12345u);
  EXPECT_TRUE((*runs)[0].more);

  const auto hand_over = [&] {
    return Wait<std::vector<std::uint8_t>>(5000 * kMs, [&](std::int64_t deadline, auto done) {
      peers_->HandOver(b_, {{hash, Places(3)}, {7, Places(2)}}, deadline, done);
    });
  };
  EXPECT_EQ(hand_over().status().code(), absl::StatusCode::kUnavailable) << "it keeps nothing";
  PeerHealth health(b_loop_.clock());
  std::unique_ptr<GrpcPeers> b_peers;
  std::unique_ptr<Replicator> replicator;
  b_loop_.Run([&] {
    b_peers = std::make_unique<GrpcPeers>(b_loop_, b_, GrpcPeers::Puller());
    replicator = std::make_unique<Replicator>(
        b_loop_, *b_peers, health, answers_->pointers(),
        Replicator::Options{
            .self_id = "b",
            .held = [&](std::uint64_t anchor) { return Places(anchor == hash ? 3 : 1); },
            .bytes = [](const Fingerprint&, const BlockKey&) { return std::uint64_t{0}; }});
    replicator->SetView(ViewOf({a_, b_}));
    answers_->SetReplicator(replicator.get());
  });
  const auto counts = hand_over();
  ASSERT_TRUE(counts.ok()) << counts.status();
  EXPECT_EQ(*counts, (std::vector<std::uint8_t>{3, 1}));
  b_loop_.Run([&] { EXPECT_EQ(replicator->queued(), 1u); });

  Digests digests = {};
  digests[DigestOf(hash)] ^= DigestWord({hash, Places(3)});
  const auto compare = [&] {
    return Wait<std::uint64_t>(5000 * kMs, [&](std::int64_t deadline, auto done) {
      peers_->Compare(b_, digests, deadline, done);
    });
  };
  EXPECT_EQ(*compare(), std::uint64_t{1} << DigestOf(7)) << "which was handed over, too";
  EXPECT_EQ(*compare(), 0u);
  b_loop_.Run([&] {
    answers_->SetReplicator(nullptr);
    answers_->SetView(ViewOf({b_}));
    replicator = nullptr;
    b_peers = nullptr;
  });
  EXPECT_EQ(compare().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(hand_over().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(GrpcPeersTest, AnUnknownNamespaceIsNoError) {
  ASSERT_TRUE(Put(1).ok());
  fingerprint_[0] ^= std::byte{1};
  const auto answers = Locate(b_, {Query({1})});
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ((*answers)[0].present, 0u);
}

TEST_F(GrpcPeersTest, ANodeDescribesTheNamespacesThatItKnows) {
  const auto describe = [&](const NamespaceQuestion& question) {
    return Wait<NamespaceLearner::Answer>(30'000 * kMs, [&](std::int64_t deadline, auto done) {
      peers_->DescribeNamespace(b_, question, deadline, done);
    });
  };
  NamespaceSpec spec = Spec();
  spec.tenant.clear();
  const auto by_fingerprint = describe({.name = "", .fingerprint = fingerprint_});
  ASSERT_TRUE(by_fingerprint.ok()) << by_fingerprint.status();
  EXPECT_EQ(*by_fingerprint, spec);
  const auto by_name = describe({.name = store_->Namespaces().at(0).name});
  ASSERT_TRUE(by_name.ok()) << by_name.status();
  EXPECT_EQ(*by_name, spec);
  const auto unknown = describe({.name = "nowhere"});
  ASSERT_TRUE(unknown.ok()) << unknown.status();
  EXPECT_FALSE(unknown->has_value());
  EXPECT_EQ(peers_->stats().at("b").failures, 0u) << "not to know it is no failure";
  v1::DescribeNamespaceRequest malformed;
  malformed.mutable_namespace_()->set_fingerprint("short");
  EXPECT_EQ(Ask(&v1::Peer::Stub::DescribeNamespace, malformed).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Ask(&v1::Peer::Stub::DescribeNamespace, v1::DescribeNamespaceRequest()).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

// Two tenants with one spec, of which this fixture's node has a block each.
TEST_F(GrpcPeersTest, WhatIsSaidOfOneTenantIsOfNoOther) {
  const SharedTenants shared({.named = true});
  PeerAnswers answers(b_loop_, *store_, PointerTable::Options(), shared);
  b_loop_.Run([&] { answers.SetView(ViewOf({a_, b_})); });
  NamespaceSpec spec_a = Spec(), spec_b = Spec();
  spec_a.tenant = "team-a";
  spec_b.tenant = "team-b";
  const auto space_a = store_->OpenNamespace("theirs", spec_a);
  ASSERT_TRUE(space_a.ok()) << space_a.status();
  ASSERT_TRUE(store_->OpenNamespace("theirs", spec_b).ok());
  const NamespaceId own = std::exchange(space_, space_a->id);
  ASSERT_TRUE(Put(1).ok());
  space_ = own;
  const auto present = [&](const NamespaceSpec& spec) {
    fingerprint_ = FingerprintOf(spec);
    const auto said = Locate(b_, {Query({1})});
    EXPECT_TRUE(said.ok()) << said.status();
    return said.ok() ? (*said)[0].present : 99;
  };
  const auto describe = [&](const NamespaceQuestion& question) {
    const auto said =
        Wait<NamespaceLearner::Answer>(30'000 * kMs, [&](std::int64_t deadline, auto done) {
          peers_->DescribeNamespace(b_, question, deadline, done);
        });
    EXPECT_TRUE(said.ok()) << said.status();
    return said.ok() && said->has_value();
  };
  // A node that shares nobody but its own: where everybody who reaches it is a node.
  EXPECT_EQ(present(spec_a), 0u);
  EXPECT_FALSE(describe({.name = "theirs", .tenant = "team-a"}));
  context_->shared = shared;
  context_->peer_answers = &answers;
  EXPECT_EQ(present(spec_a), 1u);
  EXPECT_EQ(present(spec_b), 0u);
  EXPECT_EQ(present(Spec()), 0u);
  EXPECT_TRUE(describe({.name = "theirs", .tenant = "team-a"}));
  EXPECT_TRUE(describe({.name = "", .fingerprint = FingerprintOf(spec_a), .tenant = "team-a"}));
  EXPECT_FALSE(describe({.name = "", .fingerprint = FingerprintOf(spec_a), .tenant = "team-b"}));
  EXPECT_FALSE(describe({.name = "", .fingerprint = FingerprintOf(spec_a)}));
  EXPECT_FALSE(describe({.name = "theirs"})) << "the daemons' own has none of that name";
  context_->peer_answers = answers_.get();
  b_loop_.Run([] {});  // Nothing of it is left there.
}

// As one of an earlier version does, which reads no tenant.
TEST_F(GrpcPeersTest, ADescriptionOfAnotherTenantIsNoAnswer) {
  class Old final : public v1::Peer::Service {
    grpc::Status DescribeNamespace(grpc::ServerContext*, const v1::DescribeNamespaceRequest*,
                                   v1::DescribeNamespaceReply* reply) override {
      ToProto(Spec(), reply->mutable_spec());
      return grpc::Status::OK;
    }
  } service;
  PeerServer old(&service);
  const Member member = MemberOf("old", 'o', old.address());
  const auto describe = [&](const std::string& tenant) {
    return Wait<NamespaceLearner::Answer>(30'000 * kMs, [&](std::int64_t deadline, auto done) {
      peers_->DescribeNamespace(member, {.name = "n", .tenant = tenant}, deadline, done);
    });
  };
  const auto own = describe("");
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_TRUE(own->has_value());
  const auto other = describe("team-a");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->has_value());
  StopPeers();  // Before the server that it is connected to.
}

TEST_F(GrpcPeersTest, AnotherProcessAtTheAddressIsNobody) {
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

TEST_F(GrpcPeersTest, OnlyMembersAreBelievedToHaveBlocks) {
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

TEST_F(GrpcPeersTest, WhatIsOutOfBoundsIsRefusedByValueAndLimit) {
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

TEST_F(GrpcPeersTest, AnAnswerThatCannotBeIsSeenAsOne) {
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

TEST_F(GrpcPeersTest, WhoIsStoppedOrGoneCostsADeadline) {
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

// Answers Locate, and says what the call carried.
class ListeningPeer final : public v1::Peer::Service {
 public:
  grpc::Status Locate(grpc::ServerContext* call, const v1::LocateRequest*,
                      v1::LocateReply*) override {
    std::string carried;
    for (const char* key : {"x-request-id", "traceparent", "tracestate"}) {
      for (auto [it, end] = call->client_metadata().equal_range(key); it != end; ++it) {
        absl::StrAppend(&carried, key, "=", absl::string_view(it->second.data(), it->second.size()),
                        " ");
      }
    }
    MutexLock lock(mu_);
    heard_.push_back(carried);
    return grpc::Status::OK;
  }
  std::vector<std::string> heard() {
    MutexLock lock(mu_);
    return heard_;
  }

 private:
  Mutex mu_;
  std::vector<std::string> heard_;
};

TEST_F(GrpcPeersTest, CallsCarryTheRequestThatTheyAreForAndThoseThatFollowFromThem) {
  ListeningPeer service;
  PeerServer server(&service);
  const Member peer = MemberOf("c", 'c', server.address());
  const std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  std::promise<void> ended;
  loop_.Post([&] {
    const auto ask = [&](auto done) {
      peers_->Locate(peer, fingerprint_, {Query({1})},
                     loop_.clock().MonotonicNanos() + 30'000 * kMs, std::move(done));
    };
    const RequestScope scope({.request_id = "r-1", .traceparent = trace, .tracestate = "a=1"});
    // Its answer begins another one; the scope is over by then.
    ask([&, ask](const auto&) {
      EXPECT_NE(CurrentRequest(), nullptr);
      ask([&, ask](const auto&) {
        const RequestScope none(RequestPtr{});
        ask([&](const auto&) { ended.set_value(); });
      });
    });
  });
  ended.get_future().get();
  const std::string all = absl::StrCat("x-request-id=r-1 traceparent=", trace, " tracestate=a=1 ");
  EXPECT_THAT(service.heard(), ::testing::ElementsAre(all, all, ""));
  loop_.Run([] { EXPECT_EQ(CurrentRequest(), nullptr); });
}

TEST_F(GrpcPeersTest, ConnectionsEndWithTheMember) {
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

TEST_F(GrpcPeersTest, PullsAreHandedOn) {
  Peers::CallId call = 0;
  bool done = false;
  loop_.Run([&] {
    RunKeys blocks;
    blocks.keys = {Id(1).key, Id(2).key};
    const auto set_done = [&](const auto&) { done = true; };
    call = peers_->Pull(b_, fingerprint_, blocks, 0, set_done);
    EXPECT_EQ(pulled_, "b 2");
    ASSERT_EQ(pulls_.count(call), 1u);
    pulls_[call](std::vector<absl::Status>(2));
    EXPECT_TRUE(done);
    peers_->Cancel(peers_->Pull(b_, fingerprint_, blocks, 0, set_done));
    EXPECT_EQ(pulls_.size(), 1u) << "cancelled";
  });
}

// Cancellations at any moment of a call, from within the callbacks of others, and at the end of
// all: none runs twice, none after it was cancelled, and with some deadline each runs.
TEST_F(GrpcPeersTest, CallsEndOnceWheneverTheyAreCancelled) {
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
