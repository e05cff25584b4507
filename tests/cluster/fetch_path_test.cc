// The parts of the fetch path, each with peers that do exactly what the test says; cluster_sim has
// them all together while everything goes wrong.
#include <gmock/gmock.h>

#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "service/cluster/announcer.h"
#include "service/cluster/pointer_table.h"
#include "tests/cluster/fetch_path_fixture.h"
#include "tests/cluster/sketches.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(FetchPathTest, APromptOf256BlocksCallsItsHomesOnce) {
  SetView(100);
  const std::vector<BlockKey> keys = Keys(256);
  std::set<std::string> homes;
  for (const RunQuery& query : Queries(keys)) {
    homes.insert(HomeOf(query.anchor, 0));
    Give(HomeOf(query.anchor, 0), query.keys);
  }
  Look(keys);
  EXPECT_FALSE(found_.has_value());
  Run(2 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_LE(peers_.asked.size(), 8u);
  EXPECT_EQ(std::set(peers_.asked.begin(), peers_.asked.end()), homes);
  EXPECT_EQ(peers_.asked.size(), homes.size());
  for (const RemoteLookup::Run& run : *found_) {
    EXPECT_EQ(run.covered, ~0u);
    EXPECT_THAT(run.sources, SizeIs(1));
  }
  EXPECT_EQ(lookup_.running() + lookup_.calls(), 0u);
}

TEST_F(FetchPathTest, WhatIsHereAsksNobody) {
  SetView(10);
  local_.present = 0xf;
  Look(Keys(4));
  Run(0);
  ASSERT_TRUE(found_.has_value());
  EXPECT_TRUE((*found_)[0].sources[0].self);
  EXPECT_THAT(peers_.asked, IsEmpty());
}

TEST_F(FetchPathTest, TheHintIsAskedFirstAndHomesForTheRest) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(40);
  Give("node-3", absl::MakeConstSpan(keys).first(32));
  const std::string home = HomeOf(keys[32], 0);
  peers_.scripts[home].knows[AnchorHash(Fingerprint{}, keys[32])] = {
      {"node-4", "first life", 0x1f}, {"node-5", "another life", 0xff}, {"stranger", "", 0xff}};
  Look(keys, "node-3");
  Run(10 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_EQ(peers_.asked[0], "node-3");
  EXPECT_EQ(peers_.asked[1], home);
  EXPECT_EQ((*found_)[0].covered, ~0u);
  EXPECT_EQ((*found_)[1].covered, 0x1fu) << "who is not known, or lived before, has nothing";
  EXPECT_EQ((*found_)[1].sources[0].member.id, "node-4");
  EXPECT_FALSE((*found_)[1].sources[0].told);
}

TEST_F(FetchPathTest, AMissAsksTwoRanksAndNoMore) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(3);
  Look(keys);
  Run(10 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_EQ((*found_)[0].covered, 0u);
  EXPECT_THAT(peers_.asked, ElementsAre(HomeOf(keys[0], 0), HomeOf(keys[0], 1)));
}

TEST_F(FetchPathTest, ASilentHomeIsOvertakenThenLeftAlone) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(3);
  const std::string first = HomeOf(keys[0], 0), second = HomeOf(keys[0], 1);
  peers_.scripts[first].silent = true;
  Give(second, keys);
  for (int i = 0; i < 3; ++i) {
    Look(keys);
    Run(PeerHealth::kHedgeFirstNanos + 3 * kSimMs);
    ASSERT_TRUE(found_.has_value()) << i;
    EXPECT_EQ((*found_)[0].covered, 7u);
  }
  EXPECT_EQ(lookup_.running(), 0u);
  EXPECT_EQ(lookup_.calls(), 3u) << "those that were overtaken are heard out";
  Run(200 * kSimMs);
  EXPECT_EQ(lookup_.calls(), 0u);
  peers_.asked.clear();
  Look(keys);
  Run(2 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_THAT(peers_.asked, ElementsAre(second));
}

