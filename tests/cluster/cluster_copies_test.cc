// Three real daemons and a real etcd that keep copies: one is killed, and everything is found and
// soon copied again; one is told to end, and what only it had is on the others.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 70;  // Three runs, of 32, 32 and 6.

class ClusterCopiesTest : public ClusterTest {
 protected:
  void StartNodes(const std::vector<std::string>& more, Millis lease_of_a = kLongLease) {
    for (const char* name : {"a", "b", "c"}) {
      StartNode(name, name, *name == 'a' ? lease_of_a : kLongLease, more);
    }
    for (const char* name : {"a", "b", "c"}) {
      Until([&] { return MembersOf(name) == "a b c"; });
    }
  }
  Client& ClientOf(const std::string& name) { return *nodes_.at(name).client; }
  void OpenOn(const std::string& name) {
    const auto ns = ClientOf(name).OpenNamespace("shared", SmallSpec());
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_[name] = *ns;
  }
  void PutOn(const std::string& name) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
    const auto result = ClientOf(name).Store(ns_[name], values.Blocks("s"), {});
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->blocks_stored, kBlocks);
  }
  std::uint32_t HitsOn(const std::string& name, bool local_only) {
    return HitsOn(name, "s", local_only);
  }
  std::uint32_t HitsOn(const std::string& name, const std::string& sequence, bool local_only) {
    const auto result = ClientOf(name).Lookup(ns_[name], KeysOf(sequence, kBlocks), {},
                                              {.elsewhere = {.local_only = local_only}});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->hit_blocks : 0;
  }
  // The sum over nodes, each block counted as often as it is somewhere.
  std::uint32_t Copies(const std::vector<std::string>& names) {
    std::uint32_t copies = 0;
    for (const std::string& name : names) {
      for (const BlockKey& key : KeysOf("s", kBlocks)) {
        const auto found =
            ClientOf(name).Lookup(ns_[name], {key}, {}, {.elsewhere = {.local_only = true}});
        EXPECT_TRUE(found.ok()) << found.status();
        copies += found.ok() ? found->hit_blocks : 0;
      }
    }
    return copies;
  }
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  Pages Fetch(const std::string& name) {
    PageCollector sink;
    const auto result =
        ClientOf(name).Fetch(ns_[name], KeysOf("s", kBlocks), sink, {.timeout = absl::Seconds(20)});
    EXPECT_TRUE(result.ok()) << result.status();
    return sink.pages;
  }
  double Metric(const std::string& name, const std::string& line) {
    const std::string text = Metrics(name);
    const std::size_t at = text.find("\n" + line + " ");  // Not in a text of help.
    if (at == text.npos) return -1;
    double value = -1;
    const std::size_t begin = at + line.size() + 2;
    EXPECT_TRUE(absl::SimpleAtod(text.substr(begin, text.find('\n', begin) - begin), &value));
    return value;
  }
  double CopiedOn(const std::string& name) {
    return Metric(name, "kvmill_replication_blocks_total{result=\"copied\"}");
  }

  std::map<std::string, ClientNamespace> ns_;
};

TEST_F(ClusterCopiesTest, ANodeIsKilledAndNothingIsMissing) {
  // Its lease must end soon when it dies. When it ends before, since the machine stood still, there
  // are more copies than there should be.
  StartNodes({"--copies", "1"}, kLease);
  OpenOn("a");
  PutOn("a");
  // The others have not heard of the namespace from anybody else.
  Until([&] { return CopiedOn("b") + CopiedOn("c") >= kBlocks; });
  for (const char* name : {"b", "c"}) OpenOn(name);
  Until([&] { return Copies({"a", "b", "c"}) >= 2 * kBlocks; });
  const Pages stored = Fetch("a");
  ASSERT_EQ(stored.size(), kBlocks * 2u);

  KillNode("a");
  const Millis found =
      Until(kSoon, [&] { return HitsOn("b", false) == kBlocks && HitsOn("c", false) == kBlocks; });
  const Millis copied = Until(kSoon, [&] { return Copies({"b", "c"}) == 2 * kBlocks; });
  RecordProperty("found_ms", static_cast<int>(found.count()));
  RecordProperty("copied_ms", static_cast<int>(copied.count()));
  EXPECT_EQ(Fetch("b"), stored);
  EXPECT_EQ(Fetch("c"), stored);
}

