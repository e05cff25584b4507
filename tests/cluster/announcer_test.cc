// What homes are told of blocks, and how both notice that they do not know the same.
#include "service/cluster/announcer.h"

#include <gmock/gmock.h>

#include <functional>

#include "tests/cluster/replication_fixture.h"

namespace kvmill {
namespace {

using ::testing::SizeIs;

class AnnouncerTest : public ReplicationTest {};

TEST_F(AnnouncerTest, HomesOfAllRanksAreToldAndFormerOnesForget) {
  Announcer announcer(loop_, peers_, health_,
                      {.self_id = "self",
                       .copies = 1,
                       .tick_nanos = 10 * kSimMs,
                       .repeat_nanos = 1000 * kSimSecond,
                       .withdraw_nanos = 3 * kSimSecond});
  SetView({Node(0), Node(1), Node(2)});
  announcer.SetView(view_);
  for (std::size_t run = 0; run < 300; ++run) announcer.Set(Said(run, 10));
  Run(kSimSecond);
  EXPECT_EQ(announcer.untold(), 0u);
  EXPECT_EQ(peers_.announcements_heard, 600u);
  const auto right = [&] {
    std::size_t pointers = 0;
    for (const auto& [id, known] : peers_.announced) pointers += known.size();
    for (std::size_t run = 0; run < 300; ++run) {
      for (const std::size_t rank : {0, 1}) {
        if (!peers_.announced[HomeOf(run, rank)].contains(HashOf(run))) return false;
      }
    }
    return pointers == 600u;
  };
  EXPECT_TRUE(right());
  // A node comes: only what it is home of is told, and taken back elsewhere a while later.
  SetView({Node(0), Node(1), Node(2), Node(3)});
  announcer.SetView(view_);
  Run(kSimSecond);
  const std::size_t moved = peers_.announced["node-3"].size();
  EXPECT_GT(moved, 0u);
  EXPECT_EQ(peers_.announcements_heard, 600 + moved);
  EXPECT_FALSE(right());
  Run(5 * kSimSecond);
  EXPECT_TRUE(right());
  EXPECT_EQ(peers_.announcements_heard, 600 + 2 * moved);
}

TEST_F(AnnouncerTest, DigestsFindWhatAHomeDoesNotKnow) {
  Announcer announcer(loop_, peers_, health_,
                      {.self_id = "self",
                       .copies = 1,
                       .tick_nanos = 10 * kSimMs,
                       .repeat_nanos = 1000 * kSimSecond,
                       .compare_nanos = 10 * kSimSecond,
                       .withdraw_nanos = 2 * kSimSecond});
  SetView({Node(0), Node(1), Node(2)});
  announcer.SetView(view_);
  for (std::size_t run = 0; run < 300; ++run) announcer.Set(Said(run, 10));
  Run(10 * kSimSecond);
  for (std::size_t run = 0; run < 50; ++run) announcer.Set(Said(run, 0));
  for (std::size_t run = 50; run < 90; ++run) announcer.Set(Said(run, 4));
  Run(10 * kSimSecond);
  SetView({Node(0), Node(1), Node(3)});
  announcer.SetView(view_);
  Run(60 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 0u) << "they agree, whatever changed";
  EXPECT_GE(peers_.compared["node-1"], 5u);

  // A home lost some, and believes in one that is none.
  const auto before = peers_.announced["node-1"];
  peers_.announced["node-1"].erase(peers_.announced["node-1"].begin());
  peers_.announced["node-1"][std::uint64_t{0xff} << 56] = Places(3);
  Run(11 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 2u);
  EXPECT_EQ(peers_.announced["node-1"], before);
  Run(60 * kSimSecond);
  EXPECT_EQ(announcer.differed(), 2u);

  // One that never agrees is asked less and less often.
  peers_.scripts["node-1"].differ = 1;
  const std::size_t compared = peers_.compared["node-1"];
  Run(700 * kSimSecond);
  EXPECT_LE(peers_.compared["node-1"], compared + 7);
}

TEST_F(AnnouncerTest, APointerTableKnowsItsDigests) {
  Digests said = {};
  const auto say = [&](std::size_t run, std::size_t before, std::size_t now) {
    said[DigestOf(HashOf(run))] ^= DigestWord(Said(run, before)) ^ DigestWord(Said(run, now));
    pointers_.Announced(Node(1), {Said(run, now)});
  };
  SetView({Node(0), Node(1), Node(2)});
  for (std::size_t run = 0; run < 200; ++run) say(run, 0, 5);
  for (std::size_t run = 0; run < 200; run += 3) say(run, 5, 7);
  for (std::size_t run = 0; run < 200; run += 5) say(run, run % 3 == 0 ? 7 : 5, 0);
  pointers_.Announced(Node(2), {Said(1, 9)});
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  EXPECT_EQ(pointers_.HoldersOf(HashOf(1))[0].sketch, Said(1, 9).sketch);
  EXPECT_EQ(pointers_.HoldersOf(HashOf(3))[0].sketch, Said(3, 7).sketch);
  // As many blocks, and other ones.
  Announcement others = Said(1, 5);
  others.sketch.sum ^= 1;
  pointers_.Announced(Node(1), {others});
  EXPECT_EQ(pointers_.Compare(Node(1), said), std::uint64_t{1} << DigestOf(HashOf(1)));
  pointers_.Announced(Node(1), {Said(1, 5)});
  said[DigestOf(HashOf(1))] = DigestWord(Said(1, 5));
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);

