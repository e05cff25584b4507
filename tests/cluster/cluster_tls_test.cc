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

}  // namespace
}  // namespace kvmill::testing
