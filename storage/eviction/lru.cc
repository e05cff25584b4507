// Least recently used. With leaf_first, a block sits right behind its parent in the order of use:
// of one chain the deepest leaves first, whole chains leave in order of their last use.
#include "storage/eviction/entry_lists.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(const Options& options)
      : entries_max_(options.entries_max), lists_(options, 1) {}

  void Insert(EntryId id, const EntryTraits& traits) override {
    lists_.Insert(0, id, traits);
    lists_.MoveToFrontOfChain(0, id);
  }

  void Touch(EntryId id) override { lists_.MoveToFrontOfChain(0, id); }

  void Remove(EntryId id) override { lists_.Erase(id); }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    for (int asks = 0; asks < kAsksMax; ++asks) {
      const EntryId victim = lists_.BackLeaf(0);
      if (victim == kNoEntry) return kNoEntry;
      if (may_leave(victim)) {
        lists_.Erase(victim);
        return victim;
      }
      lists_.MoveToFront(0, victim);
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "lru"; }
  std::size_t bytes() const override { return lists_.bytes(); }
  std::uint32_t entries_max() const override { return entries_max_; }

 private:
  std::uint32_t entries_max_;
  EntryLists lists_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLruPolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<LruPolicy>(options);
}

}  // namespace kvmill