  Digests other = said;
  other[DigestOf(HashOf(1))] ^= 1;
  EXPECT_EQ(pointers_.Compare(Node(1), other), std::uint64_t{1} << DigestOf(HashOf(1)));
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(2)) << "believed until node 1 told again";
  Run(PointerTable::kForgetNanos);
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(1)) << "which it did not";
  EXPECT_EQ(pointers_.HoldersOf(HashOf(1))[0].id, "node-2");
  said[DigestOf(HashOf(1))] = 0;
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  say(1, 0, 5);
  EXPECT_EQ(pointers_.Compare(Node(1), said), 0u);
  EXPECT_THAT(pointers_.HoldersOf(HashOf(1)), SizeIs(2));

  // docs/formats.md
  EXPECT_EQ(DigestWord(0x0123456789abcdef, 32, 0xfedcba9876543210), 0xcd5e6250bffbbb37u);
  EXPECT_EQ(DigestWord(0x0123456789abcdef, 0, 0), 0u);
}

TEST(ValidRunsTest, OnlyWhatWasAskedForAndCanBe) {
  HeldRun good{.anchor_hash = HashOf(1),
               .fingerprint = kFingerprint,
               .blocks = {.anchor = Key(1, 0), .keys = {Key(1, 0), Key(1, 1)}, .places = {0, 1}},
               .bytes = 2000};
  const std::vector<RunList> asked = {{HashOf(1)}, {HashOf(2)}};
  EXPECT_TRUE(ValidRuns(asked, {}));
  EXPECT_TRUE(ValidRuns(asked, {good}));
  EXPECT_FALSE(ValidRuns(asked, {good, good}));
  EXPECT_FALSE(ValidRuns({{HashOf(2)}}, {good}));
  // All were skipped: there are no more.
  HeldRun end = good;
  end.blocks.keys.clear();
  end.blocks.places.clear();
  EXPECT_TRUE(ValidRuns({{HashOf(1), 1, 77}}, {end}));
  end.more = true;
  EXPECT_FALSE(ValidRuns({{HashOf(1), 1, 77}}, {end}));
  const auto refused = [&](const std::function<void(HeldRun*)>& change) {
    HeldRun run = good;
    change(&run);
    return !ValidRuns(asked, {run});
  };
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.anchor = Key(2, 0); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.anchor = BlockKey(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->fingerprint[0] = std::byte{1}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys.pop_back(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys[1] = BlockKey(); }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.keys[1] = run->blocks.keys[0]; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.places = {1, 0}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->blocks.places = {1, 32}; }));
  EXPECT_TRUE(refused([](HeldRun* run) { run->bytes = 1; }));
  EXPECT_TRUE(refused([](HeldRun* run) {
    run->blocks.keys.clear();
    run->blocks.places.clear();
  }));
  EXPECT_TRUE(refused([](HeldRun* run) {
    for (std::size_t i = 2; i <= kListKeysMax; ++i) {
      run->blocks.keys.push_back(Key(1, i));
      run->blocks.places.push_back(31);
    }
    run->bytes = 1 << 20;
  }));
}

}  // namespace
}  // namespace kvmill
