#include "service/cluster/held_table.h"

#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/sketches.h"

namespace kvmill {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

RunLink First() { return {0, RunLink::Kind::kFirst, 0}; }
RunLink After(std::uint64_t parent, int place) {
  return {parent, RunLink::Kind::kParent, static_cast<std::uint8_t>(place)};
}
RunLink Of(std::uint64_t anchor, int place) {
  return {anchor, RunLink::Kind::kAnchor, static_cast<std::uint8_t>(place)};
}

int CountOf(const HeldTable& table, std::uint64_t anchor) { return table.SketchOf(anchor).count; }
// Blocks 100 and so on, one in each place.
RunSketch Straight(std::size_t count) {
  std::vector<std::pair<std::size_t, std::uint64_t>> blocks;
  for (std::size_t place = 0; place < count; ++place) blocks.emplace_back(place, 100 + place);
  return SketchOfBlocks(blocks);
}

TEST(HeldTableTest, BlocksThatComeBeforeTheirParentsAreCountedWhenThoseAreThere) {
  HeldTable table;
  for (int place = 31; place > 0; --place) table.Put(100 + place, After(99 + place, place), place);
  EXPECT_EQ(table.waiting(), 31u);
  EXPECT_EQ(CountOf(table, 100), 0);
  EXPECT_THAT(table.TakeChanges(), IsEmpty());
  table.Put(100, First(), 0);
  EXPECT_EQ(table.waiting(), 0u);
  EXPECT_EQ(CountOf(table, 100), 32);
  EXPECT_THAT(table.TakeChanges(), UnorderedElementsAre(Announcement{100, Straight(32)}));
  EXPECT_EQ(table.PlaceOf(117)->anchor_hash, 100u);
  EXPECT_EQ(table.PlaceOf(117)->place, 17);

  // A gap ends the prefix; what is behind it stays known, and counts again when the gap is closed.
  table.Erase(104);
  EXPECT_EQ(CountOf(table, 100), 4);
  EXPECT_THAT(table.BlocksOf(100), SizeIs(31));
  table.Put(104, Of(100, 4), 9);
  EXPECT_THAT(table.TakeChanges(), IsEmpty()) << "it is what was told";
  EXPECT_EQ(CountOf(table, 100), 32);
  std::vector<HeldTable::Left> left = table.TakeLeft();
  ASSERT_THAT(left, SizeIs(1));
  EXPECT_EQ(left[0].anchor_hash, 100u);
  EXPECT_EQ(left[0].key_hash, 104u);
  for (int place = 0; place < 32; ++place) table.Erase(100 + place);
  EXPECT_THAT(table.TakeLeft(), SizeIs(32));
  EXPECT_THAT(table.TakeLeft(), IsEmpty());
  EXPECT_THAT(table.TakeChanges(), UnorderedElementsAre(Announcement{100, {}}));
  EXPECT_EQ(table.runs(), 0u);
  EXPECT_EQ(table.blocks(), 0u);
}

TEST(HeldTableTest, SequencesThatPartWithinARunShareItsCount) {
  HeldTable table;
  table.Put(1, First(), 0);
  table.Put(2, After(1, 1), 0);
  table.Put(3, After(2, 2), 0);
  table.Put(12, After(1, 1), 0);
  table.Put(13, After(12, 2), 0);
  table.Put(14, After(13, 3), 0);
  EXPECT_EQ(CountOf(table, 1), 4);
  EXPECT_EQ(table.SketchOf(1), SketchOfBlocks({{0, 1}, {1, 2}, {1, 12}, {2, 3}, {2, 13}, {3, 14}}));
  table.TakeChanges();
  table.Erase(3);
  EXPECT_EQ(CountOf(table, 1), 4);
  EXPECT_THAT(table.TakeChanges(),
              UnorderedElementsAre(
                  Announcement{1, SketchOfBlocks({{0, 1}, {1, 2}, {1, 12}, {2, 13}, {3, 14}})}))
      << "as many places, and other blocks";
  table.Erase(13);
  EXPECT_EQ(CountOf(table, 1), 2);
  table.Erase(2);
  EXPECT_EQ(CountOf(table, 1), 2);
  table.Erase(12);
  EXPECT_EQ(CountOf(table, 1), 1);
}

TEST(HeldTableTest, WhatCannotBeIsInNoRun) {
  HeldTable table;
  table.Put(1, First(), 0);
  table.Put(2, RunLink(), 0);    // A tail.
  table.Put(3, After(1, 5), 0);  // Its parent has place 0.
  table.Put(4, Of(1, 32), 0);    // No such place.
  table.Put(5, After(5, 1), 0);  // Itself.
  table.Put(6, After(7, 2), 0);  // In a circle.
  table.Put(7, After(6, 1), 0);
  EXPECT_EQ(table.blocks(), 5u);
  EXPECT_EQ(table.waiting(), 4u);
  EXPECT_EQ(CountOf(table, 1), 1);
  for (std::uint64_t hash : {2, 3, 4, 5, 6, 7}) EXPECT_FALSE(table.PlaceOf(hash).has_value());
  // It comes again, from a peer, with its anchor.
  table.Put(6, Of(1, 1), 0);
  EXPECT_EQ(CountOf(table, 1), 2);
}

// All that the table does, said in the simplest way.
struct Model {
  struct Block {
    RunLink link;
    std::uint32_t entry = 0;
    std::optional<std::uint64_t> anchor{};
  };
  std::map<std::uint64_t, Block> blocks;

