// Which members are the homes of a shard: a table per view, made once and never changed.
//
// Every member has a score for every shard, from hashes of both and from its capacity (weighted
// rendezvous hashing). A shard's *ranking* is made of those members that serve:
//   1. the best member of each zone, these by score;
//   2. then all others, by score.
// So the first copies lie in different zones as far as there are several, and whoever is ranked
// first is the best of all, whatever the zones. Of equal scores the smaller id is better. The table
// keeps the first kRanks.
//
// A ranking is a function of the set of members, and a member's score one of itself: when a member
// goes, it is taken out of each ranking and those behind move up, and when one comes it is put in
// between, but for one that it beats in its own zone, which then stands among the others. So the
// first C members of a shard change by one at most, and only when the member that came or went is
// among them (docs/decisions/0025-placement.md has the argument).
//
// docs/formats.md ("Placement") has the arithmetic and test vectors. It is part of the contract
// between nodes; a cluster never mixes placement versions.
#ifndef KVMILL_SERVICE_CLUSTER_PLACEMENT_H_
#define KVMILL_SERVICE_CLUSTER_PLACEMENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "service/cluster/member.h"

namespace kvmill {

inline constexpr std::uint32_t kPlacementVersion = 1;

// 2 Mi shards. A member of average weight among N holds S/N shards, give or take sqrt(S/N), because
// shards choose independently: for N = 1,000 2,097 and 46. 10 % more is 4.6 deviations, which one
// of 1,000 members exceeds in one cluster of 200 to 500. Half as many shards would be 3.2
// deviations, and most clusters would have such a member. (A member of w times the average weight
// holds wS/N give or take sqrt(wS/N): in relation to its own share a heavy member deviates less, in
// relation to the average load a light one does.) Anchors fall into shards at random, too: with a
// million anchors a member that adds 0.1 %.
inline constexpr int kShardBits = 21;

// Copies of a block are up to kRanks - 2: two more are asked, which covers one join or leave.
inline constexpr std::size_t kRanks = 6;

using MemberIndex = std::uint16_t;
inline constexpr MemberIndex kNoMember = 0xffff;
inline constexpr std::size_t kHomesMax = kNoMember;

// Smaller is better: -ln(u) / weight, where u is in (0, 1) and depends on member and shard alone.
// The same bits on every machine.
double PlacementScore(std::string_view member_id, std::uint64_t weight, std::uint32_t shard);

// Immutable, thread-safe. 24 MiB with kShardBits.
class ShardTable {
 public:
  // `homes`: those that serve, in ascending order of id, at most kHomesMax, each of at least one
  // byte of capacity; rankings hold indices into it. `shard_bits`, 1 to kShardBits: tests take
  // fewer. What does not change is taken from `old`, which may be null: the result is the same bit
  // for bit, and one join or leave costs a pass over the table instead of shards × homes scores.
  static std::shared_ptr<const ShardTable> Make(absl::Span<const Member> homes, int shard_bits,
                                                const ShardTable* old);

  int shard_bits() const { return shard_bits_; }
  std::size_t shard_count() const { return std::size_t{1} << shard_bits_; }
  std::uint32_t ShardOf(std::uint64_t anchor_hash) const {
    return static_cast<std::uint32_t>(anchor_hash >> (64 - shard_bits_));
  }
  // Best first, min(kRanks, homes) of them. Lives as long as the table. No lock, no allocation.
  absl::Span<const MemberIndex> Ranking(std::uint32_t shard) const {
    return {rows_.get() + std::size_t{shard} * kRanks, ranks_};
  }

  // Whether Make would give this table for `homes`.
  bool IsFor(absl::Span<const Member> homes) const;

 private:
  // What decides about a home's place, and what its scores are made of.
  struct Place {
    std::string id;
    std::string zone;
    std::uint64_t weight = 0;
  };
  struct Home {
    std::array<std::uint64_t, 2> words = {};  // Hashes of the id.
    double inverse_weight = 0;
    std::uint16_t zone = 0;  // A number of the zone in this table.
  };
  class Maker;

  ShardTable() = default;

  int shard_bits_ = 0;
  std::size_t ranks_ = 0;
  std::size_t zones_ = 0;
  std::vector<Place> places_;
  std::vector<Home> homes_;
  std::unique_ptr<MemberIndex[]> rows_;  // kRanks for each shard; kNoMember behind ranks_.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_PLACEMENT_H_