// Of the blocks that an empty node is a home of by placement it takes what its rate admits: a
// sixteenth at first, rising for a minute (service/cluster/rate_limit.h). All of them are found
// meanwhile, at every node.
TEST_F(ClusterCopiesTest, ANewEmptyNodeStartsSlowly) {
  constexpr int kSequences = 60;
  constexpr std::uint32_t kShort = 8;  // Blocks of each: what is asked for at a time.
  constexpr double kRate = 2 << 20;
  constexpr double kRampSeconds = 60;
  for (const char* name : {"a", "b"}) StartNode(name, name, kLongLease, {"--copies", "1"});
  for (const char* name : {"a", "b"}) {
    Until([&] { return MembersOf(name) == "a b"; });
    OpenOn(name);
  }
  Sequence values(SmallSpec(), kShort * SmallSpec().block_tokens, 1);
  double stored_bytes = 0;
  for (int i = 0; i < kSequences; ++i) {
    const auto stored = ClientOf("a").Store(ns_["a"], values.Blocks(absl::StrCat("s", i)), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    ASSERT_EQ(stored->blocks_stored, kShort);
    stored_bytes += static_cast<double>(stored->stored_bytes);
  }
  Until([&] { return CopiedOn("b") == kSequences * kShort; });
  const auto all_found = [&](const std::string& name) {
    int found = 0;
    for (int i = 0; i < kSequences; ++i) {
      const auto hits = ClientOf(name).Lookup(ns_[name], KeysOf(absl::StrCat("s", i), kShort));
      found += hits.ok() && hits->hit_blocks == kShort ? 1 : 0;
    }
    return found == kSequences;
  };

  const auto begin = std::chrono::steady_clock::now();
  StartNode("c", "c", kLongLease,
            {"--copies", "1", "--replication-rate", absl::StrCat(static_cast<int>(kRate))});
  OpenOn("c");
  for (const char* name : {"a", "b", "c"}) Until([&] { return MembersOf(name) == "a b c"; });
  // Two nodes have each run already: the new one keeps those of which it is the first home, and as
  // the second one none, as the other of the two has them.
  double share = 0;
  for (int i = 0; i < kSequences; ++i) {
    const BlockKey first = KeysOf(absl::StrCat("s", i), 1)[0];
    std::vector<ClusterMember> homes;
    Until([&] {  // It may have the members and not yet the view that is made of them.
      const auto where = ClientOf("c").Where("shared", first, BlockKey(), 0);
      EXPECT_TRUE(where.ok()) << where.status();
      if (where.ok()) homes = where->homes;
      return homes.size() == 3;
    });
    ASSERT_EQ(homes.size(), 3u);
    share += homes[0].id == "c" ? stored_bytes / kSequences : 0;
  }
  ASSERT_GT(share, stored_bytes / 6) << "of a third";
  // It has come when nothing came for a while.
  double copied = 0;
  double seconds = 0;
  double came = 0;
  bool met_the_limit = false;
  Until([&] { return all_found("c"); });
  while ((copied == 0 || seconds < came + 5) && seconds < 60) {
    const double before = copied;
    copied = Metric("c", "kvmill_replication_bytes_total");
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (copied > before) came = seconds;
    const double ramp = std::min(seconds, kRampSeconds);
    const double admitted = kRate * (seconds / 16 + 15.0 / 16 * ramp * ramp / (2 * kRampSeconds));
    // And what it may save up, and what was begun last.
    const double at_once = 0.1 * kRate + stored_bytes / kSequences;
    ASSERT_LE(copied, admitted + at_once) << "after " << seconds << " s";
    met_the_limit |= copied > 0 && kRate * seconds > 2 * (admitted + at_once);
    for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(all_found(name)) << name;
    std::this_thread::sleep_for(Millis(100));
  }
  EXPECT_GE(copied, 0.99 * share);
  EXPECT_LE(copied, 1.5 * share) << "what it saw before it saw both of the others";
  EXPECT_TRUE(met_the_limit) << "at its full rate it would have had all of it by then";
  RecordProperty("seconds", static_cast<int>(seconds));
}

TEST_F(ClusterCopiesTest, ANodeThatLeavesHandsOverWhatOnlyItHas) {
  StartNodes({});
  for (const char* name : {"a", "b", "c"}) OpenOn(name);
  PutOn("a");
  for (const char* name : {"b", "c"}) {
    Until([&] { return HitsOn(name, false) == kBlocks; });
  }
  EXPECT_EQ(Copies({"b", "c"}), 0u) << "without copies blocks stay where they were written";
  const Pages stored = Fetch("a");
  nodes_["a"].client.reset();
  nodes_["a"].process->Signal(SIGTERM);
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  EXPECT_THAT(nodes_["a"].process->standard_error(),
              HasSubstr(absl::StrCat("drain: ", kBlocks, " blocks are on other nodes, 0 are not")));
  EXPECT_EQ(Copies({"b", "c"}), kBlocks);
  for (const char* name : {"b", "c"}) {
    Until([&] { return MembersOf(name) == "b c"; });
    Until([&] { return HitsOn(name, false) == kBlocks; });
    Until([&] { return Fetch(name) == stored; });
  }
}

// What was stored a moment ago is known to the store, and not yet to the part of the daemon that
// hands over.
TEST_F(ClusterCopiesTest, ANodeThatLeavesRightAfterAStoreHandsOverAllOfIt) {
  StartNodes({});
  for (const char* name : {"a", "b", "c"}) OpenOn(name);
  PutOn("a");
  nodes_["a"].process->Signal(SIGTERM);
  nodes_["a"].client.reset();
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  EXPECT_THAT(nodes_["a"].process->standard_error(),
              HasSubstr(absl::StrCat("drain: ", kBlocks, " blocks are on other nodes, 0 are not")));
  EXPECT_EQ(Copies({"b", "c"}), kBlocks);
}

// Neither counts on the other.
TEST_F(ClusterCopiesTest, TwoNodesThatLeaveTogetherLoseNothing) {
  StartNodes({"--copies", "1"});
  for (const char* name : {"a", "b", "c"}) OpenOn(name);
  PutOn("a");
  Until([&] { return CopiedOn("b") + CopiedOn("c") == kBlocks; });
  for (const char* name : {"a", "b"}) {
    nodes_[name].client.reset();
    nodes_[name].process->Signal(SIGTERM);
  }
  for (const char* name : {"a", "b"}) EXPECT_EQ(nodes_[name].process->WaitExit().code, 0);
  EXPECT_EQ(HitsOn("c", true), kBlocks);
}

TEST_F(ClusterCopiesTest, ANodeThatLeavesAsSoonAsAnotherIsAMemberHandsOver) {
  StartNode("a", kLongLease);
  OpenOn("a");
  PutOn("a");
  StartNode("b", kLongLease);
  for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  nodes_["a"].client.reset();
  nodes_["a"].process->Signal(SIGTERM);
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  OpenOn("b");
  EXPECT_EQ(HitsOn("b", true), kBlocks);
}

// Its home copies what three other nodes ask for, without --copies.
TEST_F(ClusterCopiesTest, ARunThatManyAskForIsCopiedToItsHome) {
  const std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  for (const std::string& name : names) StartNode(name, kLongLease);
  for (const std::string& name : names) {
    Until([&] { return MembersOf(name) == "a b c d e"; });
    OpenOn(name);
  }
  // One whose home is no holder.
  std::string sequence, home;
  for (int i = 0; home.empty() || home == "a"; ++i) {
    sequence = absl::StrCat("s", i);
    const auto where = ClientOf("a").Where("shared", KeyOf(sequence, 0), {}, 0);
    ASSERT_TRUE(where.ok()) << where.status();
    ASSERT_FALSE(where->homes.empty());
    home = where->homes[0].id;
  }
  Sequence values(SmallSpec(), 8 * SmallSpec().block_tokens, 1);
  ASSERT_TRUE(ClientOf("a").Store(ns_["a"], values.Blocks(sequence), {}).ok());
  const auto hits = [&](const std::string& name, bool local_only) {
    const auto found = ClientOf(name).Lookup(ns_[name], KeysOf(sequence, 8), {},
                                             {.elsewhere = {.local_only = local_only}});
    return found.ok() ? found->hit_blocks : 0;
  };
  std::vector<std::string> asking;
  for (const std::string& name : names) {
    if (name != "a" && name != home) asking.push_back(name);
  }
  for (std::size_t i = 0; i < asking.size(); ++i) {
    EXPECT_EQ(hits(home, true), 0u) << i << " have asked";
    Until([&] { return hits(asking[i], false) == 8; });
  }
  Until([&] {
    // Those that found the holder before its home knew of it count when they ask again.
    for (const std::string& name : asking) hits(name, false);
    return hits(home, true) == 8;
  });
  for (const std::string& name : asking)
    EXPECT_EQ(hits(name, true), 0u) << "looking up copies nothing";
}

// What others call a namespace binds no name here.
TEST_F(ClusterCopiesTest, ACopyTakesNoEnginesName) {
  StartNodes({"--copies", "1"});
  OpenOn("a");
  PutOn("a");
  Until([&] { return CopiedOn("b") + CopiedOn("c") == kBlocks; });
  NamespaceSpec other = SmallSpec();
  other.model = "other";
  for (const char* name : {"b", "c"}) {
    EXPECT_TRUE(ClientOf(name).OpenNamespace("shared", other).ok()) << name;
  }
}

TEST_F(ClusterCopiesTest, ANodeThatIsAloneLeavesAtOnce) {
  StartNode("a", "a", kLongLease, {"--drain-timeout", "40s"});
  OpenOn("a");
  PutOn("a");
  Until([&] { return MembersOf("a") == "a"; });
  nodes_["a"].client.reset();
  const auto begin = std::chrono::steady_clock::now();
  nodes_["a"].process->Signal(SIGTERM);
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  // It has 30 s to hand over, which it would use if it waited for others.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
}

// Three of five, told at the same moment. None counts on another one of them.
TEST_F(ClusterCopiesTest, ThreeOfFiveThatLeaveTogetherLoseNothing) {
  const std::vector<std::string> leave = {"a", "b", "c"}, stay = {"d", "e"};
  for (const auto* names : {&leave, &stay}) {
    for (const std::string& name : *names) {
      StartNode(name, name, kLongLease, {"--drain-timeout", "60s"});
    }
  }
  for (const auto* names : {&leave, &stay}) {
    for (const std::string& name : *names) {
      Until([&] { return MembersOf(name) == "a b c d e"; });
      OpenOn(name);
    }
  }
  for (const std::string& name : leave) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
    const auto result = ClientOf(name).Store(ns_[name], values.Blocks("of " + name), {});
    ASSERT_TRUE(result.ok()) << result.status();
    // The store tells the cluster's part of them a moment later.
    Until([&] { return HitsOn("d", "of " + name, false) == kBlocks; });
  }
  for (const std::string& name : leave) {
    nodes_[name].client.reset();
    nodes_[name].process->Signal(SIGTERM);
  }
  for (const std::string& name : leave) {
    EXPECT_EQ(nodes_[name].process->WaitExit(std::chrono::seconds(120)).code, 0);
    EXPECT_THAT(
        nodes_[name].process->standard_error(),
        HasSubstr(absl::StrCat("drain: ", kBlocks, " blocks are on other nodes, 0 are not")));
  }
  for (const std::string& name : leave) {
    std::uint32_t copies = 0;
    for (const std::string& staying : stay) {
      for (const BlockKey& key : KeysOf("of " + name, kBlocks)) {
        const auto found =
            ClientOf(staying).Lookup(ns_[staying], {key}, {}, {.elsewhere = {.local_only = true}});
        ASSERT_TRUE(found.ok()) << found.status();
        copies += found->hit_blocks;
      }
    }
    EXPECT_GE(copies, kBlocks) << "of " << name;
  }
}

TEST_F(ClusterCopiesTest, WhenAllLeaveTheySayWhatMayBeLost) {
  StartNodes({});
  OpenOn("a");
  PutOn("a");
  OpenOn("b");
  Until([&] { return HitsOn("b", "s", false) == kBlocks; });
  for (const char* name : {"a", "b", "c"}) {
    // Before the first one leaves: else the last one may have taken over by then.
    ASSERT_TRUE(ClientOf(name).Drain().ok());
  }
  for (const char* name : {"a", "b", "c"}) {
    Until([&] { return MembersOf(name) == "a- b- c-"; });
  }
  for (const char* name : {"a", "b", "c"}) {
    nodes_[name].client.reset();
    nodes_[name].process->Signal(SIGTERM);
  }
  for (const char* name : {"a", "b", "c"}) EXPECT_EQ(nodes_[name].process->WaitExit().code, 0);
  EXPECT_THAT(nodes_["a"].process->standard_error(),
              HasSubstr(absl::StrCat("drain: 0 blocks are on other nodes, ", kBlocks,
                                     " are not and may be lost")));
}

}  // namespace
}  // namespace kvmill::testing