TEST_F(FetchPathTest, EverybodyIsAskedWhenPeopleWantToKnow) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(3);
  const std::string home = HomeOf(keys[0], 0), next = HomeOf(keys[0], 1);
  std::size_t other = 0;
  while (Node(other).id == home || Node(other).id == next) ++other;
  local_.present = 0x7;
  Give(next, keys);
  peers_.scripts[home].knows[AnchorHash(Fingerprint{}, keys[0])] = {
      {Node(other).id, "first life", 0x7}};
  std::vector<RemoteLookup::Source> sources;
  lookup_.Start({.runs = Queries(keys),
                 .everybody = true,
                 .deadline_nanos = loop_.clock().MonotonicNanos() + kSimSecond},
                [&](std::vector<RemoteLookup::Run> found) { sources = found[0].sources; });
  Run(100 * kSimMs);
  ASSERT_THAT(sources, SizeIs(3));
  EXPECT_TRUE(sources[0].self && sources[0].told);
  EXPECT_EQ(sources[1].member.id, next);
  EXPECT_TRUE(sources[1].told);
  EXPECT_EQ(sources[2].member.id, Node(other).id);
  EXPECT_FALSE(sources[2].told);
}

TEST_F(FetchPathTest, LookupsEndAtOnceWhenNobodyIsToWait) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(3);
  for (std::size_t i = 0; i < 10; ++i) peers_.scripts[Node(i).id].silent = true;
  local_.present = 0x1;
  Look(keys);
  Run(10 * kSimMs);
  EXPECT_FALSE(found_.has_value());
  lookup_.CompleteAll();
  ASSERT_TRUE(found_.has_value());
  EXPECT_EQ((*found_)[0].covered, 0x1u);
  Run(kSimSecond);
  EXPECT_EQ(lookup_.running() + lookup_.calls(), 0u);
}

TEST_F(FetchPathTest, AnswersThatCannotBeAreNotBelieved) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(3);
  const std::string first = HomeOf(keys[0], 0), second = HomeOf(keys[0], 1);
  Give(first, keys);
  peers_.scripts[first].answers_too_many = 1;
  Give(second, keys);
  Look(keys);
  Run(10 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  ASSERT_THAT((*found_)[0].sources, SizeIs(1));
  EXPECT_EQ((*found_)[0].sources[0].member.id, second);
  EXPECT_EQ(health_.paused_count(), 1u);

  const std::vector<RunQuery> queries = Queries(keys);
  EXPECT_TRUE(ValidAnswer(queries, {{7, {{"a", "b", 5, 2}}}}));
  EXPECT_FALSE(ValidAnswer(queries, {}));
  EXPECT_FALSE(ValidAnswer(queries, {{8, {}}}));
  EXPECT_FALSE(ValidAnswer(queries, {{7, {{"a", "b", 8, 0}}}}));
  EXPECT_FALSE(ValidAnswer(queries, {{7, {{"a", "b", 0, 8}}}}));
  EXPECT_FALSE(ValidAnswer(queries, {{7, {{"a", "b", 1, 3}}}})) << "it has it, or perhaps";
  EXPECT_FALSE(ValidAnswer(queries, {{7, std::vector<Pointer>(17, {"a", "b", 1, 0})}}));
}

