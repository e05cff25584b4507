// Real daemons and a real etcd: an administrator takes a node out, by that node or by another one.
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 70;  // Three runs.
constexpr absl::Duration kLong = absl::Minutes(5);

class ClusterDrainTest : public ClusterTest {
 protected:
  void StartNodes(const std::vector<std::string>& names,
                  const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--admin", "127.0.0.1:0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::string all;
    for (const std::string& name : names) {
      StartNode(name, name, kLongLease, arguments);
      absl::StrAppend(&all, all.empty() ? "" : " ", name);
    }
    for (const std::string& name : names) {
      Until([&] { return MembersOf(name) == all; });
    }
  }
  Client& ClientOf(const std::string& name) { return *nodes_.at(name).client; }
  ClientNamespace OpenOn(const std::string& name) {
    const auto ns = ClientOf(name).OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : ClientNamespace();
  }
  absl::StatusOr<StoreResult> PutOn(const std::string& name, const ClientNamespace& ns,
                                    const std::string& sequence) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
    return ClientOf(name).Store(ns, values.Blocks(sequence), {});
  }
  std::uint32_t HitsOn(const std::string& name, const ClientNamespace& ns,
                       const std::string& sequence, bool local_only = false) {
    const auto result = ClientOf(name).Lookup(ns, KeysOf(sequence, kBlocks), {},
                                              {.elsewhere = {.local_only = local_only}});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->hit_blocks : 0;
  }
  absl::Status DrainStatus(const std::string& name, const std::string& node) {
    return ClientOf(name).DrainNode(node, nullptr, {.timeout = kLong}).status();
  }
  // The command line, to its end.
  struct Said {
    Exit exit;
    std::string output, error;
  };
  Said Kvmill(const std::vector<std::string>& arguments) {
    DaemonProcess process(std::filesystem::path(DaemonBinary()).parent_path() / "kvmill",
                          arguments);
    Said said;
    said.exit = process.WaitExit(std::chrono::seconds(120));
    said.output = process.standard_output();
    said.error = process.standard_error();
    return said;
  }
  std::string SocketOf(const std::string& name) {
    return "unix:" + nodes_.at(name).ready["socket"].get<std::string>();
  }
};

