// Shard tables against the rule written out, how evenly they spread, and what moves when a member
// comes or goes.
#include "service/cluster/placement.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "service/cluster/anchor.h"
#include "service/cluster/score.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using Ranking = std::vector<std::string>;  // Ids, best first.

Member Home(std::string id, std::uint64_t capacity, std::string zone = "") {
  return {.id = std::move(id), .zone = std::move(zone), .capacity_bytes = capacity};
}

void SortById(std::vector<Member>* members) {
  std::sort(members->begin(), members->end(),
            [](const Member& a, const Member& b) { return a.id < b.id; });
}

// `count` members, of weights 1 to 8 TiB when `weighted`, over so many zones.
std::vector<Member> Homes(std::size_t count, std::size_t zones, bool weighted, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Member> members;
  for (std::size_t i = 0; i < count; ++i) {
    members.push_back(Home(absl::StrCat("node-", i),
                           weighted ? (std::uint64_t{1} << 40) * (1 + random() % 8) : 1 << 30,
                           zones == 0 ? "" : absl::StrCat("zone-", random() % zones)));
  }
  SortById(&members);
  return members;
}

Ranking RankingOf(const ShardTable& table, const std::vector<Member>& members,
                  std::uint32_t shard) {
  Ranking ids;
  for (const MemberIndex index : table.Ranking(shard)) ids.push_back(members[index].id);
  return ids;
}

// The rule of placement.h, in the obvious way.
Ranking RankingByRule(const std::vector<Member>& members, std::uint32_t shard) {
  std::vector<std::pair<double, const Member*>> sorted;
  for (const Member& member : members) {
    sorted.emplace_back(PlacementScore(member.id, member.capacity_bytes, shard), &member);
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  Ranking best, others;
  std::set<std::string> zones;
  for (const auto& [score, member] : sorted) {
    (zones.insert(member->zone).second ? best : others).push_back(member->id);
  }
  best.insert(best.end(), others.begin(), others.end());
  best.resize(std::min(best.size(), kRanks));
  return best;
}

TEST(PlacementTest, TablesFollowTheRuleWhateverMadeThem) {
  constexpr int kBits = 7;
  for (std::uint64_t seed = 0; seed < ShortOrLong<std::uint64_t>(12, 200); ++seed) {
    std::mt19937_64 random(seed);
    const std::size_t zones = std::array<std::size_t, 6>{0, 1, 2, 3, 9, 40}[seed % 6];
    std::vector<Member> members = Homes(1 + random() % 60, zones, seed % 2 == 0, seed);
    std::shared_ptr<const ShardTable> table;
    for (int step = 0; step < 40; ++step) {
      const auto made = ShardTable::Make(members, kBits, nullptr);
      table = ShardTable::Make(members, kBits, table.get());
      ASSERT_TRUE(table->IsFor(members));
      for (std::uint32_t shard = 0; shard < table->shard_count(); ++shard) {
        const Ranking want = RankingByRule(members, shard);
        ASSERT_EQ(RankingOf(*made, members, shard), want) << "seed " << seed << " step " << step;
        ASSERT_EQ(RankingOf(*table, members, shard), want) << "seed " << seed << " step " << step;
      }
      // One to three changes: members go, come, or have another weight or zone.
      for (std::size_t i = 0, changes = 1 + random() % 3; i < changes; ++i) {
        const std::uint64_t what = random() % 4;
        if (what == 0 && members.size() > 1) {
          members.erase(members.begin() + static_cast<std::ptrdiff_t>(random() % members.size()));
        } else if (what == 1) {
          members[random() % members.size()].capacity_bytes = 1 + random() % (1 << 30);
        } else if (what == 2) {
          members[random() % members.size()].zone = absl::StrCat("zone-", random() % (zones + 2));
        } else {
          members.push_back(Home(absl::StrCat("new-", seed, "-", step, "-", i),
                                 1 + random() % (1 << 30),
                                 absl::StrCat("zone-", random() % (zones + 1))));
          SortById(&members);
        }
      }
    }
  }
}

TEST(PlacementTest, NobodyServes) {
  const auto empty = ShardTable::Make({}, 4, nullptr);
  EXPECT_TRUE(empty->Ranking(3).empty());
  const std::vector<Member> one = {Home("a", 1)};
  const auto table = ShardTable::Make(one, 4, empty.get());
  EXPECT_THAT(RankingOf(*table, one, 3), ElementsAre("a"));
  EXPECT_TRUE(ShardTable::Make({}, 4, table.get())->Ranking(3).empty());
}

// The first `copies` of every shard before and after members changed by one, which is in `more`
// and not in `fewer`: its shards get exactly one other, and nothing else moves.
void ExpectOnlyItsShardsMove(const std::vector<Member>& more, const std::vector<Member>& fewer,
                             const std::string& id, int bits) {
  const auto with = ShardTable::Make(more, bits, nullptr);
  const auto without = ShardTable::Make(fewer, bits, with.get());
  std::vector<std::size_t> moved(kRanks, 0);
  for (std::uint32_t shard = 0; shard < with->shard_count(); ++shard) {
    const Ranking a = RankingOf(*with, more, shard), b = RankingOf(*without, fewer, shard);
    ASSERT_EQ(a.size(), kRanks);
    ASSERT_EQ(b.size(), kRanks);
    for (std::size_t copies = 1; copies <= kRanks; ++copies) {
      const auto end = static_cast<std::ptrdiff_t>(copies);
      std::set<std::string> before(a.begin(), a.begin() + end), after(b.begin(), b.begin() + end);
      if (before.erase(id) == 0) {
        ASSERT_EQ(before, after) << "shard " << shard << " of others, " << copies << " copies";
        ASSERT_TRUE(std::equal(a.begin(), a.begin() + end, b.begin()));
      } else {
        ++moved[copies - 1];
        ASSERT_TRUE(std::includes(after.begin(), after.end(), before.begin(), before.end()))
            << "shard " << shard << " lost another copy, too, of " << copies;
        // Of one copy less, nothing that stays has moved behind where it was asked for.
        for (std::size_t rank = 0; rank < copies; ++rank) {
          if (a[rank] == id) continue;
          const auto at = std::find(b.begin(), b.end(), a[rank]) - b.begin();
          ASSERT_LE(at, static_cast<std::ptrdiff_t>(rank)) << "moved back in shard " << shard;
        }
      }
    }
  }
  // And it had something: what its weight gives it, within five deviations.
  double weight = 0, own = 0;
  for (const Member& member : more) {
    weight += static_cast<double>(member.capacity_bytes);
    if (member.id == id) own = static_cast<double>(member.capacity_bytes);
  }
  const double share = own / weight * static_cast<double>(with->shard_count());
  EXPECT_NEAR(static_cast<double>(moved[0]), share, 5 * std::sqrt(share) + 1);
}

TEST(PlacementTest, OfAThousandMembersTheLostOnesShardsMoveAndNoOther) {
  for (const std::size_t zones : {1, 3, 20}) {
    for (const bool weighted : {false, true}) {
      const std::vector<Member> members = Homes(1000, zones, weighted, 7);
      for (const std::size_t lost : {0, 500, 999}) {
        std::vector<Member> rest = members;
        rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(lost));
        SCOPED_TRACE(absl::StrCat(zones, " zones, weighted ", weighted, ", ", members[lost].id));
        ExpectOnlyItsShardsMove(members, rest, members[lost].id, 13);
      }
    }
  }
}

