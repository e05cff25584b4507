// Real daemons and a real etcd: who sees whom, when nodes are killed, drained and restarted, and
// when etcd stops.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(ClusterTest, NodesComeGoDrainAndComeBack) {
  for (const char* name : {"a", "b", "c"}) StartNode(name, kLongLease);
  for (const char* name : {"a", "b", "c"}) {
    Until([&] { return MembersOf(name) == "a b c"; });
    Until([&] { return StatusOf(name).registration == "registered"; });
    const ClusterStatus status = StatusOf(name);
    EXPECT_EQ(status.node_id, name);
    EXPECT_EQ(status.registration, "registered") << status.problem;
    EXPECT_FALSE(status.stale || status.keeping);
    for (const ClusterMember& member : status.members) {
      EXPECT_EQ(member.incarnation, nodes_[member.id].ready["boot_id"]);
      EXPECT_EQ(member.address, nodes_[member.id].ready["listen"]);
      EXPECT_EQ(member.capacity_bytes, 64u << 20);
    }
  }
  EXPECT_THAT(Metrics("a"), HasSubstr("kvmill_members{state=\"serving\"} 3"));
  EXPECT_THAT(Metrics("a"), HasSubstr("kvmill_membership_stale 0"));

  // One that is started again at once takes its id back at once: its lease goes on for long.
  KillNode("c");
  StartNode("c", kLongLease);
  Until([&] { return StatusOf("c").registration == "registered"; });
  Until([&] {
    const ClusterStatus status = StatusOf("a");
    return status.members.size() == 3 &&
           status.members[2].incarnation == nodes_["c"].ready["boot_id"];
  });

  // One that drains says so, and leaves when it stops.
  ASSERT_TRUE(nodes_["b"].client->Drain().ok());
  Until([&] { return MembersOf("a") == "a b- c"; });
  EXPECT_THAT(Metrics("a"), HasSubstr("kvmill_members{state=\"draining\"} 1"));
  nodes_["b"].process->Signal(SIGTERM);
  const Exit exit = nodes_["b"].process->WaitExit();
  EXPECT_EQ(exit.code, 0);
  std::string said;
  ASSERT_TRUE(etcd_.Control({"get", "--prefix", "--keys-only", "/kvmill/"}, &said)) << said;
  EXPECT_THAT(said, Not(HasSubstr("members/b")));
  Until([&] { return MembersOf("a") == "a c"; });
}

TEST_F(ClusterTest, OneThatDiesIsGoneWithItsLeaseAndNotEarlier) {
  for (const char* name : {"a", "b"}) StartNode(name, kLongLease);
  // Where no word of it came through for long it has less of its lease left: not every time.
  Millis gone{0};
  for (int i = 0; i < 4 && gone < kLease / 2; ++i) {
    StartNode("c", kLease);
    Until([&] { return MembersOf("a") == "a b c"; });
    const auto begin = steady_clock::now();
    KillNode("c");
    Until([&] { return MembersOf("a") == "a b"; });
    gone = std::chrono::duration_cast<Millis>(steady_clock::now() - begin);
  }
  EXPECT_GE(gone, kLease / 2);
}

TEST_F(ClusterTest, WithoutEtcdDaemonsServeAndSayThatTheyMayBeWrong) {
  Start(ClusterArguments("a", kLease));
  StartNode("b", kLease);
  Until([&] { return MembersOf("b") == "a b"; });
  Until([&] { return MembersIn(StatusOf(*client_)) == "a b"; });
  const ClientNamespace ns = Open("ns", SmallSpec());
  Sequence before(SmallSpec(), 128, 1);
  EXPECT_EQ(Put(ns, "before", before).blocks_stored, 2u);

  // Not at its first silence, unless it was silent before.
  Millis stale{0};
  for (int i = 0; i < 4 && stale < kLease / 3; ++i) {
    if (i > 0) etcd_.Continue();
    Until([&] { return MembersOf("b") == "a b" && !StatusOf("b").stale; });
    Until([&] { return !StatusOf(*client_).stale; });
    const auto stopped = steady_clock::now();
    etcd_.Stop();
    Until([&] { return StatusOf(*client_).stale && StatusOf("b").stale; });
    stale = std::chrono::duration_cast<Millis>(steady_clock::now() - stopped);
  }
  EXPECT_GE(stale, kLease / 3);
  EXPECT_EQ(MembersOf("b"), "a b");
  EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_membership_stale 1"));
  // Nothing of it waits for etcd; for the machine it may.
  Millis served = kSoon;
  for (std::uint32_t i = 0; i < 4 && served > Millis(3000); ++i) {
    const std::string name = absl::StrCat("during", i);
    const auto begin = steady_clock::now();
    Sequence during(SmallSpec(), 128, 2 + i);
    EXPECT_EQ(Put(ns, name, during).blocks_stored, 2u);
    EXPECT_LT(during.RelativeError(Get(ns, KeysOf(name, 2)), 0, 128), 0.4);
    EXPECT_LT(before.RelativeError(Get(ns, KeysOf("before", 2)), 0, 128), 0.4);
    served = std::chrono::duration_cast<Millis>(steady_clock::now() - begin);
  }
  EXPECT_LT(served, Millis(3000));
  // A node that is told to end does so, although etcd does not hear it.
  nodes_["b"].process->Signal(SIGTERM);
  const Exit exit = nodes_["b"].process->WaitExit();
  EXPECT_EQ(exit.code, 0);
  EXPECT_THAT(nodes_["b"].process->standard_error(),
              HasSubstr("the cluster sees this node until its lease ends"));

  etcd_.Continue();
  Until([&] {
    const ClusterStatus status = StatusOf(*client_);
    return !status.stale && status.registration == "registered";
  });
  // And from nothing, as another cluster: everybody registers again.
  ASSERT_TRUE(etcd_.StartEmpty());
  StartNode("b", kLease);
  Until([&] { return MembersIn(StatusOf(*client_)) == "a b" && MembersOf("b") == "a b"; });
  EXPECT_THAT(daemon_->standard_error(), Not(HasSubstr(" error ")));
}