// An operator asks node a; meanwhile engines store on b and on c, and read on a and on c.
TEST_F(ClusterDrainTest, ANodeIsDrainedThroughAnotherOneUnderLoad) {
  StartNodes({"a", "b", "c"}, {"--drain-timeout", "60s"});
  std::map<std::string, ClientNamespace> ns;
  for (const char* name : {"a", "b", "c"}) ns[name] = OpenOn(name);
  ASSERT_TRUE(PutOn("b", ns["b"], "first").ok());
  for (const char* name : {"a", "c"}) {
    Until([&] { return HitsOn(name, ns[name], "first") == kBlocks; });
  }
  std::atomic<bool> stop{false}, refused{false};
  std::atomic<int> stored{0}, read{0};
  std::vector<std::string> wrong;  // Of the stores on b.
  std::thread store_b([&] {
    for (int i = 0; !stop && !refused; ++i) {
      const auto result = PutOn("b", ns["b"], absl::StrCat("b", i));
      if (result.ok()) {
        ++stored;
      } else {
        // A node that leaves refuses, it does not break.
        refused = true;
        if (!absl::IsUnavailable(result.status())) wrong.push_back(result.status().ToString());
      }
    }
  });
  std::vector<std::thread> others;
  for (const char* name : {"a", "c"}) {
    others.emplace_back([&, name] {
      for (int i = 0; !stop; ++i) {
        PageCollector sink;
        const auto result = ClientOf(name).Fetch(ns.at(name), KeysOf("first", kBlocks), sink);
        EXPECT_TRUE(result.ok()) << name << " " << result.status();
        ++read;
        if (*name == 'c') {
          EXPECT_TRUE(PutOn("c", ns.at("c"), absl::StrCat("c", i % 4)).ok());
        }
      }
    });
  }
  Until([&] { return stored >= 2 && read >= 4; });

  std::vector<NodeDrain> progress;
  const auto drained = ClientOf("a").DrainNode(
      "b", [&](const NodeDrain& is) { progress.push_back(is); }, {.timeout = kLong});
  EXPECT_TRUE(drained.ok()) << drained.status();
  Until([&] { return refused.load(); });
  stop = true;
  store_b.join();
  for (std::thread& other : others) other.join();
  ASSERT_TRUE(drained.ok());
  EXPECT_EQ(drained->phase, NodeDrain::Phase::kLeft);
  EXPECT_EQ(drained->blocks_left, 0u);
  EXPECT_GE(drained->blocks, kBlocks);
  EXPECT_TRUE(wrong.empty()) << wrong[0];
  ASSERT_GE(progress.size(), 2u);
  for (std::size_t i = 1; i < progress.size(); ++i) {
    EXPECT_GE(progress[i].phase, progress[i - 1].phase) << i;
    EXPECT_GE(progress[i].blocks, progress[i - 1].blocks) << i;
  }
  EXPECT_EQ(nodes_["b"].process->WaitExit().code, 0);
  EXPECT_THAT(nodes_["b"].process->standard_error(),
              AllOf(HasSubstr("admin DrainNode by "),
                    HasSubstr(absl::StrCat("drain: ", drained->blocks,
                                           " blocks are on other nodes, 0 are not"))));
  std::string said;
  ASSERT_TRUE(etcd_.Control({"get", "--prefix", "--keys-only", "/kvmill/"}, &said)) << said;
  EXPECT_THAT(said, ::testing::Not(HasSubstr("members/b")));
  for (const char* name : {"a", "c"}) {
    Until([&] { return MembersOf(name) == "a c"; });
    Until([&] { return HitsOn(name, ns[name], "first") == kBlocks; });
    Until([&] { return HitsOn(name, ns[name], "b0") == kBlocks; });
  }
  // Its next life is another one.
  StartNode("b", "b", kLongLease, {"--admin", "127.0.0.1:0"});
  Until([&] { return MembersOf("a") == "a b c"; });
}

TEST_F(ClusterDrainTest, TheCommandSaysWhatBecameOfTheNode) {
  StartNodes({"a", "b"}, {"--drain-timeout", "60s"});
  const ClientNamespace ns = OpenOn("b");
  ASSERT_TRUE(PutOn("b", ns, "s").ok());
  // A tail, which nobody else is asked to take.
  Sequence short_one(SmallSpec(), SmallSpec().block_tokens / 2, 2);
  const auto tail = ClientOf("b").Store(ns, short_one.Blocks("tail"), {});
  ASSERT_TRUE(tail.ok()) << tail.status();
  const ClientNamespace ns_a = OpenOn("a");
  Until([&] { return HitsOn("a", ns_a, "s") == kBlocks; });
  nodes_["b"].client.reset();
  const Said said = Kvmill({"cluster", "drain", "b", "--json", "--server", SocketOf("a")});
  EXPECT_EQ(said.exit.code, 0) << said.error;
  const auto json = nlohmann::json::parse(said.output, nullptr, false);
  ASSERT_TRUE(json.is_object()) << said.output;
  EXPECT_EQ(json["node"], "b");
  EXPECT_EQ(json["state"], "left");
  EXPECT_EQ(json["blocks"], kBlocks);
  EXPECT_EQ(json["blocks_left"], 0);
  EXPECT_EQ(json["blocks_left_out"], 1);
  EXPECT_EQ(json["alone"], false);
  EXPECT_THAT(nodes_["b"].process->standard_error(),
              HasSubstr("0 are not; 1 that nodes do not copy"));
  EXPECT_EQ(nodes_["b"].process->WaitExit().code, 0);
  EXPECT_EQ(HitsOn("a", ns_a, "s", true), kBlocks);
  // The last one has nobody to hand over to, and says so; it is asked at its own admin address.
  nodes_["a"].client.reset();
  const Said alone =
      Kvmill({"cluster", "drain", "a", "--server", nodes_["a"].ready["admin"].get<std::string>()});
  EXPECT_EQ(alone.exit.code, 0) << alone.error;
  EXPECT_THAT(alone.output,
              AllOf(HasSubstr("answers no more"), HasSubstr(absl::StrCat(kBlocks)),
                    HasSubstr("no other node stays"), ::testing::Not(HasSubstr("left out"))));
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
}

