// Three real daemons and a real etcd: what one stored, all find and fetch, byte for byte; and when
// it is killed, stopped or restarted, the others have misses, soon, and no errors.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/mapped_blocks.h"
#include "client/request_context.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;
using ::testing::Each;
using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 70;  // Three runs, of 32, 32 and 6.
// How long nodes wait for each other in a lookup: as by default, and so long that what a busy
// machine says late is no miss.
constexpr Millis kPeerTimeout{200};
constexpr Millis kPatience{10'000};
// Of calls that wait for 20 s, three quarters of it for other nodes, when these hold them up.
constexpr Millis kNotHeldUp{12'000};

class ClusterFetchTest : public ClusterTest {
 protected:
  void StartNodes(Millis peer_timeout = kPeerTimeout) {
    peer_timeout_ = absl::StrCat(peer_timeout.count(), "ms");
    for (const char* name : {"a", "b", "c"}) StartOnDisk(name);
    for (const char* name : {"a", "b", "c"}) {
      Until([&] { return MembersOf(name) == "a b c"; });
      ns_[name] = OpenOn(name);
    }
  }
  void StartOnDisk(const std::string& name) {
    StartNode(name, name, kLongLease,
              {"--data-dir", directory_ / (name + "-data"), "--peer-timeout", peer_timeout_});
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

  // The number behind `line` in a page of metrics; 0: it is not there.
  static std::uint64_t CountIn(const std::string& metrics, const std::string& line) {
    const std::size_t at = metrics.find(line);
    if (at == metrics.npos) return 0;
    std::uint64_t count = 0;
    const std::size_t begin = at + line.size();
    EXPECT_TRUE(absl::SimpleAtoi(metrics.substr(begin, metrics.find('\n', begin) - begin), &count));
    return count;
  }

  void ComesWholeTo(const std::string& name, const std::string& sequence) {
    Until([&] {
      HitsOn(name, sequence);
      return Fetch(name, KeysOf(sequence, kBlocks)).size() == kBlocks * 2u;
    });
  }

  std::map<std::string, ClientNamespace> ns_;
  std::string peer_timeout_;
  steady_clock::duration took_{};
};

TEST_F(ClusterFetchTest, WhatOneStoredAllFindAndFetch) {
  StartNodes(kPatience);
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

  ComesWholeTo("b", "s");
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
  Until([&] {
    const auto mapped = ClientOf("c").Map(ns_["c"], KeysOf("s", kBlocks));
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    std::uint32_t here = 0;
    for (std::uint32_t block = 0; mapped.ok() && block < kBlocks; ++block) {
      here += (*mapped)->status(block).ok() ? 1 : 0;
    }
    return here == kBlocks;
  });
  EXPECT_EQ(Fetch("c", KeysOf("s", kBlocks), {.local_only = true}), stored);
}

// Prompts of several users behind one system prompt, all within the first run.
TEST_F(ClusterFetchTest, PromptsThatBeginAlikeAreToldApart) {
  constexpr std::uint32_t kAlike = 4, kLong = 14;
  StartNodes(kPatience);
  const auto keys_of = [](const std::string& user) {
    std::vector<BlockKey> keys = KeysOf("system", kAlike);
    const std::vector<BlockKey> own = KeysOf(user, kLong);
    keys.insert(keys.end(), own.begin() + kAlike, own.end());
    return keys;
  };
  const auto put = [&](const std::string& name, const std::string& user) {
    Sequence values(SmallSpec(), kLong * SmallSpec().block_tokens, 1);
    std::vector<StoreBlock> blocks = values.Blocks(user);
    const std::vector<BlockKey> keys = keys_of(user);
    for (std::uint32_t i = 0; i < kLong; ++i) {
      blocks[i].key = keys[i];
      if (i > 0) blocks[i].parent = keys[i - 1];
    }
    const auto stored = ClientOf(name).Store(ns_[name], blocks, {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    ASSERT_EQ(stored->blocks_failed, 0u);
  };
  const auto hits = [&](const std::string& name, const std::string& user) {
    const auto found = ClientOf(name).Lookup(ns_[name], keys_of(user));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 0;
  };
  put("a", "one");
  for (const char* name : {"b", "c"}) Until([&] { return hits(name, "one") == kLong; });
  for (const char* name : {"a", "b", "c"}) EXPECT_EQ(hits(name, "two"), kAlike) << name;

  // Where several have part of a run in common, those who have them say which.
  put("a", "three");
  for (const char* name : {"b", "c"}) Until([&] { return hits(name, "three") == kLong; });
  for (const char* name : {"b", "c"}) {
    EXPECT_EQ(hits(name, "one"), kLong) << name;
    EXPECT_EQ(hits(name, "two"), kAlike) << name;
  }
  put("c", "two");
  Until([&] { return hits("b", "two") == kLong; });
  for (const char* user : {"one", "two", "three"}) EXPECT_EQ(hits("b", user), kLong) << user;
  for (const char* user : {"two", "three"}) {
    EXPECT_EQ(Fetch("b", keys_of(user)).size(), kLong * 2u) << user;
    EXPECT_EQ(hits("b", user), kLong);
  }
  EXPECT_EQ(hits("b", "four"), kAlike);
}

TEST_F(ClusterFetchTest, AFetchOverUcxFindsThem) {
  StartNodes();
  PutOn("a", "s");
  Announced("s");
  // Another daemon with a data plane, and a client that is not on its node.
  StartNode("d", "d", kLongLease, {"--ucx", "127.0.0.1", "--peer-timeout", peer_timeout_});
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

// What carries blocks between nodes is told of each node, counted and logged; and who asked for
// them is known where they come from.
TEST_F(ClusterFetchTest, BetweenNodesWithADataPlaneItCarriesTheBlocksAndTheRequest) {
  peer_timeout_ = "10s";
  const std::vector<std::string> more = {"--ucx",       "127.0.0.1",   "--peer-timeout",
                                         peer_timeout_, "--log-level", "debug"};
  for (const char* name : {"a", "b"}) StartNode(name, name, kLongLease, more);
  for (const char* name : {"a", "b"}) {
    Until([&] { return MembersOf(name) == "a b"; });
    ns_[name] = OpenOn(name);
  }
  Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
  ASSERT_TRUE(ClientOf("a").Store(ns_["a"], values.Blocks("s"), {}).ok());
  Until([&] { return HitsOn("b", "s") == kBlocks; });
  EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_peer_info{peer=\"a\",transport=\"grpc\"} 1\n"));
  EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_pulled_bytes_total{transport=\"grpc\"} 0\n"));
  {
    const RequestScope scope({.request_id = "pull-7"});
    ComesWholeTo("b", "s");
  }
  const std::string metrics = Metrics("b");
  EXPECT_THAT(metrics, HasSubstr("kvmill_peer_info{peer=\"a\",transport=\"tcp/lo\"} 1\n"));
  EXPECT_EQ(metrics.find("kvmill_peer_info{"), metrics.rfind("kvmill_peer_info{")) << "one a peer";
  EXPECT_GT(CountIn(metrics, "kvmill_pulled_bytes_total{transport=\"tcp/lo\"} "), 0u);
  EXPECT_EQ(CountIn(metrics, "kvmill_pulled_bytes_total{transport=\"grpc\"} "), 0u);
  EXPECT_THAT(nodes_["b"].process->standard_error(),
              HasSubstr("cluster: blocks of node \"a\" come by tcp/lo"));
  const std::string log = nodes_["a"].process->standard_error();
  const std::size_t at = log.find("data plane: a fetch of ");
  ASSERT_NE(at, log.npos) << log << nodes_["b"].process->standard_error();
  EXPECT_THAT(log.substr(at, log.find('\n', at) - at), HasSubstr("request_id=pull-7"));
}

TEST_F(ClusterFetchTest, AFetchFromTheMiddleFindsItsBlocksByAnchorOrHint) {
  StartNodes();
  PutOn("a", "s");
  Announced("s");
  nodes_.erase("c");
  // A node that has looked nothing up yet.
  StartNode("c", "c2", kLongLease, {"--peer-timeout", peer_timeout_});
  Until([&] { return absl::StrContains(MembersOf("c"), "a b"); });
  ns_["c"] = OpenOn("c");
  const std::vector<BlockKey> keys = Part("s", 40, 8);
  EXPECT_EQ(Fetch("c", keys, {.first_block = 40}).size(), 0u) << "nobody knows where that is";
  Until([&] {
    return Fetch("c", keys, {.first_block = 40, .anchor = KeysOf("s", kBlocks)[32]}).size() == 16;
  });
  Until([&] { return Fetch("c", Part("s", 65, 3), {.hint = "a", .first_block = 65}).size() == 6; });
}

TEST_F(ClusterFetchTest, WhoIsKilledIsAMissAndNoError) {
  StartNodes();
  PutOn("a", "s");
  Announced("s");
  KillNode("a");
  // As a lookup has just told where the blocks are.
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks)).empty());
  EXPECT_LT(took_, kNotHeldUp);
  // A lookup may believe what homes were told of it, a fetch does not.
  LookUp("b", "s");
  EXPECT_LT(took_, kNotHeldUp);
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks)).empty());
  EXPECT_LT(took_, kNotHeldUp);
  // It is back, with its disk. What homes know of its last life does not count.
  StartOnDisk("a");
  ns_["a"] = OpenOn("a");
  ComesWholeTo("c", "s");
}

