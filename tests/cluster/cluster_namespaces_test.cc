// Real daemons and a real etcd: blocks of a namespace that the asked node has never opened.
#include <gmock/gmock.h>
#include <signal.h>

#include <map>
#include <string>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/mapped_blocks.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 40;

class ClusterNamespacesTest : public ClusterTest {
 protected:
  void StartNodes(const std::vector<std::string>& more = {}) {
    for (const char* name : {"a", "b", "c"}) StartNode(name, name, kLongLease, more);
    for (const char* name : {"a", "b", "c"}) {
      Until([&] { return MembersOf(name) == "a b c"; });
    }
  }
  Client& ClientOf(const std::string& name) { return *nodes_.at(name).client; }
  // Node a's engine has blocks of "shared".
  void PutOnA() {
    const auto ns = ClientOf("a").OpenNamespace("shared", SmallSpec());
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_ = *ns;
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, 1);
    const auto result = ClientOf("a").Store(ns_, values.Blocks("s"), {});
    ASSERT_TRUE(result.ok()) << result.status();
    stored_ = Pages(ClientOf("a"));
    ASSERT_EQ(stored_.size(), kBlocks * 2u);
  }
  using PageMap = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  PageMap Pages(Client& client) {
    PageCollector sink;
    const auto result =
        client.Fetch(ns_, KeysOf("s", kBlocks), sink, {.timeout = absl::Seconds(20)});
    EXPECT_TRUE(result.ok()) << result.status();
    return sink.pages;
  }
  bool Knows(const std::string& name, const std::string& ns) {
    const auto known = ClientOf(name).Namespaces();
    EXPECT_TRUE(known.ok()) << known.status();
    return std::any_of(known->begin(), known->end(), [&](const ClientNamespace& space) {
      return space.name == ns || space.fingerprint == ns_.fingerprint;
    });
  }
  // What node `name` asked others, all together.
  double AskedBy(const std::string& name) {
    double sum = 0;
    for (const absl::string_view line : absl::StrSplit(Metrics(name), '\n')) {
      if (line.substr(0, 27) != "kvmill_peer_requests_total{") continue;
      sum += std::stod(std::string(line.substr(line.rfind(' '))));
    }
    return sum;
  }

  ClientNamespace ns_;
  PageMap stored_;
};

// As `kvmill get` does, which knows a name.
TEST_F(ClusterNamespacesTest, ANameThatAnotherNodeKnowsIsFound) {
  StartNodes();
  PutOnA();
  ASSERT_FALSE(Knows("b", "shared"));
  // A moment when other nodes are slow is no answer.
  absl::StatusOr<ClientNamespace> found = absl::NotFoundError("");
  Until([&] {
    found = ClientOf("b").FindNamespace("shared");
    return found.ok();
  });
  EXPECT_EQ(found->name, "shared");
  EXPECT_EQ(found->fingerprint, ns_.fingerprint);
  EXPECT_EQ(found->spec, ns_.spec);
  Until([&] {
    const auto hits = ClientOf("b").Lookup(*found, KeysOf("s", kBlocks));
    EXPECT_TRUE(hits.ok()) << hits.status();
    return hits.ok() && hits->hit_blocks == kBlocks;
  });
  Until([&] { return Pages(ClientOf("b")) == stored_; });
  // The name is still free here: what others call it binds nobody.
  NamespaceSpec other = SmallSpec();
  other.model = "other";
  EXPECT_TRUE(ClientOf("b").OpenNamespace("shared", other).ok());
  // And now it means two things.
  absl::Status twice;  // Of those that answer in time.
  Until([&] {
    twice = ClientOf("c").FindNamespace("shared").status();
    return absl::IsFailedPrecondition(twice);
  });
  EXPECT_THAT(std::string(twice.message()), HasSubstr("namespace \"shared\""));
}

