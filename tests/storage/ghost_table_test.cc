#include "storage/eviction/ghost_table.h"

#include <gtest/gtest.h>

namespace kvmill {
namespace {

TEST(GhostTableTest, GivesAValueBackOnce) {
  GhostTable ghosts(64);
  EXPECT_EQ(ghosts.Take(7), 0u);
  EXPECT_EQ(ghosts.Add(7, 3), 0u);
  EXPECT_EQ(ghosts.Take(7), 3u);
  EXPECT_EQ(ghosts.Take(7), 0u);
}

TEST(GhostTableTest, KnowsTheHashesZeroAndAllOnes) {
  GhostTable ghosts(64);
  for (const std::uint32_t hash : {0u, 0xFFFFFFFFu}) {
    EXPECT_EQ(ghosts.Take(hash), 0u);
    EXPECT_EQ(ghosts.Add(hash, 15), 0u);
    EXPECT_EQ(ghosts.Take(hash), 15u);
  }
}

TEST(GhostTableTest, ForgetsTheOldestOfAFullSetAndSaysWhatItWas) {
  GhostTable ghosts(8);  // One set.
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(ghosts.Add(i, i + 1), 0u);
  EXPECT_EQ(ghosts.Add(8, 9), 1u);
  EXPECT_EQ(ghosts.Add(9, 10), 2u);
  EXPECT_EQ(ghosts.Take(0), 0u);
  EXPECT_EQ(ghosts.Take(1), 0u);
  for (std::uint32_t i = 2; i < 10; ++i) EXPECT_EQ(ghosts.Take(i), i + 1);
}

TEST(GhostTableTest, ReplacesTheValueOfAHashThatLeavesAgain) {
  GhostTable ghosts(8);
  for (std::uint32_t i = 0; i < 8; ++i) ghosts.Add(i, 1);
  EXPECT_EQ(ghosts.Add(0, 5), 1u);  // What left the table for it is its own former value.
  EXPECT_EQ(ghosts.Add(8, 2), 1u);  // 1 is the oldest now.
  EXPECT_EQ(ghosts.Take(1), 0u);
  EXPECT_EQ(ghosts.Take(0), 5u);
}

TEST(GhostTableTest, LeavesRoomWhereOneWasTaken) {
  GhostTable ghosts(8);
  for (std::uint32_t i = 0; i < 8; ++i) ghosts.Add(i, 1);
  EXPECT_EQ(ghosts.Take(4), 1u);
  EXPECT_EQ(ghosts.Add(9, 2), 0u);
  EXPECT_EQ(ghosts.Take(0), 1u);
}

TEST(GhostTableTest, CostsFourBytesAGhost) {
  EXPECT_EQ(GhostTable(1).bytes(), 32u);
  EXPECT_EQ(GhostTable(8000).bytes(), 32'000u);
  EXPECT_EQ(GhostTable(8001).bytes(), 32'032u);
}

}  // namespace
}  // namespace kvmill
