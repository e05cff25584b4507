// Bringing blocks run by run: who is asked, what is remembered, what is waited for, and when it is
// over.
#include "service/cluster/block_bringer.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "tests/cluster/fetch_path_fixture.h"

namespace kvmill {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
constexpr std::int64_t kTimeout = 20 * kSimSecond;

class BlockBringerTest : public FetchPathTest {
 protected:
  void SetUp() override { SetView(10); }

  // What `progress` was told, and when last.
  struct Told {
    std::vector<std::size_t> settled;
    std::int64_t at = 0;
    bool wants_more = true;
  };
  std::shared_ptr<Told> Bring(const std::vector<BlockKey>& keys, std::uint64_t first_block = 0,
                              const BlockKey& anchor = {}, const std::string& hint = "",
                              std::int64_t timeout = kTimeout) {
    const auto told = std::make_shared<Told>();
    const std::int64_t now = loop_.clock().MonotonicNanos();
    bringer_.Start({.keys = keys,
                    .missing = std::vector<bool>(keys.size(), true),
                    .first_block = first_block,
                    .anchor = anchor,
                    .hint = hint,
                    .deadline_nanos = now + timeout},
                   [this, told, now](std::size_t settled) {
                     told->settled.push_back(settled);
                     told->at = loop_.clock().MonotonicNanos() - now;
                     return told->wants_more;
                   });
    EXPECT_THAT(told->settled, IsEmpty()) << "within the call";
    return told;
  }
  void GiveHome(const std::vector<BlockKey>& keys) {
    for (const RunQuery& query : Queries(keys)) Give(HomeOf(query.anchor, 0), query.keys);
  }
  std::size_t Pulls() const {
    return static_cast<std::size_t>(
        std::count_if(peers_.asked.begin(), peers_.asked.end(),
                      [](const std::string& a) { return a.find(" for ") != a.npos; }));
  }
  std::size_t Questions() const { return peers_.asked.size() - Pulls(); }
  void ExpectNothingLeft() {
    EXPECT_EQ(bringer_.running() + bringer_.flights(), 0u);
    EXPECT_EQ(lookup_.running() + fetch_.running(), 0u);
    EXPECT_EQ(peers_.open, 0);
  }
  static std::vector<BlockKey> Part(const std::vector<BlockKey>& keys, std::size_t first,
                                    std::size_t count) {
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(first);
    return {begin, begin + static_cast<std::ptrdiff_t>(count)};
  }