// Names live on where the blocks do, on nodes that never had an engine.
TEST_F(ClusterNamespacesTest, ANameOutlivesTheNodesWhoseEnginesUseIt) {
  StartNode("b", "b", kLongLease);
  StartNode("a", "a", kLongLease);
  for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  PutOnA();
  nodes_["a"].process->Signal(SIGTERM);
  EXPECT_EQ(nodes_["a"].process->WaitExit().code, 0);
  Until([&] { return MembersOf("b") == "b"; });
  // By itself, with nobody to ask, and asked by one that has heard of nothing.
  const auto here = ClientOf("b").FindNamespace("shared");
  ASSERT_TRUE(here.ok()) << here.status();
  EXPECT_EQ(here->name, "shared");
  EXPECT_EQ(here->fingerprint, ns_.fingerprint);
  EXPECT_EQ(Pages(ClientOf("b")), stored_);
  StartNode("c", "c", kLongLease);
  for (const char* name : {"b", "c"}) Until([&] { return MembersOf(name) == "b c"; });
  absl::StatusOr<ClientNamespace> there = absl::NotFoundError("");
  Until([&] {
    there = ClientOf("c").FindNamespace("shared");
    return there.ok();
  });
  EXPECT_EQ(there->fingerprint, ns_.fingerprint);
  // What engines call so from now on is what it means, here and elsewhere.
  NamespaceSpec other = SmallSpec();
  other.model = "other";
  const auto bound = ClientOf("b").OpenNamespace("shared", other);
  ASSERT_TRUE(bound.ok()) << bound.status();
  StartNode("d", "d", kLongLease);
  for (const char* name : {"b", "c", "d"}) Until([&] { return MembersOf(name) == "b c d"; });
  Until([&] {
    const auto found = ClientOf("d").FindNamespace("shared");
    return found.ok() && found->fingerprint == bound->fingerprint;
  });
}

// As an engine does that knows the namespace from elsewhere.
TEST_F(ClusterNamespacesTest, BlocksOfANamespaceThatANodeNeverOpenedAreFoundAndFetched) {
  StartNodes({"--ucx", "127.0.0.1"});
  PutOnA();
  Until([&] {
    const auto hits = ClientOf("b").Lookup(ns_, KeysOf("s", kBlocks));
    return hits.ok() && hits->hit_blocks == kBlocks;
  });
  // Each way to blocks begins at a node that does not know it yet.
  Until([&] {
    PageCollector sink;
    const auto result = ClientOf("c").Fetch(ns_, KeysOf("s", kBlocks), sink);
    return result.ok() && sink.pages == stored_;
  });
  StartNode("d", "d", kLongLease, {"--ucx", "127.0.0.1"});
  Until([&] { return MembersOf("d") == "a b c d"; });
  Until([&] {
    const auto mapped = ClientOf("d").Map(ns_, KeysOf("s", 2));
    return mapped.ok() && (*mapped)->status(0).ok() && (*mapped)->status(1).ok();
  });
  StartNode("e", "e", kLongLease, {"--ucx", "127.0.0.1"});
  Until([&] { return MembersOf("e") == "a b c d e"; });
  Client::Options remote;
  remote.address = nodes_["e"].ready["listen"].get<std::string>();
  remote.path = DataPath::kUcx;
  const auto over_ucx = Client::Create(remote);
  ASSERT_TRUE(over_ucx.ok()) << over_ucx.status();
  Until([&] {
    PageCollector sink;
    const auto result = (*over_ucx)->Fetch(ns_, KeysOf("s", kBlocks), sink);
    return result.ok() && sink.pages == stored_;
  });
  // Locally nobody looks elsewhere.
  StartNode("f", kLongLease);
  Until([&] { return MembersOf("f") == "a b c d e f"; });
  EXPECT_EQ(ClientOf("f")
                .Lookup(ns_, KeysOf("s", kBlocks), {}, {.elsewhere = {.local_only = true}})
                .status()
                .code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(Knows("f", "shared"));
}

TEST_F(ClusterNamespacesTest, ANamespaceThatNobodyKnowsIsNotFoundAndNoStorm) {
  StartNodes();
  Until([&] {  // A node that has just seen the others asks nobody for a moment.
    const absl::Status found = ClientOf("b").FindNamespace("nowhere").status();
    EXPECT_EQ(found.code(), absl::StatusCode::kNotFound) << found;
    return absl::StrContains(found.message(),
                             "namespace \"nowhere\" is known neither here nor by another node");
  });
  ClientNamespace unknown;
  unknown.spec = SmallSpec();
  unknown.fingerprint[3] = std::byte{7};
  const double before = AskedBy("b");
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 500; ++i) {
    EXPECT_EQ(ClientOf("b").Lookup(unknown, KeysOf("s", 4)).status().code(),
              absl::StatusCode::kNotFound);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  // Two nodes are asked once in two seconds; the rest is what nodes say to each other anyway.
  EXPECT_LT(AskedBy("b") - before, 2 * (seconds / 2 + 2) + 20 * (seconds + 1));
}

}  // namespace
}  // namespace kvmill::testing
