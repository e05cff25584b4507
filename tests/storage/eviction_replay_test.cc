// Trace replay: its exact rules on small traces, and published traces where they are at hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "storage/eviction/policy.h"
#include "storage/eviction/replay.h"

namespace kvmill {
namespace {

using Trace = std::vector<std::vector<std::uint64_t>>;

Trace ReadTrace(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  Trace trace;
  for (std::string line; std::getline(file, line);) {
    trace.push_back(nlohmann::json::parse(line).at("hash_ids").get<std::vector<std::uint64_t>>());
  }
  return trace;
}

ReplayResult Replay(const Trace& trace, std::uint32_t blocks, std::string policy,
                    bool leaf_first = false) {
  const auto result =
      ReplayTrace(trace, {.blocks = blocks, .policy = std::move(policy), .leaf_first = leaf_first});
  EXPECT_TRUE(result.ok()) << result.status();
  return *result;
}

double Percent(const Trace& trace, std::uint32_t blocks, std::string policy) {
  return 100.0 * Replay(trace, blocks, std::move(policy)).hit_rate;
}

TEST(ReplayTest, CountsTheConsecutivePrefixThatWasThereBefore) {
  // The second request finds 1, 2; not 9, so 3 behind it does not count. The third finds all.
  const ReplayResult result = Replay({{1, 2, 3}, {1, 2, 9, 3}, {1, 2, 9, 3}}, 100, "lru");
  EXPECT_EQ(result.lookups, 11u);
  EXPECT_EQ(result.hits, 0u + 2u + 4u);
  EXPECT_DOUBLE_EQ(result.hit_rate, 6.0 / 11.0);
  EXPECT_EQ(result.blocks, 100u);
  EXPECT_EQ(result.policy, "lru");
}

TEST(ReplayTest, EvictsWithinARequestThatDoesNotFit) {
  // Three blocks of room: 1 leaves for 4, so the next request misses at once; plain LRU.
  EXPECT_EQ(Replay({{1, 2, 3, 4}, {1, 2, 3, 4}}, 3, "lru").hits, 0u);
  // With leaves leaving first, 3 leaves for 4.
  EXPECT_EQ(Replay({{1, 2, 3, 4}, {1, 2, 3, 4}}, 3, "lru", true).hits, 2u);
}

TEST(ReplayTest, TouchesWhatIsThereBehindAMiss) {
  // 2 is used by the second request although it is no hit, so 1 (touched first) is the oldest.
  const ReplayResult result = Replay({{1, 2}, {3, 2}, {4}, {2}}, 3, "lru");
  EXPECT_EQ(result.hits, 1u);
}

TEST(ReplayTest, AcceptsAnEmptyTraceAndAnEmptyRequest) {
  for (const std::string_view policy : EvictionPolicyNames()) {
    EXPECT_EQ(Replay({}, 1, std::string(policy)).hit_rate, 0.0);
    EXPECT_EQ(Replay({{}, {7}, {}, {7}}, 1, std::string(policy)).hits, 1u);
  }
}

TEST(ReplayTest, UsesTheDefaultPolicyWhenNoneIsNamed) {
  EXPECT_EQ(Replay({{1}}, 1, "").policy, kDefaultEvictionPolicy);
}

TEST(ReplayTest, RefusesUnknownPoliciesAndBadSizes) {
  const Trace trace = {{1}};
  EXPECT_EQ(ReplayTrace(trace, {.blocks = 1, .policy = "fifo"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReplayTrace(trace, {.blocks = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReplayTrace(trace, {.blocks = 0x80000001u}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// The public conversation trace of Mooncake (FAST 2025), which is not part of this repository.
class MooncakeTrace : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("KVMILL_EXTRA_DATA");
    if (folder == nullptr) {
      GTEST_SKIP()
          << "KVMILL_EXTRA_DATA is not set: the folder with traces/mooncake_conversation.jsonl";
    }
    const std::string path = std::string(folder) + "/traces/mooncake_conversation.jsonl";
    if (!std::ifstream(path).good()) GTEST_SKIP() << path << " is not there";
    trace_ = ReadTrace(path);
  }

  Trace trace_;
};

TEST_F(MooncakeTrace, GivesThePublishedRatesForPlainLru) {
  EXPECT_NEAR(Percent(trace_, 1'000, "lru"), 4.45, 0.005);
  EXPECT_NEAR(Percent(trace_, 10'000, "lru"), 21.12, 0.005);
  EXPECT_NEAR(Percent(trace_, 40'000, "lru"), 35.14, 0.005);
  EXPECT_NEAR(Percent(trace_, 50'000, "lru"), 35.46, 0.005);
}

TEST_F(MooncakeTrace, HasNoMoreToGiveThanItsRepetitions) {
  for (const std::string_view policy : EvictionPolicyNames()) {
    EXPECT_NEAR(Percent(trace_, 1'000'000, std::string(policy)), 36.64, 0.005) << policy;
  }
}

TEST_F(MooncakeTrace, TheDefaultIsNowhereMuchWorseThanLruAndBetterWhereItMatters) {
  for (const std::uint32_t blocks :
       {500u, 1'000u, 4'000u, 10'000u, 20'000u, 40'000u, 50'000u, 60'000u}) {
    EXPECT_GE(Percent(trace_, blocks, ""), Percent(trace_, blocks, "lru") - 0.1) << blocks;
  }
  EXPECT_GE(Percent(trace_, 10'000, ""), Percent(trace_, 10'000, "lru") + 1.0);
}

}  // namespace
}  // namespace kvmill
