// What nodes say to each other arrives, for the tenant and the request that it is about.
#include "service/grpc_peers.h"

#include <gmock/gmock.h>

#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/request_context.h"
#include "service/heard_names.h"
#include "storage/core/mutex.h"
#include "tests/cluster/sketches.h"
#include "tests/service/grpc_peers_fixture.h"

namespace kvmill {
namespace {

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
  const std::string name = store_->Namespaces().at(0).name;
  EXPECT_EQ(*by_fingerprint, (DescribedNamespace{spec, name, false}));
  const auto by_name = describe({.name = name});
  ASSERT_TRUE(by_name.ok()) << by_name.status();
  EXPECT_EQ(*by_name, (DescribedNamespace{spec, name, false}));
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

// Of namespaces that its own engines never opened.
TEST_F(GrpcPeersTest, ANodeSaysWhatItHeardOfAName) {
  const auto describe = [&](const NamespaceQuestion& question) {
    const auto said =
        Wait<NamespaceLearner::Answer>(30'000 * kMs, [&](std::int64_t deadline, auto done) {
          peers_->DescribeNamespace(b_, question, deadline, done);
        });
    EXPECT_TRUE(said.ok()) << said.status();
    return said.ok() ? *said : NamespaceLearner::Answer();
  };
  NamespaceSpec spec = Spec();
  spec.tenant = kDefaultTenant;
  spec.model = "heard";
  ASSERT_TRUE(store_->OpenNamespace(NameOfHeard(FingerprintOf(spec), "theirs"), spec).ok());
  NamespaceSpec said = spec;
  said.tenant.clear();
  EXPECT_EQ(describe({.name = "theirs"}), (DescribedNamespace{said, "theirs", true}));
  EXPECT_EQ(describe({.name = "", .fingerprint = FingerprintOf(spec)}),
            (DescribedNamespace{said, "theirs", false}));
  // Two of them are no answer, and no error: it may mean something elsewhere.
  NamespaceSpec other = spec;
  other.model = "another";
  ASSERT_TRUE(store_->OpenNamespace(NameOfHeard(FingerprintOf(other), "theirs"), other).ok());
  EXPECT_FALSE(describe({.name = "theirs"}).has_value());
  // One that was heard under no name, or under one that none can be.
  other.model = "nameless";
  ASSERT_TRUE(store_->OpenNamespace(NameOfHeard(FingerprintOf(other), "a b"), other).ok());
  EXPECT_EQ(describe({.name = "", .fingerprint = FingerprintOf(other)})->name, "");
  EXPECT_FALSE(describe({.name = "a b"}).has_value());
  EXPECT_EQ(FindHeard(*store_, kDefaultTenant, "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindHeard(*store_, "team-a", "theirs").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(NameOfHeard(FingerprintOf(other), std::string(128, 'x')),
            NameOfHeard(FingerprintOf(other), ""));
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

}  // namespace
}  // namespace kvmill
