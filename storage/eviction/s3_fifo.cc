// S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO Queues are All You Need for Cache Eviction",
// SOSP 2023. New blocks pass a small queue (a tenth of the tier); those used twice there, and those
// that ghosts remember, live in the main queue, which gives another round for every use, up to
// three. As many ghosts as the main queue has room for.
#include <algorithm>

#include "storage/eviction/entry_lists.h"
#include "storage/eviction/ghost_table.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

enum List : int { kSmall, kMain, kLists };

constexpr std::uint8_t kUsesMax = 3;
constexpr std::uint32_t kGhost = 1;

class S3FifoPolicy final : public EvictionPolicy {
 public:
  explicit S3FifoPolicy(const Options& options)
      : entries_max_(options.entries_max),
        small_target_(std::max(1u, options.capacity_blocks / 10)),
        lists_(options, kLists),
        ghosts_(std::max(1u, options.capacity_blocks - small_target_)) {}

  void Insert(EntryId id, const EntryTraits& traits) override {
    lists_.Insert(kSmall, id, traits);
    if (ghosts_.Take(lists_[id].key_hash) != 0) lists_.MoveToFront(kMain, id);
  }

  void Touch(EntryId id) override {
    EntryLists::Node& node = lists_[id];
    if (node.uses < kUsesMax) ++node.uses;
  }

  void Remove(EntryId id) override { lists_.Erase(id); }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    // Each round asks, or takes a use from a block that Touch gave it.
    bool other = false;  // After a refusal the other queue is asked, lest one queue blocks both.
    for (int asks = 0; asks < kAsksMax;) {
      List list = (lists_.length(kSmall) >= small_target_) != other ? kSmall : kMain;
      EntryId victim = lists_.BackLeaf(list);
      if (victim == kNoEntry) {
        list = list == kSmall ? kMain : kSmall;
        victim = lists_.BackLeaf(list);
      }
      if (victim == kNoEntry) return kNoEntry;
      EntryLists::Node& node = lists_[victim];
      if (list == kSmall && node.uses > 1) {
        node.uses = 0;
        lists_.MoveToFront(kMain, victim);
      } else if (list == kMain && node.uses > 0) {
        --node.uses;
        lists_.MoveToFront(kMain, victim);
      } else if (++asks; may_leave(victim)) {
        if (list == kSmall) ghosts_.Add(node.key_hash, kGhost);
        lists_.Erase(victim);
        return victim;
      } else {
        lists_.MoveToFront(list, victim);
        other = !other;
      }
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "s3-fifo"; }
  std::size_t bytes() const override { return lists_.bytes() + ghosts_.bytes(); }
  std::uint32_t entries_max() const override { return entries_max_; }

 private:
  std::uint32_t entries_max_;
  std::uint32_t small_target_;
  EntryLists lists_;
  GhostTable ghosts_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewS3FifoPolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<S3FifoPolicy>(options);
}

}  // namespace kvmill
