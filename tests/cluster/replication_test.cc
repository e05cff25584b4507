// What a home copies: which runs, from whom, how fast; and who says that they are hot.
#include <gmock/gmock.h>

#include "service/cluster/hot_runs.h"
#include "service/cluster/replicator.h"
#include "tests/cluster/replication_fixture.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(ReplicationTest, AHomeCopiesWhatItLacks) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  const auto others = RunsWhere(20, [&](std::size_t run) {
    return HomeOf(run, 0) != "node-0" && HomeOf(run, 1) != "node-0";
  });
  Announced(1, mine);
  Announced(1, others);
  Run(kSimSecond);
  EXPECT_EQ(Copied(mine), 20u);
  EXPECT_EQ(Copied(others), 0u);
  EXPECT_EQ(peers_.pulled_blocks, 20 * kBlocks);
  EXPECT_THAT(peers_.listed, ElementsAre("node-1 20")) << "one question for all";
  EXPECT_EQ(replicator_->stats().copied_blocks, 20 * kBlocks);
  EXPECT_EQ(replicator_->stats().copied_bytes, 20 * kBlocks * kBlockBytes);
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
  // Said again: nothing to do.
  Announced(1, mine);
  Run(10 * kSimSecond);
  EXPECT_THAT(peers_.listed, SizeIs(1));
}

TEST_F(ReplicationTest, WithoutCopiesAHomeOnlyPoints) {
  Make(0);
  SetView({Node(0), Node(1)});
  Announced(1, RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; }));
  Run(10 * kSimSecond);
  EXPECT_THAT(peers_.listed, IsEmpty());
}

TEST_F(ReplicationTest, TheNextHomeCopiesWhenNobodyOutsideHolds) {
  Make(1);
  SetView({Node(0), Node(1), Node(2)});
  const auto second = RunsWhere(10, [&](std::size_t run) {
    return HomeOf(run, 0) == "node-1" && HomeOf(run, 1) == "node-0";
  });
  // Node 2 is no home, and its copy is the second one besides that of node 1.
  Announced(2, second);
  Announced(1, second);
  Run(10 * kSimSecond);
  EXPECT_EQ(Copied(second), 0u);
  // It dies: two copies are wanted again.
  SetView({Node(0), Node(1)});
  Run(kSimSecond);
  EXPECT_EQ(Copied(second), 10u);
  EXPECT_THAT(peers_.listed, ElementsAre("node-1 10"));
}

TEST_F(ReplicationTest, AHolderThatDrainsDoesNotCount) {
  Make(1);
  Member draining = Node(2);
  draining.state = MemberState::kDraining;
  SetView({Node(0), Node(1), draining});
  const auto second = RunsWhere(5, [&](std::size_t run) { return HomeOf(run, 1) == "node-0"; });
  Announced(2, second);
  Run(kSimSecond);
  EXPECT_EQ(Copied(second), 5u);
  EXPECT_THAT(peers_.listed, ElementsAre("node-2 5")) << "who drains still answers";
}

TEST_F(ReplicationTest, TheRateIsKeptAndSaysHowLongItTakes) {
  Make(1, 50);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(20, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].claims = 1;  // That a block has a byte is not believed for long.
  Announced(1, mine);
  EXPECT_NEAR(static_cast<double>(replicator_->rate().NanosFor(200 * kBlockBytes)), 4e9, 1e8);
  Run(2 * kSimSecond);
  // Fifty a second, and the first run at once, which the peer made smaller than it was.
  EXPECT_LE(peers_.pulled_blocks, 2u * 50 + kBlocks + 5);
  EXPECT_GE(peers_.pulled_blocks, 2u * 50 - kBlocks);
  Run(2 * kSimSecond + 200 * kSimMs);
  EXPECT_EQ(Copied(mine), 20u);
}

TEST_F(ReplicationTest, APeerThatSaysBlocksAreHugeStopsNothing) {
  Make(1, 50);
  SetView({Node(0), Node(1), Node(2)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].claims = std::uint64_t{1} << 58;
  Announced(1, {mine[0]});
  Run(3 * kSimSecond);
  EXPECT_EQ(Copied(mine), 1u);
  peers_.scripts["node-1"].silent = true;
  Announced(1, {mine[1]});
  Run(30 * kSimSecond);
  Announced(2, {mine[1]});
  Run(3 * kSimSecond);
  EXPECT_EQ(Copied(mine), 2u);
}

TEST_F(ReplicationTest, AnotherHolderIsAskedWhenOneFailsOrLies) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(6, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].silent = true;
  peers_.scripts["node-2"].wrong_anchor = true;
  for (const std::size_t node : {3, 2, 1}) Announced(node, mine);  // Asked in the other order.
  Run(20 * kSimSecond);
  EXPECT_EQ(Copied(mine), 6u);
  EXPECT_TRUE(health_.paused_count() > 0);
  for (const std::string& call : peers_.pulled) EXPECT_THAT(call, ::testing::StartsWith("node-3"));
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
}