TEST_F(ClusterDrainTest, WhatCannotBeDrainedIsSaidAndNothingIsChanged) {
  StartNodes({"a", "b"});
  StartNode("c", "c", kLongLease);  // It has no --admin.
  StartNode("d", "d", kLongLease, {"--admin", "127.0.0.1:0"});
  Until([&] { return MembersOf("a") == "a b c d"; });
  const absl::Status unknown = DrainStatus("a", "e");
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr(R"(no node "e" in the cluster: it has "a", "b", "c", "d")"));
  EXPECT_EQ(Kvmill({"cluster", "drain", "e", "--server", SocketOf("a")}).exit.code, 3);
  EXPECT_EQ(Kvmill({"cluster", "drain", "--server", SocketOf("a")}).exit.code, 2);
  const absl::Status without = DrainStatus("a", "c");
  EXPECT_EQ(without.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(without.message()), HasSubstr("has no --admin that other nodes reach"));
  // At the address that the cluster knows somebody else answers, or nobody does.
  KillNode("b");
  const absl::Status gone = DrainStatus("a", "b");
  EXPECT_EQ(gone.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(gone.message()),
              HasSubstr("node \"b\" cannot be reached at its --admin"));
  nodes_["d"].process->Signal(SIGSTOP);
  const Said stopped = Kvmill({"cluster", "drain", "d", "--server", SocketOf("a")});
  EXPECT_EQ(stopped.exit.code, 1);
  EXPECT_THAT(stopped.error, HasSubstr("node \"d\""));
  nodes_["d"].process->Signal(SIGCONT);
  // Whoever has taken over its address is not drained in its place.
  const std::string path = directory_ / "x/kvmill.sock";
  ClusterDaemon& stranger = nodes_["x"];
  stranger.process = std::make_unique<DaemonProcess>(
      DaemonBinary(),
      std::vector<std::string>{"--socket", path, "--host-bytes", "64MiB", "--device", "host",
                               "--insecure", "--node-id", "b", "--admin",
                               nodes_["b"].ready["admin"].get<std::string>()});
  ASSERT_FALSE(stranger.process->WaitReady().is_null()) << stranger.process->standard_error();
  stranger.client = Connect("unix:" + path);
  const absl::Status other = DrainStatus("a", "b");
  EXPECT_EQ(other.code(), absl::StatusCode::kAborted) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("is not, or no longer, the process"));
  for (const char* name : {"a", "c", "x"}) {
    const auto status = ClientOf(name).Status();
    ASSERT_TRUE(status.ok()) << status.status();
    EXPECT_FALSE(status->draining) << name;
  }
}

TEST_F(ClusterDrainTest, ANodeThatDrainsIsNotDrainedTwiceAndASignalDoesNotKillIt) {
  StartNodes({"a", "b"}, {"--drain-timeout", "40s", "--replication-rate", "64KiB"});
  const ClientNamespace ns = OpenOn("b");
  // Some four megabytes at 4 KiB/s: it has blocks left for as long as this takes.
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(PutOn("b", ns, absl::StrCat("s", i)).ok());
  const ClientNamespace ns_a = OpenOn("a");
  Until([&] { return HitsOn("a", ns_a, "s3") == kBlocks; });
  std::atomic<bool> ended{false};
  std::thread first([&] {
    const auto drained = ClientOf("a").DrainNode("b", nullptr, {.timeout = kLong});
    EXPECT_TRUE(drained.ok()) << drained.status();
    ended = true;
  });
  Until([&] { return MembersOf("a") == "a b-"; });
  const absl::Status again = DrainStatus("a", "b");
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition) << again;
  EXPECT_THAT(std::string(again.message()), HasSubstr("node \"b\" drains already: "));
  EXPECT_FALSE(ended);
  // What a supervisor sends next is the first signal, and the drain goes on.
  nodes_["b"].process->Signal(SIGTERM);
  Until([&] {
    return nodes_["b"].process->standard_error().find("draining already") != std::string::npos;
  });
  first.join();
  EXPECT_EQ(nodes_["b"].process->WaitExit(std::chrono::seconds(120)).code, 0);
}