TEST(PlacementTest, AZoneThatEndsMovesNothingElse) {
  std::vector<Member> members = Homes(30, 2, true, 3);
  const std::vector<Member> rest = members;
  members.push_back(Home("z-alone", std::uint64_t{4} << 40, "zone-of-its-own"));
  // It is a copy of every shard that has three; without it the third comes from the other zones.
  ExpectOnlyItsShardsMove(members, rest, "z-alone", 10);
}

TEST(PlacementTest, FirstCopiesLieInDifferentZones) {
  const std::vector<Member> members = Homes(60, 4, true, 1);
  const auto table = ShardTable::Make(members, 12, nullptr);
  for (std::uint32_t shard = 0; shard < table->shard_count(); ++shard) {
    std::set<std::string> zones;
    for (const MemberIndex index : table->Ranking(shard).first(4))
      zones.insert(members[index].zone);
    ASSERT_EQ(zones.size(), 4u) << shard;
  }
}

// As many shards a member as 1,000 members have with kShardBits.
TEST(PlacementTest, LoadFollowsWeights) {
  const int bits = ShortOrLong(16, kShardBits);
  const std::size_t count = (std::size_t{1} << bits) / 2097;
  for (const bool weighted : {false, true}) {
    const std::vector<Member> members = Homes(count, 3, weighted, 11);
    const auto table = ShardTable::Make(members, bits, nullptr);
    std::vector<std::size_t> load(count, 0);
    for (std::uint32_t shard = 0; shard < table->shard_count(); ++shard) {
      ++load[table->Ranking(shard)[0]];
    }
    double weight = 0;
    for (const Member& member : members) weight += static_cast<double>(member.capacity_bytes);
    const double shards = static_cast<double>(table->shard_count());
    const double mean = shards / static_cast<double>(count);
    double chi_square = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double share = static_cast<double>(members[i].capacity_bytes) / weight * shards;
      const double off = static_cast<double>(load[i]) - share;
      EXPECT_LE(std::abs(off) / std::max(share, mean), 0.10) << members[i].id;
      chi_square += off * off / share;
    }
    // The spread is that of independent choices, no more and no less: five deviations.
    const double freedom = static_cast<double>(count - 1);
    EXPECT_NEAR(chi_square, freedom, 5 * std::sqrt(2 * freedom));
  }
}