TEST_F(ReplicationTest, BytesThatAreWrongOrDoNotFitEndInPeace) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(6, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].pull_status = absl::DataLossError("");
  Announced(1, mine);
  Run(kSimSecond);
  EXPECT_LE(peers_.pulled.size(), 4u) << "it is left alone";
  EXPECT_EQ(Copied(mine), 0u);
  peers_.scripts["node-1"].pull_status = absl::ResourceExhaustedError("");
  Run(60 * kSimSecond);
  EXPECT_LE(peers_.pulled.size(), 80u) << "once a second";
  peers_.scripts["node-1"].pull_status = absl::OkStatus();
  Run(10 * kSimSecond);
  EXPECT_EQ(Copied(mine), 6u);
}

TEST_F(ReplicationTest, WhatWasEvictedHereRests) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  Run(kSimSecond);
  ASSERT_EQ(Copied(mine), 2u);
  peers_.here.erase(std::string(Key(mine[0], kBlocks - 1).view()));
  replicator_->Evicted(HashOf(mine[0]), KeyHash(kFingerprint, Key(mine[0], kBlocks - 1)));
  Announced(1, mine);
  Run(50 * kSimSecond);
  EXPECT_EQ(Copied(mine), 1u);
  Run(20 * kSimSecond);
  EXPECT_EQ(Copied(mine), 2u);
  EXPECT_EQ(peers_.pulled_blocks, 2 * kBlocks + 1) << "and only what is missing comes";
}

// Sequences that part within a run have as many places: what counts is which blocks there are.
TEST_F(ReplicationTest, BlocksOfSequencesThatPartAreCopiedFromWhoeverHasThem) {
  Make(1);
  SetView({Node(0), Node(1), Node(2), Node(3)});
  const auto mine = RunsWhere(4, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].sequences = {0};
  peers_.scripts["node-2"].sequences = {1};
  peers_.scripts["node-3"].sequences = {1, 2, 3};
  Announced(1, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) EXPECT_EQ(SketchOf(run, kSequences, true).blocks, kBlocks);
  Announced(2, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) {
    EXPECT_EQ(SketchOf(run, kSequences, true), SketchOf(run, {0, 1}, false));
  }
  // Its list takes two answers.
  Announced(3, mine);
  Run(kSimSecond);
  for (const std::size_t run : mine) {
    EXPECT_EQ(SketchOf(run, kSequences, true), SketchOf(run, kSequences, false));
  }
  EXPECT_EQ(peers_.pulled_blocks, mine.size() * (kBlocks + 3 * 6)) << "each once";
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
  // That nothing is missing is known for a while.
  const std::size_t listed = peers_.listed.size();
  for (const std::size_t node : {1, 2, 3}) Announced(node, mine);
  Run(20 * kSimSecond);
  EXPECT_LE(peers_.listed.size(), listed + 3);
  const std::size_t once = peers_.listed.size();
  Run(30 * kSimSecond);
  EXPECT_EQ(peers_.listed.size(), once);
  EXPECT_EQ(peers_.pulled_blocks, mine.size() * (kBlocks + 3 * 6));
}

TEST_F(ReplicationTest, AListWithoutAnEndEnds) {
  AnnounceEndless(kRunListMax - 1);
  for (int i = 0; i < 600 && health_.paused_count() == 0; ++i) Run(100 * kSimMs);
  EXPECT_EQ(health_.paused_count(), 1u) << "it lied";
  EXPECT_GT(peers_.made_up, kRunListMax - 2 * kListKeysMax);
  EXPECT_LE(peers_.made_up, 2 * kRunListMax);
}

// Nobody can announce more: thousands of sequences that part behind one short prompt.
TEST_F(ReplicationTest, ARunOfMoreBlocksThanAreAnnouncedIsNoLie) {
  AnnounceEndless(kRunListMax);
  for (int i = 0; i < 600 && replicator_->queued() > 0; ++i) Run(100 * kSimMs);
  EXPECT_EQ(replicator_->queued(), 0u);
  EXPECT_EQ(health_.paused_count(), 0u);
  const std::uint64_t looked_at = peers_.made_up;
  EXPECT_GT(looked_at, kRunListMax - 2 * kListKeysMax);
  EXPECT_LE(looked_at, kRunListMax + 2 * kListKeysMax);
  Run(20 * kSimSecond);
  EXPECT_EQ(peers_.made_up, looked_at) << "it is not listed again at once";
}

