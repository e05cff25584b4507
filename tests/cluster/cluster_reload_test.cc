// Options of the cluster that change while real daemons run: how long peers are waited for, and how
// fast copies are made.
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

class ClusterReloadTest : public ClusterTest {
 protected:
  std::string ConfigOf(const std::string& name) const { return directory_ / (name + ".yaml"); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(ConfigOf(name)) << text;
  }
  void StartConfigured(const std::string& name, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--config", ConfigOf(name)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    StartNode(name, name, kLongLease, arguments);
  }
  void Reload(const std::string& name, const std::string& text) {
    Write(name, text);
    nodes_.at(name).process->Signal(SIGHUP);
    Until([&] {
      return absl::StrContains(Metrics(name), "kvmill_config_reloads_total{result=\"applied\"} 1");
    });
  }
};

TEST_F(ClusterReloadTest, WhoIsStoppedIsWaitedForAsLongAsTheNewTimeoutSays) {
  Write("a", "peer_timeout: 10s\n");
  Write("b", "");
  StartConfigured("a");
  StartConfigured("b");
  ASSERT_FALSE(HasFatalFailure());
  for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  Client& a = *nodes_.at("a").client;
  const auto ns = a.OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  // Both know each other: a lookup gets as far as asking.
  Until([&] {
    EXPECT_TRUE(a.Lookup(*ns, KeysOf("s", 40)).ok());
    return !absl::StrContains(Metrics("a"),
                              "kvmill_peer_requests_total{peer=\"b\",transport=\"grpc\"} 0") &&
           absl::StrContains(Metrics("a"), "kvmill_peer_requests_total{peer=\"b\"");
  });
  Reload("a", "peer_timeout: 20ms\n");
  nodes_.at("b").process->Signal(SIGSTOP);
  const auto begin = std::chrono::steady_clock::now();
  const auto found = a.Lookup(*ns, KeysOf("s", 40));
  const auto took = std::chrono::steady_clock::now() - begin;
  nodes_.at("b").process->Signal(SIGCONT);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->hit_blocks, 0u);
  EXPECT_LT(took, std::chrono::seconds(8)) << "it would have been 10";
}

TEST_F(ClusterReloadTest, CopiesAreMadeAtTheNewRate) {
  // The start of its ramp is a sixteenth: 4 KiB a second, an hour for what is stored below.
  const std::string slow = "replication_rate: 64KiB\n";
  Write("a", slow);
  Write("b", slow);
  StartConfigured("a", {"--copies", "1"});
  StartConfigured("b", {"--copies", "1"});
  ASSERT_FALSE(HasFatalFailure());
  for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  Client& a = *nodes_.at("a").client;
  const auto ns = a.OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(ns.ok()) << ns.status();
  constexpr std::uint32_t kBlocks = 400;
  Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 3);
  const auto stored = a.Store(*ns, values.Blocks("s"), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  const std::string done =
      absl::StrCat("kvmill_replication_blocks_total{result=\"copied\"} ", kBlocks, "\n");
  Until([&] { return !absl::StrContains(Metrics("b"), "kvmill_replication_queue_runs 0\n"); });
  EXPECT_FALSE(absl::StrContains(Metrics("b"), done));
  Reload("b", "replication_rate: 1GiB\n");
  Until([&] { return absl::StrContains(Metrics("b"), done); });
}

}  // namespace
}  // namespace kvmill::testing
