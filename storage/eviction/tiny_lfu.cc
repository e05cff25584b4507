// W-TinyLFU: Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
// Transactions on Storage 2017. New blocks enter a small LRU window (1 % of the tier); the oldest
// of it replaces the victim of the main part only if a sketch of all recent uses says that it is
// used more often. The main part is a segmented LRU: 20 % on probation, 80 % protected.
//
// The sketch has 16 counters of 4 bits for each block of capacity, no doorkeeper, and is halved
// after 10 uses for each block of capacity.
#include <algorithm>

#include "storage/eviction/entry_lists.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

// A count-min sketch of four rows. Row r of a hash lives in 16 bits of the word that a remix of the
// hash picks, in one of its four counters there.
class FrequencySketch {
 public:
  explicit FrequencySketch(std::uint32_t capacity)
      : words_(capacity, 0), sample_(std::uint64_t{capacity} * 10) {}

  void Add(std::uint32_t hash) {
    for (int row = 0; row < kRows; ++row) {
      const Place place = PlaceOf(hash, row);
      if ((*place.word >> place.shift & 15u) < 15u) *place.word += std::uint64_t{1} << place.shift;
    }
    if (++additions_ < sample_) return;
    for (std::uint64_t& word : words_) word = word >> 1 & 0x7777777777777777u;
    additions_ /= 2;
  }

  std::uint32_t Estimate(std::uint32_t hash) {
    std::uint64_t least = 15;
    for (int row = 0; row < kRows; ++row) {
      const Place place = PlaceOf(hash, row);
      least = std::min(least, *place.word >> place.shift & 15u);
    }
    return static_cast<std::uint32_t>(least);
  }

  std::size_t bytes() const { return words_.size() * sizeof(words_[0]); }

 private:
  static constexpr int kRows = 4;
  struct Place {
    std::uint64_t* word;
    int shift;
  };

  Place PlaceOf(std::uint32_t hash, int row) {
    // Odd multipliers, one a row: digits of the square roots of 2, 3, 5 and 7.
    static constexpr std::uint64_t kMultipliers[kRows] = {0x6A09E667F3BCC909u, 0xBB67AE8584CAA73Bu,
                                                          0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u};
    const std::uint64_t mixed = (std::uint64_t{hash} + 1) * kMultipliers[row];
    const int counter = static_cast<int>(mixed >> 62);
    const std::uint64_t word = ((mixed >> 30 & 0xFFFFFFFFu) * words_.size()) >> 32;
    return {&words_[static_cast<std::size_t>(word)], 16 * row + 4 * counter};
  }

  std::vector<std::uint64_t> words_;
  std::uint64_t sample_;
  std::uint64_t additions_ = 0;
};

enum List : int { kWindow, kProbation, kProtected, kLists };

class TinyLfuPolicy final : public EvictionPolicy {
 public:
  explicit TinyLfuPolicy(const Options& options)
      : entries_max_(options.entries_max),
        window_max_(std::max(1u, options.capacity_blocks / 100)),
        main_max_(options.capacity_blocks - std::min(options.capacity_blocks, window_max_)),
        protected_max_(main_max_ - main_max_ / 5),
        lists_(options, kLists),
        sketch_(options.capacity_blocks) {}

  void Insert(EntryId id, const EntryTraits& traits) override {
    lists_.Insert(kWindow, id, traits);
    sketch_.Add(lists_[id].key_hash);
    lists_.MoveToFrontOfChain(kWindow, id);
    // While the main part has room, nobody has to compete for it.
    if (lists_.length(kWindow) > window_max_ &&
        lists_.length(kProbation) + lists_.length(kProtected) < main_max_) {
      const EntryId oldest = lists_.Back(kWindow);
      if (oldest != kNoEntry) lists_.MoveToFront(kProbation, oldest);
    }
  }

  void Touch(EntryId id) override {
    sketch_.Add(lists_[id].key_hash);
    Use(id);
  }

  void Remove(EntryId id) override { lists_.Erase(id); }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    bool other = false;  // After a refusal the other side is asked, lest one side blocks both.
    for (int asks = 0; asks < kAsksMax; ++asks, other = !other) {
      const EntryId candidate = lists_.BackLeaf(kWindow);
      EntryId resident = lists_.BackLeaf(kProbation);
      if (resident == kNoEntry) resident = lists_.BackLeaf(kProtected);
      if (candidate == kNoEntry && resident == kNoEntry) return kNoEntry;

      // The block that room is made for will push the oldest out of a full window.
      const bool competes = candidate != kNoEntry && lists_.length(kWindow) >= window_max_;
      bool candidate_stays = resident != kNoEntry;
      if (competes && resident != kNoEntry) {
        candidate_stays = sketch_.Estimate(lists_[candidate].key_hash) >
                          sketch_.Estimate(lists_[resident].key_hash);
      }
      if (other && candidate != kNoEntry && resident != kNoEntry)
        candidate_stays = !candidate_stays;
      const EntryId victim = candidate_stays ? resident : candidate;
      if (may_leave(victim)) {
        lists_.Erase(victim);
        if (competes && candidate_stays) lists_.MoveToFront(kProbation, candidate);
        return victim;
      }
      Use(victim);
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "w-tinylfu"; }
  std::size_t bytes() const override { return lists_.bytes() + sketch_.bytes(); }
  std::uint32_t entries_max() const override { return entries_max_; }

 private:
  void Use(EntryId id) {
    if (lists_[id].list == kWindow) {
      lists_.MoveToFrontOfChain(kWindow, id);
      return;
    }
    lists_.MoveToFrontOfChain(kProtected, id);
    if (lists_.length(kProtected) > protected_max_) {
      const EntryId oldest = lists_.Back(kProtected);
      if (oldest != kNoEntry) lists_.MoveToFront(kProbation, oldest);
    }
  }

  std::uint32_t entries_max_;
  std::uint32_t window_max_;
  std::uint32_t main_max_;
  std::uint32_t protected_max_;
  EntryLists lists_;
  FrequencySketch sketch_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewTinyLfuPolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<TinyLfuPolicy>(options);
}

}  // namespace kvmill
