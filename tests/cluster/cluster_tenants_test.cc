// Real daemons of a cluster with two tenants, who call the same things by the same names: each has
// its own blocks on every node, and nothing of the other's.
#include <gmock/gmock.h>

#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/core/sha256.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;
constexpr std::uint32_t kBlocks = 40;  // Two runs.
constexpr char kNode[] = "";           // Who shows a node's certificate, in place of a tenant.

class ClusterTenantsTest : public ClusterTest {
 protected:
  void SetUp() override {
    ClusterTest::SetUp();
    tenants_ = WriteTenants("tenants.yaml", "");
  }
  std::vector<std::string> Trust() const override {
    return {"--tls-ca", authority_.ca_path(), "--tls-cert", node_.certificate,   "--tls-key",
            node_.key,  "--tenants",          tenants_,     "--tls-server-name", "node.example"};
  }
  // Tenants team-a and team-b, whose token is the name of the tenant; `of_b`: more of team-b.
  std::string WriteTenants(const std::string& name, const std::string& of_b) {
    const auto digest = [](const std::string& token) {
      const Sha256Digest bytes = Sha256(token);
      return absl::BytesToHexString(
          absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    };
    const std::string path = directory_ / name;
    std::ofstream(path) << "tenants:\n  team-a: {tokens: [\"sha256:" << digest("team-a")
                        << "\"]}\n  team-b: {tokens: [\"sha256:" << digest("team-b") << "\"]"
                        << of_b << "}\n";
    return path;
  }
  // Each tenant has an arena, a quarter of the memory, so that none has to leave for another.
  void StartNodes(const std::vector<std::string>& more = {}) {
    for (const char* name : {"a", "b"}) {
      StartTenantsNode(name, more);
      ASSERT_FALSE(HasFatalFailure());
    }
    for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  }
  void StartTenantsNode(const std::string& name, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "--host-bytes",   "256MiB", "--admin",         "127.0.0.1:0",
        "--peer-timeout", "5s",     "--drain-timeout", "60s"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    StartNode(name, name, kLongLease, arguments);
  }

  Client& ClientOf(const std::string& node, const std::string& tenant) {
    std::unique_ptr<Client>& client = clients_[{node, tenant}];
    if (client != nullptr) return *client;
    Client::Options options;
    options.address = nodes_.at(node).ready["listen"].get<std::string>();
    options.timeout = absl::Seconds(60);
    options.tls = {authority_.ca_path(), "", "", "node.example"};
    options.token = tenant;
    if (tenant == kNode) {
      options.tls.certificate = node_.certificate;
      options.tls.key = node_.key;
    }
    auto made = Client::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    client = *std::move(made);
    return *client;
  }
  // One spec and one name, for all.
  ClientNamespace OpenOn(const std::string& node, const std::string& tenant) {
    const auto ns = ClientOf(node, tenant).OpenNamespace("shared", SmallSpec());
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.ok() ? *ns : ClientNamespace();
  }
  void PutOn(const std::string& node, const std::string& tenant, std::uint32_t seed) {
    Sequence values(SmallSpec(), kBlocks * SmallSpec().block_tokens, seed);
    const auto stored = ClientOf(node, tenant).Store(OpenOn(node, tenant), values.Blocks("s"), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
    ASSERT_EQ(stored->blocks_stored, kBlocks);
  }
  std::uint32_t HitsOn(const std::string& node, const std::string& tenant,
                       const Elsewhere& elsewhere = {}) {
    CallOptions call;
    call.elsewhere = elsewhere;
    const auto found =
        ClientOf(node, tenant).Lookup(OpenOn(node, tenant), KeysOf("s", kBlocks), {}, call);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->hit_blocks : 99;
  }
  using Pages = std::map<std::tuple<std::uint32_t, int, std::uint32_t>, std::string>;
  Pages FetchOn(const std::string& node, const std::string& tenant, const std::string& hint = "") {
    CallOptions call;
    call.elsewhere.hint = hint;
    PageCollector sink;
    const auto fetched =
        ClientOf(node, tenant).Fetch(OpenOn(node, tenant), KeysOf("s", kBlocks), sink, call);
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    return sink.pages;
  }
  // What a fetch by another one's fingerprint is told.
  absl::Status StatusOfFetch(const std::string& node, const std::string& tenant,
                             const ClientNamespace& ns, bool local_only) {
    CallOptions call;
    call.elsewhere.local_only = local_only;
    call.elsewhere.hint = local_only ? "" : "a";
    PageCollector sink;
    const auto fetched = ClientOf(node, tenant).Fetch(ns, KeysOf("s", kBlocks), sink, call);
    EXPECT_TRUE(fetched.ok() || sink.pages.empty());
    return fetched.status();
  }
  std::optional<TenantQuotaUse> QuotaOn(const std::string& node, const std::string& tenant) {
    const auto all = nodes_.at(node).client->Quota();
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return std::nullopt;
    for (const TenantQuotaUse& use : *all) {
      if (use.tenant == tenant) return use;
    }
    return std::nullopt;
  }

  TestAuthority authority_;
  TestAuthority::Files node_ = authority_.Issue("n", "DNS:node.example");
  std::string tenants_;  // Of nodes that are started from now on.
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Client>> clients_;
};

TEST_F(ClusterTenantsTest, EachFindsItsOwnOnOtherNodesAndNothingElse) {
  StartNodes({"--ucx", "127.0.0.1"});
  ASSERT_FALSE(HasFatalFailure());
  PutOn("a", "team-a", 1);
  const Pages of_a = FetchOn("a", "team-a");
  ASSERT_EQ(of_a.size(), kBlocks * 2u);
  const ClientNamespace theirs = OpenOn("a", "team-a");
  EXPECT_EQ(OpenOn("b", "team-a").fingerprint, theirs.fingerprint);
  EXPECT_NE(OpenOn("b", "team-b").fingerprint, theirs.fingerprint);

  Until([&] { return HitsOn("b", "team-a") == kBlocks; });
  const auto nothing_for_others = [&] {
    for (const char* node : {"a", "b"}) {
      EXPECT_EQ(HitsOn(node, "team-b"), 0u) << node;
      EXPECT_EQ(HitsOn(node, "team-b", {.hint = "a"}), 0u) << node;
      EXPECT_EQ(HitsOn(node, kNode, {.hint = "a"}), 0u) << node << ", the daemons' own";
      EXPECT_TRUE(FetchOn(node, "team-b", "a").empty()) << node;
      EXPECT_TRUE(FetchOn(node, kNode, "a").empty()) << node;
      // Who knows how the other one's space is called gets nothing by it.
      for (const bool local_only : {false, true}) {
        EXPECT_EQ(StatusOfFetch(node, "team-b", theirs, local_only).code(),
                  absl::StatusCode::kNotFound)
            << node;
      }
      std::promise<absl::Status> told;
      ClientOf(node, "team-b")
          .FindNamespaceAsync(theirs.fingerprint, {},
                              [&](const absl::StatusOr<ClientNamespace>& found) {
                                told.set_value(found.status());
                              });
      EXPECT_EQ(told.get_future().get().code(), absl::StatusCode::kNotFound) << node;
    }
  };
  nothing_for_others();
  Until([&] { return FetchOn("b", "team-a") == of_a; });  // A machine that stands still: misses.
  EXPECT_EQ(HitsOn("b", "team-a", {.local_only = true}), kBlocks);
  EXPECT_THAT(Metrics("b"), HasSubstr("kvmill_pulled_blocks_total{result=\"stored\"} 40"));
  nothing_for_others();  // Also now that they are there.

  // Under the same keys the other one has something else, and on each node each gets its own.
  PutOn("b", "team-b", 2);
  const Pages of_b = FetchOn("b", "team-b");
  ASSERT_EQ(of_b.size(), kBlocks * 2u);
  ASSERT_NE(of_b, of_a);
  Until([&] { return FetchOn("a", "team-b") == of_b; });
  for (const char* node : {"a", "b"}) EXPECT_EQ(FetchOn(node, "team-a"), of_a) << node;

  // A node copies what it names, and that alone: what it looks for is its own tenant's.
  EXPECT_TRUE(StatusOfFetch("a", kNode, theirs, true).ok());
  EXPECT_EQ(StatusOfFetch("a", kNode, theirs, false).code(), absl::StatusCode::kNotFound);
}

// Of a namespace that only its own tenant has ever named, and only on the node that leaves.
TEST_F(ClusterTenantsTest, WhatOneHasIsHandedOverAsItsOwn) {
  StartNodes();
  ASSERT_FALSE(HasFatalFailure());
  PutOn("b", "team-a", 1);
  const Pages of_a = FetchOn("b", "team-a");
  ASSERT_EQ(of_a.size(), kBlocks * 2u);
  clients_.clear();
  const auto drained =
      nodes_.at("a").client->DrainNode("b", nullptr, {.timeout = absl::Minutes(5)});
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_EQ(drained->blocks, kBlocks);
  EXPECT_EQ(drained->blocks_left, 0u);
  EXPECT_EQ(nodes_.at("b").process->WaitExit().code, 0);
  const auto use = QuotaOn("a", "team-a");
  ASSERT_TRUE(use.has_value()) << "nobody has it";
  EXPECT_GT(use->used_bytes, 0u);
  EXPECT_EQ(HitsOn("a", "team-a", {.local_only = true}), kBlocks);
  EXPECT_EQ(FetchOn("a", "team-a"), of_a);
  EXPECT_EQ(HitsOn("a", "team-b"), 0u);
  EXPECT_EQ(HitsOn("a", kNode), 0u);
}

TEST_F(ClusterTenantsTest, WhatComesFromOtherNodesCountsForTheQuota) {
  constexpr std::uint64_t kHard = 128 << 10;  // Some nine blocks.
  StartTenantsNode("a");
  tenants_ = WriteTenants("quota.yaml", ", quota: {hard: 128KiB}");
  StartTenantsNode("b");
  ASSERT_FALSE(HasFatalFailure());
  for (const char* name : {"a", "b"}) Until([&] { return MembersOf(name) == "a b"; });
  PutOn("a", "team-a", 1);
  PutOn("a", "team-b", 2);
  const auto stored = QuotaOn("a", "team-b");
  ASSERT_TRUE(stored.has_value());
  ASSERT_GT(stored->used_bytes, 2 * kHard) << "or there is nothing to see";
  Until([&] { return HitsOn("b", "team-b") == kBlocks; });
  Until([&] {
    FetchOn("b", "team-b");
    const auto use = QuotaOn("b", "team-b");
    EXPECT_TRUE(use.has_value());
    return use.has_value() && use->used_bytes > 0;
  });
  for (int i = 0; i < 5; ++i) {
    FetchOn("b", "team-b");
    const auto use = QuotaOn("b", "team-b");
    ASSERT_TRUE(use.has_value());
    EXPECT_LE(use->charged_bytes, kHard);
    EXPECT_LE(use->used_bytes, kHard);
  }
  EXPECT_LT(HitsOn("b", "team-b", {.local_only = true}), kBlocks);
  // It is nobody else's.
  const Pages of_a = FetchOn("a", "team-a");
  Until([&] { return FetchOn("b", "team-a") == of_a; });
  const auto use = QuotaOn("b", "team-a");
  ASSERT_TRUE(use.has_value());
  EXPECT_GT(use->used_bytes, kHard);
}

}  // namespace
}  // namespace kvmill::testing
