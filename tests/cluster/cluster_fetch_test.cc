// Three real daemons and a real etcd: what one stored, all find and fetch, byte for byte; and when
// it is killed, stopped or restarted, the others have misses, soon, and no errors.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/mapped_blocks.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;
using ::testing::Each;
using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 70;  // Three runs, of 32, 32 and 6.

class ClusterFetchTest : public ClusterTest {
 protected:
  void SetUp() override {
    ClusterTest::SetUp();
    for (const char* name : {"a", "b", "c"}) {
      StartNode(name, name, kLongLease, {"--data-dir", directory_ / (std::string(name) + "-data")});
    }
    for (const char* name : {"a", "b", "c"}) {
      Until([&] { return MembersOf(name) == "a b c"; });
      ns_[name] = OpenOn(name);
    }
  }

  ClientNamespace OpenOn(const std::string& name) {
    const auto ns = ClientOf(name).OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : ClientNamespace();
  }
  Client& ClientOf(const std::string& name) { return *nodes_.at(name).client; }

  void PutOn(const std::string& name, const std::string& sequence) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
    StoreOptions options;
    options.wait_durable = true;
    const auto result = ClientOf(name).Store(ns_[name], values.Blocks(sequence), options);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->blocks_stored, kBlocks);
  }
  LookupResult LookUp(const std::string& name, const std::string& sequence,
                      const Elsewhere& elsewhere = {}) {
    const auto begin = steady_clock::now();
    const auto result =
        ClientOf(name).Lookup(ns_[name], KeysOf(sequence, kBlocks), {}, {.elsewhere = elsewhere});
    took_ = steady_clock::now() - begin;
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult();
  }
  std::uint32_t HitsOn(const std::string& name, const std::string& sequence,
                       const Elsewhere& elsewhere = {}) {
    return LookUp(name, sequence, elsewhere).hit_blocks;
  }
  // The pages of the blocks that came, as bytes.
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  Pages Fetch(const std::string& name, const std::vector<BlockKey>& keys,
              const Elsewhere& elsewhere = {}) {
    PageCollector sink;
    const auto begin = steady_clock::now();
    const auto result = ClientOf(name).Fetch(
        ns_[name], keys, sink, {.timeout = absl::Seconds(20), .elsewhere = elsewhere});
    took_ = steady_clock::now() - begin;
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return {};
    for (const FetchBlockResult& block : result->blocks) {
      EXPECT_TRUE(block.status.ok() || absl::IsNotFound(block.status)) << block.status;
    }
    return sink.pages;
  }
  static std::vector<BlockKey> Part(const std::string& sequence, std::size_t first,
                                    std::size_t count) {
    const std::vector<BlockKey> all = KeysOf(sequence, kBlocks);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return {begin, begin + static_cast<std::ptrdiff_t>(count)};
  }
  // Whoever should know that "a" has the sequence does.
  void Announced(const std::string& sequence) {
    for (const char* name : {"b", "c"}) {
      Until([&] { return HitsOn(name, sequence) == kBlocks; });
    }
  }

  void ComesWholeTo(const std::string& name, const std::string& sequence) {
    Until([&] {
      HitsOn(name, sequence);
      return Fetch(name, KeysOf(sequence, kBlocks)).size() == kBlocks * 2u;
    });
  }

  std::map<std::string, ClientNamespace> ns_;
  steady_clock::duration took_{};
};

TEST_F(ClusterFetchTest, WhatOneStoredAllFindAndFetch) {
  PutOn("a", "s");
  const Pages stored = Fetch("a", KeysOf("s", kBlocks));
  ASSERT_EQ(stored.size(), kBlocks * 2u);
  Announced("s");
  const LookupResult found = LookUp("b", "s");
  EXPECT_THAT(found.tiers, Each(Tier::kPeer));
  EXPECT_EQ(found.hit_tokens, std::uint64_t{kBlocks} * SmallSpec().block_tokens);
  EXPECT_EQ(HitsOn("b", "s", {.local_only = true}), 0u);
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks), {.local_only = true}).empty());
  EXPECT_EQ(HitsOn("b", "another"), 0u);

  EXPECT_EQ(Fetch("b", KeysOf("s", kBlocks)), stored);
  // They stay.
  EXPECT_THAT(LookUp("b", "s").tiers, Each(Tier::kHost));
  EXPECT_EQ(Fetch("b", KeysOf("s", kBlocks), {.local_only = true}), stored);
  const std::string metrics = Metrics("b");
  EXPECT_THAT(metrics, HasSubstr("kvmill_pulled_blocks_total{result=\"stored\"} 70\n"));
  EXPECT_THAT(metrics, HasSubstr("kvmill_peer_info{peer=\"a\",transport=\"grpc\"} 1\n"));
  EXPECT_THAT(metrics, HasSubstr("kvmill_peer_failures_total{peer=\"a\",transport=\"grpc\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("kvmill_lookup_requests_total{result=\"hit\"} "));

  // In place, on the third.
  ASSERT_EQ(HitsOn("c", "s"), kBlocks);
  const auto mapped = ClientOf("c").Map(ns_["c"], KeysOf("s", kBlocks));
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    ASSERT_TRUE((*mapped)->status(block).ok()) << block << ": " << (*mapped)->status(block);
  }
  EXPECT_EQ(Fetch("c", KeysOf("s", kBlocks), {.local_only = true}), stored);
}