TEST_F(ClusterTest, AnIdThatIsTakenIsRefusedInOneLine) {
  constexpr Millis kHolds{4000};  // Time enough to keep it on a machine that stands still.
  StartNode("a1", "a", kHolds);
  Until([&] { return StatusOf("a1").registration == "registered"; });
  StartNode("a2", "a", kHolds);
  Until([&] { return StatusOf("a2").registration == "refused"; });
  const std::string held = absl::StrCat("node id \"a\" is held by incarnation ",
                                        nodes_["a1"].ready["boot_id"].get<std::string>(), " at ",
                                        nodes_["a1"].ready["listen"].get<std::string>());
  EXPECT_THAT(StatusOf("a2").problem, HasSubstr(held));
  std::this_thread::sleep_for(kHolds + Millis(100));
  EXPECT_EQ(StatusOf("a2").registration, "refused");
  const std::string log = nodes_["a2"].process->standard_error();
  EXPECT_EQ(log.find(held), log.rfind(held)) << log;
  EXPECT_EQ(MembersOf("a1"), "a");
  // It is no zombie: it serves whom it has, and has the id when it is free.
  EXPECT_TRUE(nodes_["a2"].client->Stat().ok());
  nodes_["a1"].process->Signal(SIGTERM);
  nodes_["a1"].process->WaitExit();
  Until([&] { return StatusOf("a2").registration == "registered"; });
}

TEST_F(ClusterTest, ThePasswordComesFromTheEnvironmentAndGoesNowhere) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"user", "add", "root:rootpw"},
           {"user", "grant-role", "root", "root"},
           {"user", "add", "mill:s3cret-word"},
           {"role", "add", "members"},
           {"role", "grant-permission", "--prefix=true", "members", "readwrite", "/mill/one/"},
           {"user", "grant-role", "mill", "members"},
           {"auth", "enable"}}) {
    std::string said;
    ASSERT_TRUE(etcd_.Control(arguments, &said)) << said;
  }
  const std::vector<std::string> more = {
      "--cluster",   absl::StrCat("etcd://", etcd_.address().ToString(), "/mill/one"),
      "--etcd-user", "mill",
      "--log-level", "trace"};
  ASSERT_EQ(setenv("KVMILL_ETCD_PASSWORD", "s3cret-word", 1), 0);
  StartNode("a", "a", kLongLease, more);
  ASSERT_EQ(setenv("KVMILL_ETCD_PASSWORD", "wr0ng-word", 1), 0);
  StartNode("b", "b", kLongLease, more);
  ASSERT_EQ(unsetenv("KVMILL_ETCD_PASSWORD"), 0);
  Until([&] { return MembersOf("a") == "a"; });
  Until([&] { return absl::StrContains(StatusOf("b").problem, "invalid user ID or password"); });
  EXPECT_EQ(StatusOf("b").registration, "joining");
  for (const char* name : {"a", "b"}) {
    const ClusterDaemon& node = nodes_[name];
    for (const char* word : {"s3cret-word", "wr0ng-word"}) {
      EXPECT_THAT(node.process->standard_error(), Not(HasSubstr(word)));
      EXPECT_THAT(StatusOf(name).problem, Not(HasSubstr(word)));
    }
  }
}

}  // namespace
}  // namespace kvmill::testing