TEST_F(FetchPathTest, ALookupEndsAtItsDeadlineOrIsCancelled) {
  SetView(10);
  for (std::size_t i = 0; i < 10; ++i) peers_.scripts[Node(i).id].silent = true;
  Look(Keys(256), "", 50 * kSimMs);
  Run(49 * kSimMs);
  EXPECT_FALSE(found_.has_value());
  Run(kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_THAT(*found_, SizeIs(8));
  const auto op = Look(Keys(1));
  lookup_.Cancel(op);
  Run(kSimSecond);
  EXPECT_FALSE(found_.has_value());
  EXPECT_EQ(lookup_.calls(), 0u);
  EXPECT_EQ(peers_.open, 0);
}

TEST_F(FetchPathTest, ABadOrMissingCopyIsTriedElsewhereAndThenIsAMiss) {
  const std::vector<BlockKey> keys = Keys(4);
  Give("node-0", {keys[0]});
  peers_.scripts["node-0"].corrupt.insert("key-1");
  Give("node-1", keys);
  peers_.scripts["node-1"].corrupt.insert("key-3");
  EXPECT_EQ(Fetch(keys, {{0, 0xf}, {1, 0xf}}), 0x7u);
  EXPECT_THAT(peers_.asked, ElementsAre("node-0 for 4", "node-1 for 3"));
}

TEST_F(FetchPathTest, BlocksOfASourceThatFailsAreAskedOfTheOthers) {
  const std::vector<BlockKey> keys = Keys(4);
  peers_.scripts["node-0"].silent = true;
  Give("node-1", keys);
  Give("node-2", keys);
  EXPECT_EQ(Fetch(keys, {{0, 0x3}, {1, 0xe}, {2, 0x1}}), 0xfu);
  // What is pulled says where in its run it lies.
  EXPECT_EQ(Fetch(keys, {{1, 0xc}}), 0xcu);
  EXPECT_EQ(peers_.pulled.anchor, keys[0]);
  EXPECT_THAT(peers_.pulled.keys, ElementsAre(keys[2], keys[3]));
  EXPECT_THAT(peers_.pulled.places, ElementsAre(5, 6));
  EXPECT_EQ(Fetch(keys, {}), 0u);
  peers_.scripts["node-2"].answers_too_many = 1;
  EXPECT_EQ(Fetch(keys, {{2, 0xf}}), 0u);
}

TEST_F(FetchPathTest, ASilentSourceIsOvertaken) {
  const std::vector<BlockKey> keys = Keys(4);
  Give("node-1", keys);
  Give("node-2", keys);
  peers_.scripts["node-1"].silent = true;
  std::optional<std::int64_t> at;
  std::uint32_t have = 0;
  const auto fetch = [&](std::vector<std::size_t> nodes) {
    RemoteFetch::Request request{
        .keys = keys,
        .call_nanos = 2 * kSimSecond,
        .deadline_nanos = loop_.clock().MonotonicNanos() + 10 * kSimSecond};
    for (const std::size_t node : nodes) {
      request.sources.push_back({.member = Node(node), .blocks = 0xf});
    }
    at.reset();
    fetch_.Start(std::move(request), [&, now = events_.now()](std::uint32_t bits) {
      at = events_.now() - now;
      have = bits;
    });
    Run(10 * kSimSecond);
    EXPECT_TRUE(at.has_value());
    EXPECT_EQ(fetch_.running(), 0u);
    EXPECT_EQ(peers_.open, 0);
    return at.value_or(0);
  };
  EXPECT_LT(fetch({1, 2}), 300 * kSimMs);
  EXPECT_EQ(have, 0xfu);
  EXPECT_THAT(peers_.asked, ElementsAre("node-1 for 4", "node-1", "node-2 for 4"));

  // One that takes long and answers is waited for, and nobody sends the bytes twice.
  peers_.asked.clear();
  peers_.scripts["node-3"].pull_delay = kSimSecond;
  Give("node-3", keys);
  EXPECT_GE(fetch({3, 2}), kSimSecond);
  EXPECT_EQ(have, 0xfu);
  EXPECT_EQ(std::count(peers_.asked.begin(), peers_.asked.end(), "node-2 for 4"), 0);
  const auto questions = std::count(peers_.asked.begin(), peers_.asked.end(), "node-3");
  EXPECT_GE(questions, 2);
  EXPECT_LE(questions, 6);
  // Nobody else has it: the silent one has its time.
  EXPECT_GE(fetch({1}), 2 * kSimSecond);
  EXPECT_EQ(have, 0u);
}

TEST_F(FetchPathTest, PausesDoubleAndAreForgotten) {
  const Member peer = Node(1);
  using Fault = PeerHealth::Fault;
  std::int64_t pause = PeerHealth::kPauseMinNanos;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(health_.Admit(peer));
    health_.Failed(peer, Fault::kFailed);
  }
  for (int i = 0; i < 12; ++i) {
    EXPECT_FALSE(health_.Admit(peer));
    Run(pause - kSimMs);
    EXPECT_FALSE(health_.Admit(peer)) << i;
    Run(kSimMs);
    EXPECT_TRUE(health_.Admit(peer)) << "the probe";
    EXPECT_FALSE(health_.Admit(peer)) << "one probe at a time";
    health_.Failed(peer, Fault::kFailed);
    pause = std::min(2 * pause, PeerHealth::kPauseMaxNanos);
  }
  EXPECT_EQ(pause, PeerHealth::kPauseMaxNanos);
  Run(pause);
  EXPECT_TRUE(health_.Admit(peer));
  Run(kSimSecond);
  EXPECT_TRUE(health_.Admit(peer)) << "the probe told nothing";
  health_.Succeeded(peer);
  EXPECT_TRUE(health_.Admit(peer));
  EXPECT_TRUE(health_.Admit(peer));
  Run(PeerHealth::kForgiveNanos + kSimSecond);
  health_.Failed(peer, Fault::kLied);
  EXPECT_FALSE(health_.Admit(peer));
  Run(PeerHealth::kPauseMinNanos);
  EXPECT_TRUE(health_.Admit(peer));

  Member restarted = peer;
  restarted.incarnation = "second life";
  EXPECT_TRUE(health_.Admit(restarted));
  health_.Keep(**ClusterView::Make({restarted}, 1, 4, nullptr));
  EXPECT_EQ(health_.size(), 1u);
  health_.Failed(peer, Fault::kLied);  // Of a call from before: it is not known any more.
  EXPECT_EQ(health_.size(), 1u);
}