// Who is second does not depend on who is first, but for being another one.
TEST(PlacementTest, SecondRanksOfAMemberSpreadOverAllOthers) {
  constexpr std::size_t kCount = 20;
  const std::vector<Member> members = Homes(kCount, 1, false, 5);
  const auto table = ShardTable::Make(members, 17, nullptr);
  std::map<std::pair<MemberIndex, MemberIndex>, std::size_t> pairs;
  for (std::uint32_t shard = 0; shard < table->shard_count(); ++shard) {
    const auto ranking = table->Ranking(shard);
    ++pairs[{ranking[0], ranking[1]}];
  }
  ASSERT_EQ(pairs.size(), kCount * (kCount - 1));
  const double want = static_cast<double>(table->shard_count()) / static_cast<double>(pairs.size());
  double chi_square = 0;
  for (const auto& [pair, count] : pairs) {
    chi_square += std::pow(static_cast<double>(count) - want, 2) / want;
  }
  const double freedom = static_cast<double>(pairs.size() - 1);
  EXPECT_NEAR(chi_square, freedom, 5 * std::sqrt(2 * freedom));
}

TEST(PlacementTest, TheLogarithmIsOne) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t draw = i == 0   ? 0
                               : i == 1 ? ~std::uint64_t{0}
                                        : random() >> (random() % 64);
    const double u = Uniform(draw);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    ASSERT_EQ(1 - u, Distance(draw));
    ASSERT_NEAR(MinusLog(u), -std::log(u), 4e-15 * std::max(1.0, -std::log(u)) * 1) << u;
    ASSERT_NEAR(MinusLog(u) / -std::log(u), 1, 1e-13) << u;
    ASSERT_GE(MinusLog(u) * (1 + 1e-9), Distance(draw));
  }
}

// docs/formats.md has these.
TEST(PlacementTest, VectorsOfTheFormat) {
  Fingerprint fingerprint;
  for (std::size_t i = 0; i < fingerprint.size(); ++i) fingerprint[i] = static_cast<std::byte>(i);
  const BlockKey anchor = *BlockKey::FromBytes("0123456789abcdef");
  EXPECT_EQ(AnchorHash(fingerprint, anchor), 0x6e7429a584f8896a);
  EXPECT_EQ(AnchorHash(fingerprint, *BlockKey::FromBytes(std::string(64, 'k'))),
            0x73723c46e7e4c49c);
  EXPECT_EQ(PlacementScore("node-a", 1, 0), 0x1.cd63e416c4efep+0);
  EXPECT_EQ(PlacementScore("node-a", 1'000'000'000'000, 2'097'151), 0x1.3af71bdf9a4e6p-42);
  EXPECT_EQ(PlacementScore("b", 3, 1'000'000), 0x1.82465277e1da2p-2);

  std::vector<Member> members;
  for (std::uint64_t i = 0; i < 8; ++i) {
    members.push_back(Home(absl::StrCat("node-", i), (std::uint64_t{1} << 40) * (1 + i % 3),
                           absl::StrCat("zone-", i % 2)));
  }
  const auto table = ShardTable::Make(members, kShardBits, nullptr);
  EXPECT_THAT(table->Ranking(0), ElementsAre(0, 5, 4, 1, 2, 7));
  EXPECT_THAT(table->Ranking(1), ElementsAre(7, 2, 1, 4, 6, 0));
  EXPECT_THAT(table->Ranking(1'000'000), ElementsAre(7, 0, 2, 4, 5, 1));
  EXPECT_THAT(table->Ranking(2'097'151), ElementsAre(2, 5, 4, 0, 1, 7));
  EXPECT_EQ(table->ShardOf(0x6e7429a584f8896a), 904'837u);
}

}  // namespace
}  // namespace kvmill
