#include "service/cluster/placement.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>

#include "service/cluster/score.h"
#include "storage/core/check.h"

namespace kvmill {

namespace {

// A member that may be in a ranking.
struct Candidate {
  double score = 0;
  MemberIndex index = 0;
  std::uint16_t zone = 0;
};

bool Better(const Candidate& a, const Candidate& b) {
  return a.score < b.score || (a.score == b.score && a.index < b.index);
}

// The best `kRanks` of what is added, best first.
class Best {
 public:
  void Add(const Candidate& candidate) {
    if (size_ == kRanks && !Better(candidate, entries_[kRanks - 1])) return;
    std::size_t at = size_ < kRanks ? size_++ : kRanks - 1;
    for (; at > 0 && Better(candidate, entries_[at - 1]); --at) entries_[at] = entries_[at - 1];
    entries_[at] = candidate;
  }
  std::size_t size() const { return size_; }
  const Candidate& operator[](std::size_t i) const { return entries_[i]; }

 private:
  std::array<Candidate, kRanks> entries_;
  std::size_t size_ = 0;
};

// A member is only looked at closely in shards where it may matter, which 1 - u <= -ln(u) <= (1 -
// u) / u tells without a logarithm. The factor leaves room for rounding; nothing depends on its
// value.
constexpr double kRoundingRoom = 1 + 1e-9;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

double PlacementScore(std::string_view member_id, std::uint64_t weight, std::uint32_t shard) {
  const MemberWords member = WordsOfMember(member_id);
  return Score(Draw(member, WordsOfShard(shard)), 1.0 / static_cast<double>(weight));
}

// Makes one table. Rows are either taken from the old table with indices changed, or ranked anew
// from all members, or from the old row and those that joined.
class ShardTable::Maker {
 public:
  Maker(absl::Span<const Member> members, int shard_bits, const ShardTable* old)
      : table_(new ShardTable), old_(old) {
    table_->shard_bits_ = shard_bits;
    table_->ranks_ = std::min(kRanks, members.size());
    AddHomes(members);
    CompareWithOld();
    SortByZone();
    zone_best_.resize(table_->zones_);
  }

  std::shared_ptr<const ShardTable> Make() {
    const std::size_t shards = table_->shard_count();
    // Every entry is written below.
    table_->rows_ = std::make_unique_for_overwrite<MemberIndex[]>(shards * kRanks);
    for (std::uint32_t shard = 0; shard < shards; ++shard) MakeRow(shard);
    return std::move(table_);
  }

 private:
  const std::vector<Home>& homes() const { return table_->homes_; }

  void AddHomes(absl::Span<const Member> members) {
    std::map<std::string_view, std::uint16_t> zones;
    for (const Member& member : members) {
      const auto next = static_cast<std::uint16_t>(zones.size());
      const std::uint16_t zone = zones.try_emplace(member.zone, next).first->second;
      table_->places_.push_back({member.id, member.zone, member.capacity_bytes});
      table_->homes_.push_back(
          {WordsOfMember(member.id), 1.0 / static_cast<double>(member.capacity_bytes), zone});
    }
    table_->zones_ = zones.size();
  }

  // Fills new_index_ (of each old member, kNoMember when it went) and joined_.
  void CompareWithOld() {
    if (old_ == nullptr || old_->shard_bits_ != table_->shard_bits_) {
      old_ = nullptr;
      return;
    }
    const std::vector<Place>& before = old_->places_;
    new_index_.assign(before.size(), kNoMember);
    std::size_t at = 0;
    for (std::size_t i = 0; i < homes().size(); ++i) {
      const Place& place = table_->places_[i];
      while (at < before.size() && before[at].id < place.id) ++at;
      // Another weight or zone: gone, and joined.
      if (at < before.size() && before[at].id == place.id && before[at].weight == place.weight &&
          before[at].zone == place.zone) {
        new_index_[at] = static_cast<MemberIndex>(i);
      } else {
        joined_.push_back(static_cast<MemberIndex>(i));
      }
    }
    // So many joined that asking about each costs as much as asking about all.
    if (joined_.size() > homes().size() / 2) old_ = nullptr;
  }