TEST_F(FetchPathTest, TheHedgeFollowsWhatPeersTake) {
  EXPECT_EQ(health_.HedgeNanos(Node(1)), PeerHealth::kHedgeFirstNanos);
  health_.Admit(Node(1));
  for (int i = 0; i < 100; ++i) health_.Measured(Node(1), 3 * kSimMs + i % 2 * kSimMs);
  EXPECT_GT(health_.HedgeNanos(Node(1)), 4 * kSimMs);
  EXPECT_LT(health_.HedgeNanos(Node(1)), 7 * kSimMs);
  EXPECT_EQ(health_.HedgeNanos(Node(2)), health_.HedgeNanos(Node(1))) << "not known: as anyone";
  for (int i = 0; i < 100; ++i) health_.Measured(Node(1), 10 * kSimSecond);
  EXPECT_EQ(health_.HedgeNanos(Node(1)), PeerHealth::kHedgeMaxNanos);
}

TEST_F(FetchPathTest, AHomeNamesWhoSurelyHasBlocksAndWhoMay) {
  PointerTable table(loop_.clock(), {});
  const std::vector<BlockKey> keys = Keys(6);
  const std::uint64_t anchor = AnchorHash(Fingerprint{}, keys[0]);
  // A sequence that parts from the query's at `place`, up to place 6.
  const auto said = [&](std::size_t place, bool both) {
    std::vector<std::pair<std::size_t, std::uint64_t>> blocks;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (i < place || both) blocks.emplace_back(i, KeyHash(Fingerprint{}, keys[i]));
      if (i >= place) blocks.emplace_back(i, 1000 + i);
    }
    return Announcement{anchor, SketchOfBlocks(blocks)};
  };
  table.Announced(Node(1), {said(2, false)});
  table.Announced(Node(2), {said(5, false)});
  table.Announced(Node(3), {said(3, true)});
  RunQuery query{.anchor = keys[0], .first = 0, .keys = keys};
  const auto pointers = [&](std::uint32_t wanted) {
    std::vector<std::string> list;
    for (const Pointer& pointer : table.PointersTo(Fingerprint{}, query, wanted)) {
      list.push_back(absl::StrCat(pointer.holder, " ", absl::Hex(pointer.blocks), " ",
                                  absl::Hex(pointer.perhaps)));
    }
    return list;
  };
  EXPECT_THAT(pointers(0x3f), ElementsAre("node-2 1f 0", "node-3 7 38", "node-1 3 0"));
  EXPECT_THAT(pointers(0x18), ElementsAre("node-2 18 0")) << "nobody need be asked";
  EXPECT_THAT(pointers(0x30), ElementsAre("node-2 10 0", "node-3 0 30"));
  EXPECT_THAT(pointers(0), IsEmpty());
  query.first = 1;
  query.keys.erase(query.keys.begin());
  EXPECT_THAT(pointers(0x1f), ElementsAre("node-2 f 0", "node-3 3 1c", "node-1 1 0"));
  query.anchor = BlockKey();
  EXPECT_THAT(pointers(0x1f), IsEmpty());

  // Many have all of it: four are enough. Many may have the rest: all that are known.
  query = {.anchor = keys[0], .first = 0, .keys = keys};
  for (std::size_t i = 10; i < 20; ++i) table.Announced(Node(i), {said(6, false)});
  EXPECT_THAT(pointers(0x3f), SizeIs(4));
  for (std::size_t i = 10; i < 20; ++i) table.Announced(Node(i), {said(4, true)});
  EXPECT_THAT(pointers(0x3f), SizeIs(12)) << "node 2, those ten, and node 3";
}

