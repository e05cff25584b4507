// What a node that leaves hands over, from both sides: homes that take it, and the one that asks.
#include "service/cluster/handover.h"

#include <gmock/gmock.h>

#include <optional>

#include "service/cluster/replicator.h"
#include "tests/cluster/replication_fixture.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;

class HandoverTest : public ReplicationTest {};

TEST_F(HandoverTest, AHomeTakesOverWhatNobodyElseHasWhoStays) {
  Make(0);
  Member leaving = Node(1), leaves_too = Node(3);
  leaving.state = leaves_too.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2), leaves_too});
  Announced(1, {1, 2, 3});
  Announced(2, {2});  // It stays, and has it.
  Announced(3, {3});  // It has it, and goes, too.
  const std::vector<Announcement> all = {Said(1, 10), Said(2, 10), Said(3, 10)};
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(0, 10, 0));
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10, 10, 10));
  EXPECT_EQ(peers_.pulled_blocks, 2 * kBlocks);
  // A node that drains itself promises nothing.
  Member self = Node(0);
  self.state = MemberState::kDraining;
  SetView({self, leaving, Node(2), leaves_too});
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(0, 10, 0));
}

TEST_F(HandoverTest, ANodeThatLeavesKeepsNothingBackOfSequencesThatPart) {
  Make(0);
  Member leaving = Node(1);
  leaving.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2)});
  peers_.scripts["node-1"].sequences = {0, 1, 2};
  peers_.scripts["node-2"].sequences = {1};
  Announced(1, {1});
  Announced(2, {1});  // It stays, and has as many places.
  const std::vector<Announcement> all = {{HashOf(1), SketchOf(1, {0, 1, 2}, false)}};
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(4)) << "those of all";
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10));
  EXPECT_EQ(SketchOf(1, kSequences, true), SketchOf(1, {0, 1, 2}, false));
  // One block of those that cannot be told apart is evicted: not all is safe any more.
  const BlockKey gone = RunPeers::BlocksOf(1, {1}).back().second;
  peers_.here.erase(std::string(gone.view()));
  replicator_->Evicted(HashOf(1), KeyHash(kFingerprint, gone));
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(4));
  Run(kSimSecond);
  EXPECT_THAT(replicator_->HandedOver(leaving, all), ElementsAre(10));
}

TEST_F(HandoverTest, WhatIsHandedOverComesFirstAndInItsOrder) {
  Make(1, 100);
  Member leaving = Node(1);
  leaving.state = MemberState::kDraining;
  SetView({Node(0), leaving, Node(2)});
  // Copies that this node owes anyway wait.
  const std::vector<std::size_t> owed =
      RunsWhere(40, [&](std::size_t run) { return run >= 1000 && HomeOf(run, 0) == "node-0"; });
  Announced(2, owed);
  std::vector<std::size_t> runs;
  std::vector<Announcement> list;
  for (std::size_t i = 0; i < 20; ++i) {
    runs.push_back(20 - i);
    list.push_back(Said(runs.back(), kBlocks));
  }
  for (const std::size_t run : runs) {
    peers_.run_of[HashOf(run)] = run;
    peers_.scripts["node-1"].runs.insert(run);
  }
  pointers_.Announced(leaving, list);
  replicator_->HandedOver(leaving, list);
  for (std::size_t done = 0; done < runs.size();) {
    Run(10 * kSimMs);
    while (done < runs.size() && Here(runs[done], kBlocks - 1)) ++done;
    // Whatever has come so far is the beginning of the list, and a run that is under way.
    for (std::size_t i = done + 1; i < runs.size(); ++i) {
      ASSERT_FALSE(Here(runs[i], 0)) << i << " before " << done;
    }
    ASSERT_LT(events_.now(), 60 * kSimSecond);
  }
  EXPECT_LE(Copied(owed), 12u) << "of the node that does not leave, at the same time";
}