// There is no time for all: of 12 runs, each some 450 KB, the rate allows one at once and the next
// after 7 s at the earliest.
TEST_F(ClusterDrainTest, WhatWasUsedMostIsHandedOverFirst) {
  constexpr std::uint32_t kSequences = 12, kRun = 32;
  StartNodes({"a", "b"}, {"--drain-timeout", "20s", "--replication-rate", "64KiB"});
  const ClientNamespace ns = OpenOn("b"), ns_a = OpenOn("a");
  for (std::uint32_t i = 0; i < kSequences; ++i) {
    Sequence values(SmallSpec(), kRun * SmallSpec().block_tokens, 1);
    ASSERT_TRUE(ClientOf("b").Store(ns, values.Blocks(absl::StrCat("s", i)), {}).ok());
  }
  const std::vector<BlockKey> hot = KeysOf("s7", kRun);
  for (int i = 0; i < 8; ++i) {
    PageCollector sink;
    ASSERT_TRUE(ClientOf("b").Fetch(ns, hot, sink).ok());
  }
  const auto hits = [&](const std::vector<BlockKey>& keys, bool local_only) {
    const auto found =
        ClientOf("a").Lookup(ns_a, keys, {}, {.elsewhere = {.local_only = local_only}});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 0;
  };
  Until([&] { return hits(hot, false) == kRun; });
  const auto drained = ClientOf("a").DrainNode("b", nullptr, {.timeout = kLong});
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_GE(drained->blocks, kRun);
  EXPECT_GE(drained->blocks_left, (kSequences / 2) * kRun);
  EXPECT_EQ(hits(hot, true), kRun);
  EXPECT_EQ(nodes_["b"].process->WaitExit().code, 0);
}

TEST_F(ClusterDrainTest, WhoWasAskedMayLeaveItself) {
  StartNodes({"a", "b"}, {"--drain-timeout", "60s"});
  const ClientNamespace ns = OpenOn("a"), ns_b = OpenOn("b");
  ASSERT_TRUE(PutOn("a", ns, "s").ok());
  Until([&] { return HitsOn("b", ns_b, "s") == kBlocks; });
  const auto drained = ClientOf("a").DrainNode("a", nullptr, {.timeout = kLong});
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(drained->phase, NodeDrain::Phase::kEnding);
  EXPECT_EQ(drained->blocks_left, 0u);
  nodes_["a"].client.reset();
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  EXPECT_EQ(HitsOn("b", ns_b, "s", true), kBlocks);
}

TEST_F(ClusterDrainTest, ADaemonWithoutAClusterIsDrainedByItsName) {
  Start({"--node-id", "lonely", "--drain-timeout", "20s"});
  const auto other = client_->DrainNode("b", nullptr, {.timeout = kLong});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(other.status().message()),
              AllOf(HasSubstr("no node \"b\""), HasSubstr("is called \"lonely\"")));
  client_.reset();
  const Said said =
      Kvmill({"--json", "--server", "unix:" + socket(), "cluster", "drain", "lonely"});
  EXPECT_EQ(said.exit.code, 0) << said.error;
  EXPECT_EQ(said.output,
            "{\"node\":\"lonely\",\"state\":\"ended\",\"blocks\":0,\"blocks_left\":0,"
            "\"blocks_left_out\":0,\"alone\":true}\n");
  EXPECT_EQ(daemon_->WaitExit().code, 0);
}

}  // namespace
}  // namespace kvmill::testing