// Its lease is long: it stays a member.
TEST_F(ClusterFetchTest, WhoIsStoppedCostsALimitedTime) {
  StartNodes();
  PutOn("a", "s");
  Announced("s");
  nodes_["a"].process->Signal(SIGSTOP);
  EXPECT_TRUE(Fetch("b", KeysOf("s", kBlocks)).empty());
  EXPECT_LT(took_, kNotHeldUp);
  // Ten lookups, kPeerTimeout each at most. The machine may stand still during one of them, not in
  // all.
  steady_clock::duration all{};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(HitsOn("c", "another"), 0u);
    all += took_;
    LookUp("c", "s");
    all += took_;
  }
  EXPECT_LT(all, 10 * Millis(1000));
  nodes_["a"].process->Signal(SIGCONT);
  // It was left alone for a while, and is tried by one call first.
  ComesWholeTo("b", "s");
}

// Calls of all kinds wait for a node that does not answer, longer than the drain may take: they
// end as they would at their own deadlines, and in time.
TEST_F(ClusterFetchTest, WhoLeavesDoesNotWaitForAStoppedNode) {
  StartNodes();
  StartNode("d", "d", kLongLease, {"--peer-timeout", "10s", "--drain-timeout", "2s"});
  Until([&] { return MembersOf("d") == "a b c d"; });
  ns_["d"] = OpenOn("d");
  const auto requests = [&] {
    std::uint64_t sum = 0;
    for (const char* peer : {"a", "b", "c"}) {
      sum += CountIn(Metrics("d"), absl::StrCat("kvmill_peer_requests_total{peer=\"", peer,
                                                "\",transport=\"grpc\"} "));
    }
    return sum;
  };
  // It knows the members a little before it asks them.
  Until([&] { return HitsOn("d", "early") == 0 && requests() > 0; });
  for (const char* peer : {"a", "b", "c"}) nodes_[peer].process->Signal(SIGSTOP);
  const CallOptions call{.timeout = absl::Seconds(120)};
  const std::vector<std::function<absl::Status()>> calls = {
      [&] { return ClientOf("d").Lookup(ns_["d"], KeysOf("looked up", 3), {}, call).status(); },
      [&] {
        PageCollector sink;
        return ClientOf("d").Fetch(ns_["d"], KeysOf("fetched", 3), sink, call).status();
      },
      [&] {
        // Without its session there is nothing to lease: that it ends is all.
        static_cast<void>(ClientOf("d").Map(ns_["d"], KeysOf("mapped", 3), {}, call));
        return absl::OkStatus();
      },
      [&] {
        return ClientOf("d").Where("shared", KeysOf("sought", 1)[0], BlockKey(), 0, call).status();
      }};
  std::vector<std::future<absl::Status>> answers;
  for (const auto& one : calls) {
    const std::uint64_t before = requests();
    answers.push_back(std::async(std::launch::async, one));
    Until([&] { return requests() > before; });
  }
  std::this_thread::sleep_for(Millis(200));
  const auto begin = std::chrono::steady_clock::now();
  nodes_["d"].process->Signal(SIGTERM);
  EXPECT_EQ(nodes_["d"].process->WaitExit(std::chrono::seconds(100)).code, 0);
  // What others are asked takes ten seconds; leaving does not wait for it.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const absl::Status status = answers[i].get();
    // An answer that a busy machine has no time to send before the end is lost with the daemon.
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << i << ": " << status;
  }
  for (const char* peer : {"a", "b", "c"}) nodes_[peer].process->Signal(SIGCONT);
}