// Sequences part within the run: the home cannot tell who has this one, and those who can are asked
// together.
TEST_F(FetchPathTest, WhoMayHaveBlocksIsAskedBeforeItCounts) {
  SetView(10);
  const std::vector<BlockKey> keys = Keys(8);
  const std::string home = HomeOf(keys[0], 0), next = HomeOf(keys[0], 1);
  std::vector<std::string> others;
  for (std::size_t i = 0; others.size() < 3; ++i) {
    if (Node(i).id != home && Node(i).id != next) others.push_back(Node(i).id);
  }
  std::vector<Pointer>& knows = peers_.scripts[home].knows[AnchorHash(Fingerprint{}, keys[0])];
  knows = {{others[0], "first life", 0x0f, 0xf0},
           {others[1], "first life", 0x0f, 0xf0},
           {others[2], "another life", 0x0f, 0xf0}};
  for (const std::string& other : {others[0], others[1]}) {
    Give(other, absl::MakeConstSpan(keys).first(4));
  }
  Give(others[1], absl::MakeConstSpan(keys).first(7));
  Look(keys);
  Run(10 * kSimMs);
  ASSERT_TRUE(found_.has_value());
  EXPECT_EQ((*found_)[0].covered, 0x7fu) << "nobody has the last one";
  EXPECT_THAT(peers_.asked, ElementsAre(home, others[0], others[1], next));
  for (const RemoteLookup::Source& source : (*found_)[0].sources) EXPECT_TRUE(source.told);

  // Had one all of it, nobody else would be asked, but those who were asked with it.
  Give(others[0], keys);
  peers_.asked.clear();
  Look(keys);
  Run(10 * kSimMs);
  EXPECT_EQ((*found_)[0].covered, 0xffu);
  EXPECT_THAT(peers_.asked, ElementsAre(home, others[0], others[1]));

  // What this node knows as a home counts likewise, and the hint is asked with them.
  local_.pointers = knows;
  peers_.asked.clear();
  Look(keys, others[2]);
  Run(10 * kSimMs);
  EXPECT_EQ((*found_)[0].covered, 0xffu);
  EXPECT_THAT(peers_.asked, ::testing::UnorderedElementsAre(others[0], others[1], others[2]));

  // Where the run is known for sure nobody is asked twice.
  local_.pointers = {{others[0], "first life", 0xff, 0}, {others[1], "first life", 0x0f, 0xf0}};
  peers_.asked.clear();
  Look(keys);
  Run(10 * kSimMs);
  EXPECT_EQ((*found_)[0].covered, 0xffu);
  EXPECT_THAT(peers_.asked, IsEmpty());
}