// One that leaves does not answer, and has more than the queue takes; the other one's runs, and one
// that both have, come all the same.
TEST_F(HandoverTest, ANodeThatLeavesDoesNotWaitForAnotherThatIsStuck) {
  Make(0);
  Member stuck = Node(1), other = Node(2);
  stuck.state = other.state = MemberState::kDraining;
  SetView({Node(0), stuck, other});
  const auto hand_over = [&](const Member& from, std::size_t first, std::size_t count) {
    std::vector<Announcement> list;
    for (std::size_t run = first; run < first + count; ++run) {
      peers_.run_of[HashOf(run)] = run;
      peers_.scripts[from.id].runs.insert(run);
      list.push_back(Said(run, kBlocks));
    }
    pointers_.Announced(from, list);
    replicator_->HandedOver(from, list);
  };
  peers_.scripts["node-1"].silent = true;
  for (std::size_t run = 0; run < 40'000; run += 1000) hand_over(stuck, run, 1000);
  EXPECT_EQ(replicator_->queued(), 2 * Replicator::kQueueMax);
  Run(5 * kSimSecond);  // It is known to be silent, and asked now and then.
  EXPECT_EQ(peers_.pulled_blocks, 0u);
  hand_over(other, 50'000, 20);
  hand_over(other, 30'000, 1);
  std::vector<std::size_t> runs = {30'000};
  for (std::size_t run = 50'000; run < 50'020; ++run) runs.push_back(run);
  for (int i = 0; i < 20 && Copied(runs) < runs.size(); ++i) Run(100 * kSimMs);
  EXPECT_EQ(Copied(runs), runs.size());
  EXPECT_EQ(peers_.pulled_blocks, runs.size() * kBlocks) << "each once";
  // It answers again: what it has is in the queue still, or asked for again.
  peers_.scripts["node-1"].silent = false;
  for (std::size_t i = 0; i < 100 && !(Here(0, 9) && Here(999, 9)); ++i) {
    hand_over(stuck, 0, 1000);
    Run(2 * kSimSecond);
  }
  EXPECT_TRUE(Here(0, 9) && Here(999, 9));
}

TEST_F(HandoverTest, AHandoverEndsWhenAllIsSafeOrTheTimeIsOver) {
  const auto hand_over = [&](std::int64_t limit) {
    Handover handover(loop_, peers_, health_, {.self_id = "node-0"});
    handover.SetView(view_);
    handover.SetMembers(view_->members());
    std::optional<Handover::Report> report;
    std::vector<Announcement> runs;
    for (std::size_t run = 0; run < 2000; ++run) runs.push_back(Said(run, 10));
    runs.push_back({1, {}});
    const std::int64_t start = events_.now();
    handover.Start(runs, loop_.clock().MonotonicNanos() + limit,
                   [&](const auto& r) { report = r; });
    EXPECT_FALSE(report.has_value());
    EXPECT_EQ(handover.report().blocks_left, 20'000u);
    while (!report.has_value() && events_.now() <= start + limit) {
      Run(kSimMs);
      EXPECT_EQ(handover.report().blocks + handover.report().blocks_left, 20'000u) << "as it goes";
    }
    EXPECT_TRUE(report.has_value());
    EXPECT_FALSE(handover.running());
    EXPECT_EQ(peers_.open, 0);
    return report.value_or(Handover::Report());
  };
  SetView({Node(0), Node(1), Node(2)});
  peers_.scripts["node-1"].safe = 10;
  peers_.scripts["node-2"].safe = 9;
  const Handover::Report half = hand_over(3 * kSimSecond);
  EXPECT_GT(half.runs, 0u);
  EXPECT_GT(half.runs_left, 0u);
  EXPECT_EQ(half.runs + half.runs_left, 2000u);
  EXPECT_EQ(half.blocks, 10 * half.runs);
  EXPECT_EQ(half.blocks_left, 10 * half.runs_left);
  EXPECT_LE(peers_.handed_over["node-2"], 12 * half.runs_left) << "asked less and less often";

  peers_.scripts["node-2"].safe = 32;
  EXPECT_EQ(hand_over(3 * kSimSecond).blocks_left, 0u);
  // A home that does not answer is left alone, and the next one takes over.
  peers_.scripts["node-2"].silent = true;
  EXPECT_EQ(hand_over(10 * kSimSecond).blocks_left, 0u);
  SetView({Node(0)});
  const std::int64_t before = events_.now();
  EXPECT_EQ(hand_over(3 * kSimSecond).runs_left, 2000u) << "there is nobody";
  EXPECT_LT(events_.now() - before, kSimSecond);
}

TEST_F(HandoverTest, ARunOfWhichTwoHomesSayThatItIsSafeIsCountedOnce) {
  Handover handover(loop_, peers_, health_, {.self_id = "node-0"});
  const auto see = [&](const std::vector<Member>& members) {
    SetView(members);
    handover.SetView(view_);
    handover.SetMembers(view_->members());
  };
  see({Node(0), Node(1)});
  for (const char* id : {"node-1", "node-2"}) peers_.scripts[id].safe = 10;
  peers_.scripts["node-1"].answer_nanos = 200 * kSimMs;
  std::optional<Handover::Report> report;
  std::vector<Announcement> runs;
  for (std::size_t run = 0; run < 6000; ++run) runs.push_back(Said(run, 10));
  handover.Start(runs, loop_.clock().MonotonicNanos() + 100 * kSimSecond,
                 [&](const auto& r) { report = r; });
  for (int i = 0; i < 1000 && peers_.handed_over["node-1"] == 0; ++i) Run(kSimMs);
  EXPECT_EQ(peers_.handed_over["node-1"], 1024u);
  see({Node(0), Node(1), Node(2)});  // Now the home of some of those.
  while (!report.has_value()) {
    Run(kSimMs);
    ASSERT_LE(handover.report().blocks_left, 60'000u);
  }
  EXPECT_GT(peers_.handed_over["node-1"] + peers_.handed_over["node-2"], 6000u);
  EXPECT_EQ(report->runs, 6000u);
  EXPECT_EQ(report->blocks, 60'000u);
  EXPECT_EQ(report->blocks_left + report->runs_left, 0u);
}

}  // namespace
}  // namespace kvmill
