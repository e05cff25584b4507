// Real daemons of a cluster that trust certificates only: they find and fetch each other's blocks,
// over gRPC and UCX; one with another authority's certificate is left alone.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class ClusterTlsTest : public ClusterTest {
 protected:
  static std::vector<std::string> TrustOf(const TestAuthority& authority,
                                          const TestAuthority::Files& files) {
    return {"--tls-ca",  authority.ca_path(), "--tls-cert",        files.certificate,
            "--tls-key", files.key,           "--tls-server-name", "node.example"};
  }
  std::vector<std::string> Trust() const override {
    return stranger_ ? TrustOf(other_, foreign_) : TrustOf(authority_, node_);
  }
  std::uint32_t HitsOn(const std::string& name) {
    Client& client = *nodes_.at(name).client;
    const auto ns = client.OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    const auto found = client.Lookup(*ns, KeysOf("s", kBlocks));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 0;
  }

  static constexpr std::uint32_t kBlocks = 40;
  TestAuthority authority_, other_;
  // Of no address: peers want the name that --tls-server-name has.
  TestAuthority::Files node_ = authority_.Issue("n", "DNS:node.example");
  TestAuthority::Files foreign_ = other_.Issue("n", "DNS:node.example");
  bool stranger_ = false;
};

TEST_F(ClusterTlsTest, NodesShareBlocksWithNodesOnly) {
  const std::vector<std::string> more = {"--ucx",       "127.0.0.1",      "--admin",
                                         "127.0.0.1:0", "--peer-timeout", "5s"};
  StartNode("a", "a", kLongLease, more);
  StartNode("b", "b", kLongLease, more);
  ASSERT_FALSE(HasFatalFailure());
  stranger_ = true;
  StartNode("c", "c", kLongLease, more);
  ASSERT_FALSE(HasFatalFailure());
  for (const char* name : {"a", "b", "c"}) Until([&] { return MembersOf(name) == "a b c"; });

  Client& a = *nodes_.at("a").client;
  const auto ns = a.OpenNamespace("shared", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 3);
  const auto stored = a.Store(*ns, values.Blocks("s"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  // The home of some of them may be c, which nobody can tell: that is a miss there, not an error.
  Client& b = *nodes_.at("b").client;
  const auto there = b.OpenNamespace("shared", SmallSpec());
  ASSERT_TRUE(there.ok()) << there.status();
  PageCollector mine, theirs;
  ASSERT_TRUE(a.Fetch(*ns, KeysOf("s", kBlocks), mine).ok());
  ASSERT_EQ(mine.pages.size(), kBlocks * 2);
  CallOptions from_a;
  from_a.elsewhere.hint = "a";
  Until([&] {  // A machine that stands still makes misses.
    theirs.pages.clear();
    const auto fetched = b.Fetch(*there, KeysOf("s", kBlocks), theirs, from_a);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    return theirs.pages == mine.pages;  // Byte by byte.
  });
  EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_pulled_blocks_total{result=\"stored\"} 40"));
  // A drain goes from node to node, too, and not to a stranger.
  const auto refused = a.DrainNode("c", nullptr, {.timeout = absl::Minutes(5)});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kAborted) << refused.status();
  EXPECT_EQ(HitsOn("c"), 0u) << "nobody answers a stranger";
  EXPECT_THAT(Metrics("c"), HasSubstr("kvmill_pulled_blocks_total{result=\"stored\"} 0"));
  const auto drained = b.DrainNode("a", nullptr, {.timeout = absl::Minutes(5)});
  EXPECT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(nodes_.at("a").process->WaitExit().code, 0);
}

// The mistake of everybody who has one certificate for each host.
class OwnNamesTest : public ClusterTest {
 protected:
  std::vector<std::string> Trust() const override {
    return {"--tls-ca",    authority_.ca_path(),
            "--tls-cert",  own_->certificate,
            "--tls-key",   own_->key,
            "--admin",     "127.0.0.1:0",
            "--log-level", "info"};
  }
  std::string Log(const std::string& name) { return nodes_.at(name).process->standard_error(); }

  TestAuthority authority_;
  TestAuthority::Files a_ = authority_.Issue("n", "DNS:node-1,IP:127.0.0.1");
  TestAuthority::Files b_ = authority_.Issue("n", "DNS:node-2,IP:127.0.0.1");
  const TestAuthority::Files* own_ = &a_;
};

TEST_F(OwnNamesTest, NodesThatTakeEachOtherForStrangersSayWhatToDo) {
  StartNode("a", kLongLease);
  own_ = &b_;
  StartNode("b", kLongLease);
  ASSERT_FALSE(HasFatalFailure());
  for (const char* name : {"a", "b"}) {
    const std::string other = name[0] == 'a' ? "b" : "a";
    const std::string mine = name[0] == 'a' ? "node-1" : "node-2";
    Until([&] { return !StatusOf(name).problem.empty(); });
    const std::string problem = StatusOf(name).problem;
    EXPECT_THAT(problem, HasSubstr(absl::StrCat("node \"", other, "\" at 127.0.0.1:")));
    EXPECT_THAT(problem, HasSubstr("refuses this node"));
    EXPECT_THAT(problem, HasSubstr(absl::StrCat("not of \"", mine, "\"")));
    EXPECT_THAT(problem, HasSubstr("name this node's certificate in its --tls-peers"));
    EXPECT_THAT(Log(name), HasSubstr(absl::StrCat("cluster: ", problem)));
    // And the other end.
    Until([&] { return Log(other).find("is refused: the certificate of") != std::string::npos; });
    EXPECT_THAT(Log(other), HasSubstr(absl::StrCat("the certificate of \"", mine, "\" is not")));
  }
  // Who is told the names has no problem.
  KillNode("b");
  StartNode("b", "b", kLongLease, {"--tls-peers", "node-1,node-2"});
  ASSERT_FALSE(HasFatalFailure());
  Until([&] { return StatusOf("a").problem.empty(); });
  Until([&] { return !StatusOf("b").problem.empty(); });  // a was told nothing.
}

}  // namespace
}  // namespace kvmill::testing
