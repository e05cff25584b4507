// Real daemons of a cluster with two tenants, who call the same things by the same names: each has
// its own blocks on every node, and nothing of the other's.
#include <gmock/gmock.h>

#include <future>
#include <optional>
#include <string>

#include "tests/cluster/tenants_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class ClusterTenantsTest : public TenantsTest {
 protected:
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
  // No more is promised than there is room for.
  Until([&] { return HitsOn("b", "team-b") > 0; });
  EXPECT_LT(HitsOn("b", "team-b"), kBlocks);
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