TEST_F(ClusterFetchTest, AFetchOverUcxFindsThem) {
  PutOn("a", "s");
  Announced("s");
  // Another daemon with a data plane, and a client that is not on its node.
  StartNode("d", "d", kLongLease, {"--ucx", "127.0.0.1"});
  Until([&] { return MembersOf("d") == "a b c d"; });
  Client::Options options;
  options.address = nodes_["d"].ready["listen"].get<std::string>();
  options.path = DataPath::kUcx;
  auto remote = Client::Create(options);
  ASSERT_TRUE(remote.ok()) << remote.status();
  nodes_["d"].client = *std::move(remote);
  ns_["d"] = OpenOn("d");
  const Pages stored = Fetch("a", KeysOf("s", kBlocks));
  ComesWholeTo("d", "s");
  EXPECT_EQ(Fetch("d", KeysOf("s", kBlocks)), stored);
  EXPECT_THAT(Metrics("d"), HasSubstr("kvmill_pulled_blocks_total{result=\"stored\"} 70\n"));
  EXPECT_EQ(HitsOn("d", "s", {.local_only = true}), kBlocks);
}

TEST_F(ClusterFetchTest, AFetchFromTheMiddleFindsItsBlocksByAnchorOrHint) {
  PutOn("a", "s");
  Announced("s");
  nodes_.erase("c");
  // A node that has looked nothing up yet.
  StartNode("c", "c2", kLongLease);
  Until([&] { return absl::StrContains(MembersOf("c"), "a b"); });
  ns_["c"] = OpenOn("c");
  const std::vector<BlockKey> keys = Part("s", 40, 8);
  EXPECT_EQ(Fetch("c", keys, {.first_block = 40}).size(), 0u) << "nobody knows where that is";
  Until([&] {
    return Fetch("c", keys, {.first_block = 40, .anchor = KeysOf("s", kBlocks)[32]}).size() == 16;
  });
  EXPECT_EQ(Fetch("c", Part("s", 65, 3), {.hint = "a", .first_block = 65}).size(), 6u);
}

TEST_F(ClusterFetchTest, WhoIsKilledIsAMissAndNoError) {
  PutOn("a", "s");
  Announced("s");
  KillNode("a");
  // As a lookup has just told where the blocks are.
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks)).empty());
  EXPECT_LT(took_, Millis(3000));
  EXPECT_EQ(HitsOn("b", "s"), 0u);
  EXPECT_LT(took_, Millis(1000));
  // It is back, with its disk. What homes know of its last life does not count.
  StartNode("a", "a", kLongLease, {"--data-dir", directory_ / "a-data"});
  ns_["a"] = OpenOn("a");
  ComesWholeTo("c", "s");
}

// Its lease is long: it stays a member.
TEST_F(ClusterFetchTest, WhoIsStoppedCostsALimitedTime) {
  PutOn("a", "s");
  Announced("s");
  nodes_["a"].process->Signal(SIGSTOP);
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks)).empty());
  EXPECT_LT(took_, Millis(12'000));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(HitsOn("c", "another"), 0u);
    EXPECT_LT(took_, Millis(1000));
    LookUp("c", "s");
    EXPECT_LT(took_, Millis(1000));
  }
  nodes_["a"].process->Signal(SIGCONT);
  // It was left alone for a while, and is tried by one call first.
  ComesWholeTo("b", "s");
}

}  // namespace
}  // namespace kvmill::testing
