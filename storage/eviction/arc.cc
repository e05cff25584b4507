// ARC: Megiddo, Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. One list of
// blocks used once and one of blocks used again; a block that ghosts remember from one of them says
// that this list should have been longer.
//
// Two differences from the paper. The owner makes room before it says for which block, so the
// target moves after the eviction that it would have steered, and the tie rule about ghosts of the
// second list is left out. And ghosts, as many as the tier has blocks, are forgotten in the order
// that they came, approximately, whichever list they came from.
#include <algorithm>

#include "storage/eviction/entry_lists.h"
#include "storage/eviction/ghost_table.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

enum List : int { kOnce, kAgain, kLists };  // T1 and T2; a ghost's value is its list + 1.

class ArcPolicy final : public EvictionPolicy {
 public:
  explicit ArcPolicy(const Options& options)
      : options_(options), lists_(options, kLists), ghosts_(options.capacity_blocks) {}

  void Insert(EntryId id, const EntryTraits& traits) override {
    lists_.Insert(kOnce, id, traits);
    List list = kOnce;
    if (const std::uint32_t ghost = ghosts_.Take(lists_[id].key_hash); ghost != 0) {
      Learn(ghost == kOnce + 1 ? kOnce : kAgain);
      --ghost_counts_[ghost - 1];
      list = kAgain;
    }
    lists_.MoveToFrontOfChain(list, id);
  }

  void Touch(EntryId id) override { lists_.MoveToFrontOfChain(kAgain, id); }

  void Remove(EntryId id) override { lists_.Erase(id); }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    bool other = false;  // After a refusal the other list is asked, lest one list blocks both.
    for (int asks = 0; asks < kAsksMax; ++asks, other = !other) {
      List list = (lists_.length(kOnce) > once_target_) != other ? kOnce : kAgain;
      EntryId victim = lists_.BackLeaf(list);
      if (victim == kNoEntry) {
        list = list == kOnce ? kAgain : kOnce;
        victim = lists_.BackLeaf(list);
      }
      if (victim == kNoEntry) return kNoEntry;
      if (may_leave(victim)) {
        const std::uint32_t displaced =
            ghosts_.Add(lists_[victim].key_hash, static_cast<std::uint32_t>(list) + 1);
        ++ghost_counts_[list];
        if (displaced != 0) --ghost_counts_[displaced - 1];
        lists_.Erase(victim);
        return victim;
      }
      lists_.MoveToFront(list, victim);
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "arc"; }
  std::size_t bytes() const override { return lists_.bytes() + ghosts_.bytes(); }
  std::uint32_t entries_max() const override { return options_.entries_max; }

 private:
  // A ghost of `list` came back: by one, or by as much as the other list's ghosts outnumber its.
  void Learn(List list) {
    const std::uint64_t others = ghost_counts_[list == kOnce ? kAgain : kOnce];
    const auto step = static_cast<std::uint32_t>(
        std::max<std::uint64_t>(1, others / std::max<std::uint64_t>(1, ghost_counts_[list])));
    if (list == kOnce) {
      once_target_ += std::min(step, options_.capacity_blocks - once_target_);
    } else {
      once_target_ -= std::min(step, once_target_);
    }
  }

  Options options_;
  EntryLists lists_;
  GhostTable ghosts_;
  std::uint64_t ghost_counts_[kLists] = {0, 0};
  std::uint32_t once_target_ = 0;  // The paper's p.
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewArcPolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<ArcPolicy>(options);
}

}  // namespace kvmill
