#include "service/held_announcer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sketches.h"

namespace kvmill {
namespace {

class HeldAnnouncerTest : public ::testing::Test {
 protected:
  // Of the loop's tasks, until nothing waits; the most that one of them set.
  std::size_t RunLoop() {
    std::size_t most = 0;
    events_.RunUntil(events_.now(), [&] {
      most = std::max(most, set_in_task_);
      set_in_task_ = 0;
    });
    return most;
  }

  SimEvents events_{1, false};
  SimLoop loop_{events_, 0, 0};
  std::map<std::uint64_t, std::vector<std::uint8_t>> set_;
  std::size_t set_in_task_ = 0;
  std::optional<HeldAnnouncer> announcer_{
      std::in_place, loop_,
      [this](const Announcement& announcement) {
        set_[announcement.anchor_hash].push_back(announcement.sketch.count);
        ++set_in_task_;
      },
      [this](const HeldTable::Left& left) { gone_.push_back(left.key_hash); }};
  std::vector<std::uint64_t> gone_;
};

TEST_F(HeldAnnouncerTest, BringsTheLastCountOfEachAnchorSomeAtATime) {
  constexpr std::uint64_t kAnchors = 5000;
  // From a thread, as HeldRuns calls.
  std::thread([&] {
    for (int round = 0; round < 2; ++round) {
      for (std::uint64_t first = 0; first < kAnchors; first += 100) {
        std::vector<Announcement> changes;
        for (std::uint64_t n = first; n < first + 100; ++n) {
          changes.push_back({n, Places(1 + (n + static_cast<std::uint64_t>(round)) % 32)});
        }
        announcer_->Changed(changes);
      }
    }
  }).join();
  EXPECT_EQ(announcer_->waiting(), kAnchors);
  EXPECT_EQ(loop_.waiting(), 1u) << "tasks";
  EXPECT_EQ(RunLoop(), HeldAnnouncer::kAtOnce);
  EXPECT_EQ(announcer_->waiting(), 0u);
  ASSERT_EQ(set_.size(), kAnchors);
  for (const auto& [anchor, counts] : set_) {
    ASSERT_EQ(counts, std::vector<std::uint8_t>{static_cast<std::uint8_t>(1 + (anchor + 1) % 32)});
  }

  announcer_->Changed({});
  EXPECT_EQ(loop_.waiting(), 0u);
  announcer_->Changed({{7, {}}});
  RunLoop();
  EXPECT_EQ(set_[7].back(), 0);
}

TEST_F(HeldAnnouncerTest, BringsWhatLeftTheLastOnesSomeAtATime) {
  constexpr std::size_t kBlocks = HeldAnnouncer::kLeftMax + 1000;
  std::vector<HeldTable::Left> left;
  for (std::uint64_t n = 0; n < kBlocks; ++n) left.push_back({1, n});
  announcer_->Changed({}, left);
  EXPECT_EQ(loop_.waiting(), 1u) << "tasks";
  RunLoop();
  ASSERT_EQ(gone_.size(), HeldAnnouncer::kLeftMax);
  EXPECT_EQ(gone_.front(), 1000u);
  EXPECT_EQ(gone_.back(), kBlocks - 1);
}

TEST_F(HeldAnnouncerTest, SaysNothingOnceItIsGone) {
  announcer_->Changed({{7, Places(1)}});
  announcer_.reset();
  EXPECT_EQ(RunLoop(), 0u);
  EXPECT_TRUE(set_.empty());
}

}  // namespace
}  // namespace kvmill