TEST_F(FetchPathTest, PointersAreBoundedAndDie) {
  PointerTable table(loop_.clock(), {.anchors_max = 3, .life_nanos = 10 * kSimSecond});
  RunSketch wrong = Places(32);
  wrong.count = 33;
  for (std::size_t i = 0; i < 20; ++i) {
    table.Announced(Node(i), {{7, Places(i)}, {8, wrong}, {9, Places(3, i)}});
  }
  const auto counts = [&](std::uint64_t hash) {
    std::vector<int> list;
    for (const PointerTable::Holder& holder : table.HoldersOf(hash)) {
      list.push_back(holder.sketch.count);
    }
    return list;
  };
  EXPECT_THAT(counts(7), ElementsAre(19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4))
      << "0 is none, and sixteen are enough";
  EXPECT_THAT(counts(8), IsEmpty());
  EXPECT_THAT(counts(9), SizeIs(16));
  EXPECT_EQ(table.HoldersOf(9)[0].id, "node-19") << "later ones first";
  for (std::size_t i = 6; i < 20; ++i) table.Announced(Node(i), {{7, {}}, {9, {}}});
  EXPECT_THAT(counts(7), ElementsAre(5, 4));
  for (std::size_t i = 1; i < 4; ++i) table.Announced(Node(i), {{7, Places(i)}});
  table.Announced(Node(5), {{7, Places(1)}});
  EXPECT_THAT(counts(7), ElementsAre(4, 3, 2, 1, 1));
  table.Announced(Node(4), {{7, {}}});
  table.Announced(Node(1), {{7, {}}});
  EXPECT_THAT(counts(7), ElementsAre(3, 2, 1));
  // Node 3 came back as another process, node 2 is gone.
  Member restarted = Node(3);
  restarted.incarnation = "second life";
  table.Keep(**ClusterView::Make({restarted, Node(5)}, 1, 4, nullptr));
  EXPECT_THAT(counts(7), ElementsAre(1));

  for (std::uint64_t hash = 100; hash < 200; ++hash) {
    Run(kSimMs);
    table.Announced(Node(5), {{7, Places(2)}, {hash, Places(1)}});
    EXPECT_LE(table.anchors(), 3u);
  }
  EXPECT_THAT(counts(7), ElementsAre(2)) << "announced again and again: others go";
  EXPECT_THAT(counts(199), ElementsAre(1));
  Run(10 * kSimSecond);
  EXPECT_THAT(counts(7), IsEmpty());
  table.Announced(Node(5), {});
  EXPECT_EQ(table.anchors(), 0u);
}

TEST_F(FetchPathTest, HomesAreToldInBatchesAgainAndAnew) {
  SetView(3);
  std::vector<Announcement> to_self;
  Announcer announcer(loop_, peers_, health_,
                      {.self_id = "node-0",
                       .tick_nanos = 10 * kSimMs,
                       .repeat_nanos = 5 * kSimSecond,
                       .to_self = [&](const std::vector<Announcement>& told) {
                         to_self.insert(to_self.end(), told.begin(), told.end());
                       }});
  announcer.Set({1, {}});  // Nothing to say.
  EXPECT_EQ(announcer.anchors(), 0u);
  for (std::uint64_t i = 1; i <= 300; ++i) announcer.Set({i * 0x9e3779b97f4a7c15, Places(4)});
  Run(kSimSecond);
  EXPECT_EQ(announcer.untold(), 300u) << "nobody is known";
  announcer.SetView(view_);
  Run(kSimSecond);
  EXPECT_EQ(announcer.untold(), 0u);
  EXPECT_THAT(peers_.announced["node-1"], SizeIs(1));
  EXPECT_THAT(peers_.announced["node-2"], SizeIs(1));
  EXPECT_EQ(
      peers_.announced["node-1"][0].size() + peers_.announced["node-2"][0].size() + to_self.size(),
      300u);
  Run(6 * kSimSecond);
  EXPECT_THAT(peers_.announced["node-1"], SizeIs(2)) << "again";

  // One home goes: only its anchors are told to others.
  const std::size_t before = to_self.size() + peers_.announced["node-1"].size();
  const std::size_t lost = peers_.announced["node-2"][0].size();
  announcer.SetView(*ClusterView::Make({Node(0), Node(1)}, 2, 10, view_));
  to_self.clear();
  peers_.announced.clear();
  Run(kSimSecond);
  EXPECT_GT(before, 0u);
  ASSERT_THAT(peers_.announced["node-1"], SizeIs(1));
  EXPECT_EQ(to_self.size() + peers_.announced["node-1"][0].size(), lost);

  announcer.Set({0x9e3779b97f4a7c15, {}});
  Run(kSimSecond);
  EXPECT_EQ(announcer.anchors(), 299u);
}

}  // namespace
}  // namespace kvmill
