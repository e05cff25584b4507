// SIEVE: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is Simpler than LRU", NSDI 2024. One queue in
// order of arrival; a hand walks from its back to its front, spares each used block once, and takes
// the first that was not used since it last came by. Spared blocks keep their place.
#include "storage/eviction/entry_lists.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

class SievePolicy final : public EvictionPolicy {
 public:
  explicit SievePolicy(const Options& options)
      : entries_max_(options.entries_max), lists_(options, 1) {}

  void Insert(EntryId id, const EntryTraits& traits) override { lists_.Insert(0, id, traits); }

  void Touch(EntryId id) override { lists_[id].uses = 1; }

  void Remove(EntryId id) override {
    if (hand_ == id) hand_ = lists_.Ahead(id);
    lists_.Erase(id);
  }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    for (int asks = 0; asks < kAsksMax;) {
      const EntryId victim = hand_ != kNoEntry ? hand_ : lists_.Back(0);
      if (victim == kNoEntry) return kNoEntry;
      hand_ = lists_.Ahead(victim);
      EntryLists::Node& node = lists_[victim];
      if (node.children > 0) {
        lists_.Park(victim);  // It comes back at the end that the hand starts from.
      } else if (node.uses > 0) {
        node.uses = 0;
      } else if (++asks; may_leave(victim)) {
        lists_.Erase(victim);
        return victim;
      }
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "sieve"; }
  std::size_t bytes() const override { return lists_.bytes(); }
  std::uint32_t entries_max() const override { return entries_max_; }

 private:
  std::uint32_t entries_max_;
  EntryLists lists_;
  EntryId hand_ = kNoEntry;  // Where the next Evict looks first; kNoEntry: at the back.
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewSievePolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<SievePolicy>(options);
}

}  // namespace kvmill