TEST_F(ClusterFetchTest, PeopleAreToldWhoHasABlock) {
  StartNodes();
  PutOn("a", "s");
  Announced("s");
  const BlockKey key = KeysOf("s", 1)[0];
  const auto places = [&](const std::string& name) {
    const auto found = ClientOf(name).Where("shared", key, BlockKey(), 0);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? *found : BlockPlaces();
  };
  ComesWholeTo("b", "s");
  // Whoever is asked, and whatever that one has itself.
  for (const char* name : {"a", "b", "c"}) {
    Until([&] { return places(name).holders.size() == 2; });
    const BlockPlaces found = places(name);
    EXPECT_FALSE(found.homes.empty());
    for (const BlockPlaces::Holder& holder : found.holders) {
      EXPECT_TRUE(holder.member.id == "a" || holder.member.id == "b") << holder.member.id;
      EXPECT_EQ(holder.member.incarnation, nodes_[holder.member.id].ready["boot_id"]);
      EXPECT_EQ(holder.member.address, nodes_[holder.member.id].ready["listen"]);
      EXPECT_EQ(holder.member.capacity_bytes, StatusOf("c").members[0].capacity_bytes);
      EXPECT_TRUE(holder.told || holder.member.id != name) << "of itself it knows";
    }
  }
  // Of another block of the run, without its anchor: who has it knows that, others ask everybody.
  const BlockKey later = KeysOf("s", 6)[5];
  const auto homes = [&](const std::string& name, const BlockKey& anchor, std::uint32_t place) {
    const auto found = ClientOf(name).Where("shared", later, anchor, place);
    EXPECT_TRUE(found.ok()) << found.status();
    std::vector<std::string> ids;
    for (std::size_t i = 0; found.ok() && i < found->homes.size(); ++i) {
      ids.push_back(found->homes[i].id);
    }
    return ids;
  };
  for (const char* name : {"a", "b"}) {
    Until([&] { return homes(name, BlockKey(), 0) == homes(name, key, 5); });
  }
  Until([&] {
    const auto found = ClientOf("c").Where("shared", later, BlockKey(), 0);
    return found.ok() && found->holders.size() == 2;
  });
}

}  // namespace
}  // namespace kvmill::testing