  // Fills what RankAll reads: members zone by zone. The limits are scores below which so many
  // members are expected in a shard that they are hardly ever too few (Poisson: 5 or fewer of 20 in
  // one shard of 14,000, none of 10 of a zone in one of 22,000); then all are looked at.
  void SortByZone() {
    by_zone_.resize(homes().size());
    for (std::size_t i = 0; i < by_zone_.size(); ++i) by_zone_[i] = static_cast<MemberIndex>(i);
    std::stable_sort(by_zone_.begin(), by_zone_.end(), [this](MemberIndex a, MemberIndex b) {
      return homes()[a].zone < homes()[b].zone;
    });
    double weight = 0;
    for (const Home& home : homes()) weight += 1 / home.inverse_weight;
    limit_ = 20 / weight;
    for (std::size_t begin = 0, end = 0; begin < by_zone_.size(); begin = end) {
      const std::uint16_t zone = homes()[by_zone_[begin]].zone;
      double weight_of_zone = 0;
      for (; end < by_zone_.size() && homes()[by_zone_[end]].zone == zone; ++end) {
        weight_of_zone += 1 / homes()[by_zone_[end]].inverse_weight;
      }
      const double limit = std::max(limit_, 10 / weight_of_zone);
      zone_parts_.push_back({zone, begin, end, limit});
      for (std::size_t i = begin; i < end; ++i) {
        const Home& home = homes()[by_zone_[i]];
        words_.push_back(home.words);
        least_draw_.push_back(LeastDraw(limit / home.inverse_weight));
      }
    }
  }

  // Draws below it have a -ln(u) above `limit`.
  static std::uint64_t LeastDraw(double limit) {
    const double distance = limit * kRoundingRoom * 0x1p64 + 0x1p14;
    return distance >= 0x1p63 ? 0 : ~static_cast<std::uint64_t>(distance);
  }

  void MakeRow(std::uint32_t shard) {
    MemberIndex* row = table_->rows_.get() + std::size_t{shard} * kRanks;
    if (old_ == nullptr) return RankAll(shard, row);
    const MemberIndex* old_row = old_->rows_.get() + std::size_t{shard} * kRanks;
    bool lost = false;
    for (std::size_t i = 0; i < old_->ranks_; ++i) {
      row[i] = new_index_[old_row[i]];
      lost |= row[i] == kNoMember;
    }
    if (lost) return RankAll(shard, row);
    for (std::size_t i = old_->ranks_; i < kRanks; ++i) row[i] = kNoMember;
    if (joined_.empty()) return;
    const ShardWords words = WordsOfShard(shard);
    bool changes = false;
    for (const MemberIndex index : joined_) changes |= MayEnter(index, words, row);
    if (!changes) return;
    candidates_.clear();
    for (std::size_t i = 0; i < old_->ranks_; ++i) AddCandidate(row[i], words);
    // Nobody else can: who was not in the row is behind those who are, and stays there.
    for (const MemberIndex index : joined_) AddCandidate(index, words);
    Rank(row);
  }

  double ScoreOf(MemberIndex index, const ShardWords& words) const {
    const Home& home = homes()[index];
    return Score(Draw(home.words, words), home.inverse_weight);
  }

  void AddCandidate(MemberIndex index, const ShardWords& words) {
    candidates_.push_back({ScoreOf(index, words), index, homes()[index].zone});
  }

  // Whether a member certainly has a smaller score than `score`: -ln(u) <= (1 - u) / u.
  bool Beats(MemberIndex index, double score, const ShardWords& words) const {
    const Home& home = homes()[index];
    const double distance = Distance(Draw(home.words, words));
    return distance * home.inverse_weight * kRoundingRoom < score * (1 - distance);
  }

  // Whether a member that joined may be in the row. True too often is slow, never wrong.
  bool MayEnter(MemberIndex index, const ShardWords& words, const MemberIndex* row) {
    const std::size_t size = old_->ranks_;
    if (size < kRanks) return true;
    const Home& home = homes()[index];
    const double at_least = Distance(Draw(home.words, words)) * home.inverse_weight / kRoundingRoom;
    if (at_least <= ScoreOf(row[size - 1], words)) return true;
    if (table_->zones_ == 1) return false;
    // Behind all of them in score; it may still be the best of its zone. The best of a zone is the
    // first of it in the row.
    std::size_t zones_in_row = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const std::uint16_t zone = homes()[row[i]].zone;
      if (zone == home.zone) return !Beats(row[i], at_least, words);
      zones_in_row +=
          std::none_of(row, row + i, [&](MemberIndex j) { return homes()[j].zone == zone; });
    }
    // Its zone is not in the row. When the row ends with others than the best of zones, all zones
    // are in it, so this one is new.
    return zones_in_row < size;
  }