  SourceTable sources_{loop_.clock(), {.blocks_max = 1000, .life_nanos = 60 * kSimSecond}};
  BlockBringer bringer_{loop_, lookup_, fetch_, sources_, {}};
};

TEST_F(BlockBringerTest, RunsComeInOrderAFewAtATime) {
  const std::vector<BlockKey> keys = Keys(200);
  GiveHome(keys);
  const auto told = Bring(keys);
  Run(kSimSecond);
  ASSERT_THAT(told->settled, Contains(200u));
  EXPECT_TRUE(std::is_sorted(told->settled.begin(), told->settled.end()));
  EXPECT_EQ(told->settled.back(), 200u);
  EXPECT_THAT(told->settled, Contains(32u));
  EXPECT_EQ(Pulls(), 7u);
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, OnlyWhatIsMissingIsPulled) {
  const std::vector<BlockKey> keys = Keys(8);
  GiveHome(keys);
  std::vector<bool> missing(8, false);
  missing[2] = missing[5] = true;
  std::vector<std::size_t> settled;
  bringer_.Start({.keys = keys,
                  .missing = missing,
                  .deadline_nanos = loop_.clock().MonotonicNanos() + kTimeout},
                 [&](std::size_t count) {
                   settled.push_back(count);
                   return true;
                 });
  Run(kSimSecond);
  EXPECT_EQ(settled.back(), 8u);
  EXPECT_EQ(settled.front(), 2u) << "those before are here";
  EXPECT_THAT(peers_.pulled.keys, ElementsAre(keys[2], keys[5]));
  EXPECT_THAT(peers_.pulled.places, ElementsAre(2, 5));
  EXPECT_EQ(peers_.pulled.anchor, keys[0]);
}

TEST_F(BlockBringerTest, WhatALookupFoundIsNotLookedUpAgain) {
  const std::vector<BlockKey> keys = Keys(64);
  sources_.Remember({}, Queries(keys)[0], {{.member = Node(7), .told = true, .blocks = ~0u}});
  sources_.Remember({}, Queries(keys)[1], {{.member = Node(8), .told = true, .blocks = ~0u}});
  Give("node-7", Part(keys, 0, 32));
  Give("node-8", Part(keys, 32, 32));
  // From the middle, although nobody says where that is.
  const auto told = Bring(Part(keys, 20, 30));
  Run(kSimSecond);
  EXPECT_EQ(told->settled.back(), 30u);
  EXPECT_THAT(peers_.asked, ElementsAre("node-7 for 12", "node-8 for 18"));
  EXPECT_EQ(peers_.pulled.anchor, keys[32]);
  EXPECT_EQ(peers_.pulled.places.front(), 0);
}

TEST_F(BlockBringerTest, WhereItIsNoMoreALookupFindsItElsewhere) {
  const std::vector<BlockKey> keys = Keys(4);
  // One that is no home, and has nothing.
  const std::string before = HomeOf(keys[0], kRanks - 1);
  sources_.Remember({}, Queries(keys)[0],
                    {{.member = view_->members()[*view_->IndexOf(before)], .blocks = 0xf}});
  GiveHome(keys);
  Bring(keys);
  Run(kSimSecond);
  EXPECT_EQ(peers_.asked.front(), before + " for 4");
  EXPECT_GE(Questions(), 1u);
  EXPECT_EQ(Pulls(), 2u);
  EXPECT_EQ(sources_.Find({}, keys[0]).run, nullptr) << "it was wrong";
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, TheAnchorOrTheHintFindsTheMiddleOfARun) {
  const std::vector<BlockKey> keys = Keys(32);
  GiveHome(keys);
  Bring(Part(keys, 20, 4), 20, keys[0]);
  Run(kSimSecond);
  EXPECT_EQ(Pulls(), 1u);
  EXPECT_THAT(peers_.pulled.places, ElementsAre(20, 21, 22, 23));
  peers_.asked.clear();
  Give("node-5", keys);
  Bring(Part(keys, 8, 2), 8, {}, "node-5");
  Run(kSimSecond);
  EXPECT_THAT(peers_.asked, ElementsAre("node-5", "node-5 for 2"));
  EXPECT_TRUE(peers_.pulled.anchor.empty());
  peers_.asked.clear();
  const auto told = Bring(Part(keys, 8, 2), 8);
  Run(kSimSecond);
  EXPECT_THAT(peers_.asked, IsEmpty()) << "nobody knows whom to ask";
  EXPECT_THAT(told->settled, ElementsAre(2));
}

TEST_F(BlockBringerTest, WhatIsOnItsWayIsWaitedFor) {
  const std::vector<BlockKey> keys = Keys(8);
  GiveHome(keys);
  peers_.scripts[HomeOf(keys[0], 0)].delay = 8 * kSimMs;
  const auto first = Bring(Part(keys, 0, 6));
  Run(kSimMs);
  const auto second = Bring(Part(keys, 4, 4), 4, keys[0]);
  const auto third = Bring(Part(keys, 0, 2));
  Run(kSimSecond);
  for (const auto& told : {first, second, third}) EXPECT_THAT(told->settled, SizeIs(1));
  std::size_t pulled = 0;
  for (const std::string& asked : peers_.asked) {
    if (asked.find(" for ") != asked.npos) pulled += static_cast<std::size_t>(asked.back() - '0');
  }
  EXPECT_EQ(pulled, 8u) << "each block once";
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, WhatDoesNotComeIsAMissAtTheDeadline) {
  const std::vector<BlockKey> keys = Keys(64);
  GiveHome(keys);
  for (std::size_t i = 0; i < 10; ++i) peers_.scripts["node-" + std::to_string(i)].silent = true;
  sources_.Remember({}, Queries(keys)[0], {{.member = Node(7), .told = true, .blocks = ~0u}});
  const auto told = Bring(keys, 0, {}, "", kSimSecond);
  // Waits for the first one's flight, and not longer than it may.
  const auto brief = Bring(Part(keys, 0, 4), 0, {}, "", 300 * kSimMs);
  Run(5 * kSimSecond);
  ASSERT_THAT(told->settled, Contains(64u));
  EXPECT_EQ(told->settled.back(), 64u);
  EXPECT_EQ(told->at, kSimSecond);
  EXPECT_THAT(brief->settled, ElementsAre(4));
  EXPECT_EQ(brief->at, 300 * kSimMs);
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, WhoIsStoppedIsGivenUpLongBeforeTheDeadline) {
  const std::vector<BlockKey> keys = Keys(4);
  sources_.Remember({}, Queries(keys)[0], {{.member = Node(7), .told = true, .blocks = 0xf}});
  peers_.scripts["node-7"].silent = true;
  const auto told = Bring(keys);
  Run(kTimeout);
  EXPECT_THAT(told->settled, ElementsAre(4));
  EXPECT_LT(told->at, 3 * kSimSecond);
}

TEST_F(BlockBringerTest, WhileASourceIsSilentOthersAreLookedFor) {
  const std::vector<BlockKey> keys = Keys(4);
  const std::string home = HomeOf(keys[0], 0);
  std::size_t stopped = 0;
  while (Node(stopped).id == home) ++stopped;
  sources_.Remember({}, Queries(keys)[0], {{.member = Node(stopped), .told = true, .blocks = 0xf}});
  peers_.scripts[Node(stopped).id].silent = true;
  GiveHome(keys);
  const auto told = Bring(keys);
  Run(kTimeout);
  EXPECT_THAT(told->settled, ElementsAre(4));
  EXPECT_LT(told->at, 400 * kSimMs);
  EXPECT_EQ(peers_.asked.back(), home + " for 4");
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, AllEndsAtOnceWhenNobodyIsToWait) {
  const std::vector<BlockKey> keys = Keys(64);
  sources_.Remember({}, Queries(keys)[0], {{.member = Node(7), .told = true, .blocks = ~0u}});
  for (std::size_t i = 0; i < 10; ++i) peers_.scripts[Node(i).id].silent = true;
  const auto first = Bring(keys), second = Bring(Part(keys, 0, 4));
  Run(10 * kSimMs);
  EXPECT_EQ(bringer_.running(), 2u);
  bringer_.EndAll();
  EXPECT_THAT(first->settled, ElementsAre(64));
  EXPECT_THAT(second->settled, ElementsAre(4));
  Run(kSimSecond);
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, WhoWantsNoMoreGetsNoMore) {
  const std::vector<BlockKey> keys = Keys(32 * 8);
  GiveHome(keys);
  const auto told = Bring(keys);
  told->wants_more = false;
  Run(kSimSecond);
  EXPECT_THAT(told->settled, SizeIs(1));
  EXPECT_LE(Pulls(), BlockBringer::kPartsAtOnce);
  ExpectNothingLeft();
}

TEST_F(BlockBringerTest, TheTableOfSourcesForgets) {
  const std::vector<BlockKey> keys = Keys(1200);
  for (const RunQuery& query : Queries(keys)) {
    sources_.Remember({}, query, {{.member = Node(1), .blocks = 1}});
  }
  EXPECT_LE(sources_.blocks(), 1000u);
  EXPECT_EQ(sources_.Find({}, keys[0]).run, nullptr);
  const SourceTable::Found last = sources_.Find({}, keys[1199]);
  ASSERT_NE(last.run, nullptr);
  EXPECT_EQ(last.run->query.keys[last.index], keys[1199]);
  Fingerprint another{};
  another[0] = std::byte{1};
  EXPECT_EQ(sources_.Find(another, keys[1199]).run, nullptr);
  sources_.Forget({}, keys[1199]);
  EXPECT_EQ(sources_.Find({}, keys[1199]).run, nullptr);
  EXPECT_NE(sources_.Find({}, keys[1198]).run, nullptr);
  Run(61 * kSimSecond);
  EXPECT_EQ(sources_.Find({}, keys[1198]).run, nullptr);
}

}  // namespace
}  // namespace kvmill