TEST_F(ReplicationTest, ALongListRestsBeforeTheNextOneOfItsRun) {
  Announcement said = AnnounceEndless(kRunListMax);
  for (int i = 0; i < 600 && replicator_->queued() > 0; ++i) Run(100 * kSimMs);
  ASSERT_EQ(replicator_->queued(), 0u);
  const std::uint64_t looked_at = peers_.made_up;
  said.sketch.sum ^= 2;  // One more prompt.
  pointers_.Announced(Node(1), {said});
  replicator_->Announced({said});
  EXPECT_EQ(replicator_->queued(), 1u) << "it waits, and is not forgotten";
  Run(10 * kSimSecond);
  EXPECT_EQ(peers_.made_up, looked_at);
  Run(5 * kSimSecond);
  EXPECT_GT(peers_.made_up, looked_at);
}

TEST_F(ReplicationTest, ARunThatGrowsAllTheTimeIsCopiedToItsEnd) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(1, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].answer_nanos = 100 * kSimMs;
  Announced(1, mine);
  Announcement said = {HashOf(mine[0]), SketchOf(mine[0], {0}, false)};
  std::size_t lists = 0;
  // Each time it is listed it says something else before the list is there.
  for (std::size_t pass = 0; pass < Replicator::kTriesMax; ++pass) {
    lists = peers_.listed.size();
    for (int i = 0; i < 100 && peers_.listed.size() == lists; ++i) Run(10 * kSimMs);
    ASSERT_EQ(peers_.listed.size(), lists + 1);
    said.sketch.sum ^= std::uint64_t{1} << pass;
    pointers_.Announced(Node(1), {said});
    replicator_->Announced({said});
  }
  lists = peers_.listed.size();
  Run(kSimSecond);
  EXPECT_EQ(peers_.listed.size(), lists + 1) << "before the next sweep";
  EXPECT_EQ(replicator_->queued(), 0u);
}

TEST_F(ReplicationTest, AQueueThatIsFullForgetsNothing) {
  Make(1);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(Replicator::kQueueMax + 500,
                              [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  EXPECT_EQ(replicator_->queued(), Replicator::kQueueMax);
  Run(60 * kSimSecond);
  EXPECT_EQ(Copied(mine), mine.size());
}

TEST_F(ReplicationTest, JobsOfAMemberThatIsGoneEnd) {
  Make(1);
  SetView({Node(0), Node(1), Node(2)});
  const auto mine = RunsWhere(5, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  peers_.scripts["node-1"].silent = true;
  Announced(1, mine);
  Run(100 * kSimMs);
  EXPECT_EQ(replicator_->jobs(), 1u);
  SetView({Node(0), Node(2)});
  EXPECT_EQ(peers_.open, 0);
  Run(kSimSecond);
  EXPECT_EQ(replicator_->queued() + replicator_->jobs(), 0u);
}

TEST_F(ReplicationTest, RunsThatManyAskForAreHot) {
  HotRuns hot(loop_.clock());
  EXPECT_FALSE(hot.Asked(7, "a"));
  EXPECT_FALSE(hot.Asked(7, "b"));
  EXPECT_FALSE(hot.Asked(7, "a")) << "different ones count";
  EXPECT_FALSE(hot.Asked(8, "c"));
  EXPECT_TRUE(hot.Asked(7, "c"));
  EXPECT_FALSE(hot.Asked(7, "d")) << "once";
  Run(HotRuns::kWindowNanos);
  EXPECT_FALSE(hot.Asked(7, "a"));
  EXPECT_FALSE(hot.Asked(7, "b"));
  EXPECT_TRUE(hot.Asked(7, "c"));
  for (std::uint64_t i = 100; i < 100 + 2 * HotRuns::kRunsMax; ++i) hot.Asked(i, "a");
  EXPECT_EQ(hot.runs(), HotRuns::kRunsMax);

  // The home copies it, whatever R is.
  Make(0);
  SetView({Node(0), Node(1)});
  const auto mine = RunsWhere(2, [&](std::size_t run) { return HomeOf(run, 0) == "node-0"; });
  Announced(1, mine);
  replicator_->Hot(HashOf(mine[0]));
  replicator_->Hot(12345);
  Run(kSimSecond);
  EXPECT_TRUE(Here(mine[0], 9));
  EXPECT_FALSE(Here(mine[1], 0));
}

}  // namespace
}  // namespace kvmill