  void RankAll(std::uint32_t shard, MemberIndex* row) {
    const ShardWords words = WordsOfShard(shard);
    candidates_.clear();
    std::size_t below = 0, zones = 0;
    for (const ZonePart& part : zone_parts_) {
      bool seen = false;
      for (std::size_t i = part.begin; i < part.end; ++i) {
        const std::uint64_t draw = Draw(words_[i], words);
        if (draw < least_draw_[i]) [[likely]]
          continue;
        const double score = Score(draw, homes()[by_zone_[i]].inverse_weight);
        candidates_.push_back({score, by_zone_[i], part.zone});
        below += score <= limit_;
        seen |= score <= part.limit;
      }
      zones += seen;
    }
    if (below < table_->ranks_ || zones < table_->zones_) {
      candidates_.clear();
      for (const MemberIndex index : by_zone_) AddCandidate(index, words);
    }
    Rank(row);
  }

  // The rule at the top of placement.h. candidates_ holds, of all members, the best kRanks by score
  // and the best of each zone that can be in the row.
  void Rank(MemberIndex* row) {
    Best champions, others;
    if (table_->zones_ == 1) {
      for (const Candidate& candidate : candidates_) others.Add(candidate);
    } else {
      std::fill(zone_best_.begin(), zone_best_.end(), Candidate{kInfinity, kNoMember, 0});
      for (const Candidate& candidate : candidates_) {
        Candidate& best = zone_best_[candidate.zone];
        if (Better(candidate, best)) best = candidate;
      }
      for (const Candidate& candidate : candidates_) {
        const bool best = zone_best_[candidate.zone].index == candidate.index;
        (best ? champions : others).Add(candidate);
      }
    }
    std::size_t at = 0;
    for (std::size_t i = 0; i < champions.size(); ++i) row[at++] = champions[i].index;
    for (std::size_t i = 0; i < others.size() && at < kRanks; ++i) row[at++] = others[i].index;
    while (at < kRanks) row[at++] = kNoMember;
  }

  std::shared_ptr<ShardTable> table_;
  const ShardTable* old_;
  std::vector<MemberIndex> new_index_;
  std::vector<MemberIndex> joined_;

  // Members zone by zone, so that the loop over them has one limit, and what it reads lies
  // together.
  struct ZonePart {
    std::uint16_t zone;
    std::size_t begin, end;  // Of by_zone_.
    double limit;
  };
  double limit_ = 0;
  std::vector<ZonePart> zone_parts_;
  std::vector<MemberIndex> by_zone_;
  std::vector<MemberWords> words_;
  std::vector<std::uint64_t> least_draw_;  // Below it a member is not looked at closely.

  // Used again for every row.
  std::vector<Candidate> candidates_;
  std::vector<Candidate> zone_best_;
};

std::shared_ptr<const ShardTable> ShardTable::Make(absl::Span<const Member> homes, int shard_bits,
                                                   const ShardTable* old) {
  KVMILL_CHECK(shard_bits >= 1 && shard_bits <= kShardBits);
  KVMILL_CHECK(homes.size() <= kHomesMax);
  for (std::size_t i = 0; i < homes.size(); ++i) {
    KVMILL_CHECK(homes[i].capacity_bytes > 0);
    KVMILL_CHECK(i == 0 || homes[i - 1].id < homes[i].id);
  }
  return Maker(homes, shard_bits, old).Make();
}

bool ShardTable::IsFor(absl::Span<const Member> homes) const {
  return std::equal(homes.begin(), homes.end(), places_.begin(), places_.end(),
                    [](const Member& member, const Place& place) {
                      return member.id == place.id && member.capacity_bytes == place.weight &&
                             member.zone == place.zone;
                    });
}

}  // namespace kvmill
