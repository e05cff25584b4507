#include "client/away.h"

#include <gtest/gtest.h>

#include <chrono>

namespace kvmill {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

steady_clock::time_point test_now;
steady_clock::time_point TestNow() { return test_now; }

class AwayTest : public ::testing::Test {
 protected:
  void SetUp() override { test_now = steady_clock::time_point() + std::chrono::hours(1); }
  // The calls of one millisecond each that looked for the daemon in vain.
  int Looks(int calls) {
    int looks = 0;
    for (int i = 0; i < calls; ++i) {
      test_now += milliseconds(1);
      const Away::Look look = away_.Ask();
      if (!look.why.ok()) continue;
      EXPECT_TRUE(look.is_probe);
      ++looks;
      away_.Note(gone_, look, true);
    }
    return looks;
  }

  const absl::Status gone_ = absl::UnavailableError("connection refused");
  const absl::Status late_ = absl::DeadlineExceededError("too late");
  Away away_{true, &TestNow};
};

TEST_F(AwayTest, CallsAreMadeWhileADaemonAnswers) {
  for (int i = 0; i < 3; ++i) {
    const Away::Look look = away_.Ask();
    EXPECT_TRUE(look.why.ok());
    EXPECT_FALSE(look.is_probe);
    EXPECT_TRUE(away_.Note(i == 1 ? absl::NotFoundError("a block") : absl::OkStatus(), look, true));
  }
}

TEST_F(AwayTest, FewCallsLookForADaemonThatIsAway) {
  EXPECT_FALSE(away_.Note(gone_, away_.Ask(), true));
  EXPECT_EQ(away_.Ask().why, gone_);
  // 20, 40, ..., 320 ms, then twice a second.
  const int looks = Looks(10'000);
  EXPECT_GE(looks, 15);
  EXPECT_LE(looks, 30);
}

TEST_F(AwayTest, OneLooksAndTheOthersDoNotWaitForIt) {
  away_.Note(gone_, away_.Ask(), true);
  test_now += milliseconds(500);
  const Away::Look look = away_.Ask();
  ASSERT_TRUE(look.why.ok());
  EXPECT_TRUE(look.is_probe);
  test_now += milliseconds(500);
  EXPECT_EQ(away_.Ask().why, gone_);
  test_now += milliseconds(600);  // It hangs: another one tries.
  const Away::Look second = away_.Ask();
  EXPECT_TRUE(second.why.ok());
  EXPECT_TRUE(away_.Note(absl::OkStatus(), second, true));
  EXPECT_TRUE(away_.Ask().why.ok());
  EXPECT_FALSE(away_.Ask().is_probe);
}

TEST_F(AwayTest, ItIsBackForAllAtOnceAndTheNextTimeBeginsAnew) {
  away_.Note(gone_, away_.Ask(), true);
  Looks(5000);
  test_now += milliseconds(500);
  ASSERT_TRUE(away_.Note(absl::OkStatus(), away_.Ask(), true));
  EXPECT_TRUE(away_.Ask().why.ok());
  away_.Note(gone_, away_.Ask(), true);
  EXPECT_EQ(Looks(25), 1);
}

// Calls that were under way when it died end late; they do not make the pause longer.
TEST_F(AwayTest, OnlyWhoLookedMakesThePauseLonger) {
  const Away::Look early = away_.Ask();
  away_.Note(gone_, away_.Ask(), true);
  for (int i = 0; i < 10; ++i) away_.Note(gone_, early, true);
  EXPECT_EQ(Looks(25), 1);
}

TEST_F(AwayTest, StoresAndDeadlinesAloneSayNothing) {
  away_.Note(gone_, away_.Ask(), false);  // It drains.
  EXPECT_TRUE(away_.Ask().why.ok());
  EXPECT_FALSE(away_.Note(late_, away_.Ask(), true));
  EXPECT_TRUE(away_.Ask().why.ok());
  away_.Note(absl::CancelledError("the client goes"), away_.Ask(), true);
  EXPECT_TRUE(away_.Ask().why.ok());
}

TEST_F(AwayTest, WhatWentWithADaemonIsAwayAndRefusalsAreNot) {
  EXPECT_TRUE(away_.IsAway(gone_));
  EXPECT_TRUE(away_.IsAway(late_));
  EXPECT_TRUE(away_.IsAway(absl::AbortedError("the session ended")));
  EXPECT_TRUE(away_.IsAway(absl::UnauthenticatedError("no such token")));
  EXPECT_FALSE(Away(false).IsAway(absl::UnauthenticatedError("no such token")));
  for (const absl::Status& refusal :
       {absl::OkStatus(), absl::InvalidArgumentError(""), absl::NotFoundError(""),
        absl::PermissionDeniedError(""), absl::ResourceExhaustedError(""),
        absl::FailedPreconditionError(""), absl::InternalError(""), absl::CancelledError("")}) {
    EXPECT_FALSE(away_.IsAway(refusal)) << refusal;
  }
}

TEST_F(AwayTest, ResultsAreMissesThatSayWhy) {
  EXPECT_EQ(MissedLookup(gone_).hit_blocks, 0u);
  EXPECT_EQ(MissedLookup(gone_).away, gone_);
  const FetchResult fetched = MissedFetch(2, gone_);
  ASSERT_EQ(fetched.blocks.size(), 2u);
  EXPECT_TRUE(absl::IsNotFound(fetched.blocks[1].status));
  EXPECT_EQ(fetched.away, gone_);
  const StoreResult stored = DroppedStore(3, gone_);
  ASSERT_EQ(stored.blocks.size(), 3u);
  EXPECT_EQ(stored.blocks[2].outcome, StoreOutcome::kDropped);
  EXPECT_TRUE(stored.blocks[2].status.ok());
  EXPECT_EQ(stored.blocks_dropped, 3u);
  EXPECT_EQ(stored.blocks_failed, 0u);
}

TEST_F(AwayTest, SingleBlocksThatWereLostAreMissesAndOthersStayWhatTheyAre) {
  FetchResult fetched;
  fetched.blocks.resize(3);
  fetched.blocks[0].status = absl::OkStatus();
  fetched.blocks[1].status = absl::DataLossError("a bit");
  fetched.blocks[2].status = gone_;
  MissLostBlocks(away_, &fetched);
  EXPECT_TRUE(fetched.blocks[0].status.ok());
  EXPECT_TRUE(absl::IsDataLoss(fetched.blocks[1].status));
  EXPECT_TRUE(absl::IsNotFound(fetched.blocks[2].status));
  EXPECT_EQ(fetched.away, gone_);
  StoreResult stored;
  stored.blocks = {{absl::OkStatus(), StoreOutcome::kStored},
                   {absl::ResourceExhaustedError("full"), StoreOutcome::kFailed},
                   {gone_, StoreOutcome::kFailed}};
  stored.blocks_stored = 1;
  stored.blocks_failed = 2;
  DropLostBlocks(away_, &stored);
  EXPECT_EQ(stored.blocks[0].outcome, StoreOutcome::kStored);
  EXPECT_TRUE(absl::IsResourceExhausted(stored.blocks[1].status));
  EXPECT_EQ(stored.blocks[2].outcome, StoreOutcome::kDropped);
  EXPECT_EQ(stored.blocks_failed, 1u);
  EXPECT_EQ(stored.blocks_dropped, 1u);
}

TEST_F(AwayTest, AMissedMapHasNothingLeased) {
  ClientNamespace ns;
  ns.spec.groups.resize(2);
  const BlockKey keys[] = {*BlockKey::FromBytes("one"), *BlockKey::FromBytes("two")};
  auto mapped = MissedMap(ns, keys, 60'000, gone_);
  ASSERT_EQ(mapped->block_count(), 2u);
  EXPECT_TRUE(absl::IsNotFound(mapped->status(1)));
  EXPECT_TRUE(absl::IsNotFound(mapped->Page(1, 1, 0).status()) ||
              absl::IsInvalidArgument(mapped->Page(1, 1, 0).status()));
  EXPECT_EQ(mapped->memory(0, 1), Tier::kHost);
  EXPECT_EQ(mapped->away(), gone_);
  EXPECT_TRUE(mapped->Check().ok()) << mapped->Check();
  EXPECT_TRUE(mapped->VerifyContents().ok());
  mapped->Release();
}

}  // namespace
}  // namespace kvmill