  void Put(std::uint64_t hash, const RunLink& link, std::uint32_t entry) {
    Block& block = blocks[hash];
    block.entry = entry;
    if (!block.anchor.has_value()) block.link = link;
    for (bool more = true; more;) {
      more = false;
      for (auto& [h, b] : blocks) {
        if (b.anchor.has_value()) continue;
        if (b.link.kind == RunLink::Kind::kFirst) b.anchor = h;
        if (b.link.kind == RunLink::Kind::kAnchor) b.anchor = b.link.hash;
        if (b.link.kind == RunLink::Kind::kParent) {
          const auto parent = blocks.find(b.link.hash);
          if (parent != blocks.end() && parent->second.link.place + 1 == b.link.place) {
            b.anchor = parent->second.anchor;
          }
        }
        more |= b.anchor.has_value();
      }
    }
  }
  std::map<std::uint64_t, RunSketch> Sketches() const {
    std::map<std::uint64_t, std::set<std::pair<std::size_t, std::uint64_t>>> held;
    for (const auto& [hash, block] : blocks) {
      if (block.anchor.has_value()) held[*block.anchor].emplace(block.link.place, hash);
    }
    std::map<std::uint64_t, RunSketch> sketches;
    for (const auto& [anchor, in_run] : held) {
      const RunSketch sketch = SketchOfBlocks({in_run.begin(), in_run.end()});
      if (sketch.count > 0) sketches[anchor] = sketch;
    }
    return sketches;
  }
};

TEST(HeldTableTest, AgreesWithTheModelWhateverComesAndGoes) {
  std::mt19937_64 random(7);
  HeldTable table;
  Model model;
  std::map<std::uint64_t, RunSketch> told;
  // Trees: block n > 7 comes after a block drawn once among those before it.
  constexpr std::uint64_t kBlocks = 120;
  std::vector<RunLink> links;
  for (std::uint64_t n = 0; n < kBlocks; ++n) {
    const std::uint64_t parent = n < 8 ? 0 : std::min<std::uint64_t>(n - 1, random() % 3 + n - 4);
    const int place = n < 8 ? 0 : (links[parent].place + 1) % 32;
    links.push_back(n < 8 || place == 0 ? First() : After(1000 + parent, place));
  }
  for (int step = 0; step < 20000; ++step) {
    const std::uint64_t n = random() % kBlocks;
    const std::uint64_t hash = 1000 + n;
    // Now and then nearly nothing is left.
    const bool leaves = random() % 1000 < (step / 2000 % 2 == 0 ? 300u : 700u);
    if (leaves) {
      table.Erase(hash);
      model.blocks.erase(hash);
    } else {
      const auto entry = static_cast<std::uint32_t>(random());
      // Its link to the anchor, as a peer's copy has it, if that is known.
      const auto known = model.blocks.find(hash);
      RunLink link = links[n];
      if (random() % 8 == 0 && known != model.blocks.end() && known->second.anchor.has_value() &&
          link.kind == RunLink::Kind::kParent) {
        link = Of(*known->second.anchor, link.place);
      }
      table.Put(hash, link, entry);
      model.Put(hash, link, entry);
    }
    if (step % 50 != 0) continue;
    for (const Announcement& change : table.TakeChanges()) {
      EXPECT_NE(told[change.anchor_hash], change.sketch);
      told[change.anchor_hash] = change.sketch;
      if (change.sketch.count == 0) told.erase(change.anchor_hash);
    }
    ASSERT_EQ(told, model.Sketches()) << "at step " << step;
    std::size_t waiting = 0;
    std::map<std::uint64_t, std::size_t> sizes;
    for (const auto& [h, block] : model.blocks) {
      waiting += !block.anchor.has_value();
      const auto place = table.PlaceOf(h);
      ASSERT_EQ(place.has_value(), block.anchor.has_value());
      if (!place.has_value()) continue;
      ++sizes[*block.anchor];
      ASSERT_EQ(place->anchor_hash, *block.anchor);
      ASSERT_EQ(place->place, block.link.place);
    }
    ASSERT_EQ(table.blocks(), model.blocks.size());
    ASSERT_EQ(table.waiting(), waiting);
    ASSERT_EQ(table.runs(), sizes.size());
    for (const auto& [anchor, size] : sizes) {
      const auto blocks = table.BlocksOf(anchor);
      ASSERT_EQ(blocks.size(), size);
      for (const auto& block : blocks) ASSERT_EQ(block.entry, model.blocks[block.key_hash].entry);
    }
  }
}

TEST(HeldTableTest, ASweepFindsWhatWasNotSeenAgain) {
  HeldTable table;
  for (int round = 0; round < 3; ++round) {
    for (std::uint64_t n = 0; n < 5000; ++n) table.Put(n, First(), 1);
    table.BeginSweep();
    for (std::uint64_t n = 0; n < 5000; n += 2) table.Put(n, First(), 2);
    table.Put(10000, First(), 2);
    std::size_t cursor = 0;
    std::vector<HeldTable::Block> missed;
    for (bool more = true; more;) {
      const std::size_t before = missed.size();
      more = table.SweepSome(&cursor, &missed);
      for (std::size_t i = before; i < missed.size(); ++i) {
        EXPECT_EQ(missed[i].key_hash % 2, 1u);
        table.Erase(missed[i].key_hash);
      }
    }
    EXPECT_EQ(missed.size(), 2500u);
    EXPECT_EQ(table.blocks(), 2501u);
  }
}

TEST(HeldTableTest, WhatABlockTakes) {
  std::mt19937_64 random(3);
  constexpr std::size_t kBlocks = 320'000;
  for (const std::size_t run : {std::size_t{1}, kRunBlocks}) {
    HeldTable table;
    std::uint64_t before = 0;
    for (std::size_t n = 0; n < kBlocks; ++n) {
      const std::uint64_t hash = random();
      const int place = static_cast<int>(n % run);
      table.Put(hash, place == 0 ? First() : After(before, place), 0);
      before = hash;
      if (n % 4096 == 0) table.TakeChanges();
    }
    ASSERT_EQ(table.blocks(), kBlocks);
    ASSERT_EQ(table.runs(), kBlocks / run);
    const double bytes = static_cast<double>(table.bytes()) / kBlocks;
    std::printf("runs of %zu: %.1f bytes a block\n", run, bytes);
    EXPECT_LE(bytes, run == 1 ? 192 : 52);
  }
}

}  // namespace
}  // namespace kvmill
