#include "service/cluster/run_sketch.h"

#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/cluster/sketches.h"

namespace kvmill {
namespace {

using Blocks = std::vector<std::pair<std::size_t, std::uint64_t>>;

TEST(RunSketchTest, ABlockIsThereOrNotOrCannotBeTold) {
  const RunSketch sketch = SketchOfBlocks({{0, 100}, {1, 101}, {2, 102}, {2, 202}, {4, 104}});
  EXPECT_EQ(sketch.count, 3);
  EXPECT_EQ(sketch.blocks, 5u);
  EXPECT_EQ(HoldsBlock(sketch, 0, 100), Holds::kYes);
  EXPECT_EQ(HoldsBlock(sketch, 1, 100), Holds::kNo);
  EXPECT_EQ(HoldsBlock(sketch, 2, 102), Holds::kPerhaps);
  EXPECT_EQ(HoldsBlock(sketch, 2, 7), Holds::kPerhaps);
  EXPECT_EQ(HoldsBlock(sketch, 4, 104), Holds::kNo) << "behind a gap nothing is promised";
  EXPECT_EQ(HoldsBlock(RunSketch(), 0, 0), Holds::kNo);
  EXPECT_NE(TagOf(0x10000), RunSketch::kSeveral);
}

TEST(RunSketchTest, WhoHasAllOfAnother) {
  const RunSketch mine = SketchOfBlocks({{0, 100}, {1, 101}, {2, 102}});
  EXPECT_EQ(HoldsAll(mine, mine), Holds::kYes);
  EXPECT_EQ(HoldsAll(mine, RunSketch()), Holds::kYes);
  EXPECT_EQ(HoldsAll(RunSketch(), mine), Holds::kNo);
  EXPECT_EQ(HoldsAll(mine, SketchOfBlocks({{0, 100}, {1, 101}})), Holds::kYes);
  EXPECT_EQ(HoldsAll(SketchOfBlocks({{0, 100}, {1, 101}}), mine), Holds::kNo);
  // As many places, but the last block is another one.
  const RunSketch other = SketchOfBlocks({{0, 100}, {1, 101}, {2, 202}});
  EXPECT_EQ(HoldsAll(mine, other), Holds::kNo);
  EXPECT_EQ(CommonPlaces(mine, other), 2);
  // The tags are the same and the blocks are not.
  const RunSketch twin = SketchOfBlocks({{0, 100}, {1, 101}, {2, 102 + 0x10000}});
  EXPECT_EQ(HoldsAll(mine, twin), Holds::kPerhaps);
  // Who has several cannot tell of one, and who has one lacks some of several.
  const RunSketch both = SketchOfBlocks({{0, 100}, {1, 101}, {2, 102}, {2, 202}});
  EXPECT_EQ(HoldsAll(both, mine), Holds::kPerhaps);
  EXPECT_EQ(HoldsAll(mine, both), Holds::kNo);
  EXPECT_EQ(HoldsAll(both, both), Holds::kYes);
  EXPECT_EQ(CommonPlaces(both, both), 2);
  EXPECT_EQ(HoldsAll(mine, SketchOfBlocks({{0, 100}, {1, 101}, {5, 105}})), Holds::kPerhaps)
      << "there is more than places tell";
  // Of a node of an earlier version nothing is known but how many there are.
  RunSketch old;
  old.count = 3;
  old.blocks = 3;
  EXPECT_EQ(HoldsAll(old, old), Holds::kPerhaps);
  EXPECT_EQ(HoldsAll(mine, old), Holds::kPerhaps);
  EXPECT_EQ(HoldsAll(SketchOfBlocks({{0, 100}}), old), Holds::kNo);
  EXPECT_EQ(HoldsAll(old, mine), Holds::kPerhaps);
  // Up to where sequences part.
  EXPECT_EQ(StraightPlaces(both), 2);
  EXPECT_EQ(HoldsStraight(mine, both), Holds::kYes);
  EXPECT_EQ(HoldsStraight(other, mine), Holds::kNo);
  EXPECT_EQ(HoldsStraight(SketchOfBlocks({{0, 100}}), both), Holds::kNo);
  EXPECT_EQ(HoldsStraight(both, mine), Holds::kPerhaps);
  // What is behind a gap can be told from nothing only by asking.
  EXPECT_EQ(HoldsAll(mine, SketchOfBlocks({{0, 100}, {1, 101}, {2, 102}, {5, 105}})),
            Holds::kPerhaps);
}

// Whatever two nodes have: a sketch that says yes or no of the other's first places is right.
TEST(RunSketchTest, WhatIsSaidIsTrue) {
  std::mt19937_64 random(11);
  std::size_t told = 0;
  for (int round = 0; round < 20000; ++round) {
    // Hashes with tags of their own, so that none is taken for another.
    const auto draw = [&] {
      Blocks blocks;
      const std::size_t places = random() % 6;
      for (std::size_t place = 0; place < places; ++place) {
        for (std::uint64_t which = 0; which < 3; ++which) {
          if (random() % 3 != 0)
            blocks.emplace_back(place, (1 + 10 * place + which) * 0x9e3779b97f4a7c15);
        }
      }
      return blocks;
    };
    const Blocks mine = draw(), theirs = draw();
    const RunSketch a = SketchOfBlocks(mine), b = SketchOfBlocks(theirs);
    const std::set<std::pair<std::size_t, std::uint64_t>> has(mine.begin(), mine.end());
    bool all = true;
    for (const auto& [place, hash] : theirs) {
      const bool here = has.contains({place, hash});
      all &= here;
      if (place >= b.count) continue;
      const Holds holds = HoldsBlock(a, place, hash);
      const bool promised = place < a.count && here;
      ASSERT_TRUE(holds == Holds::kPerhaps || (holds == Holds::kYes) == promised) << round;
    }
    const Holds holds = HoldsAll(a, b);
    // Without the anchor nothing is told.
    if (holds == Holds::kPerhaps || b.count == 0) continue;
    ++told;
    ASSERT_EQ(holds == Holds::kYes, all) << round;
  }
  EXPECT_GT(told, 10000u);
}

}  // namespace
}  // namespace kvmill
