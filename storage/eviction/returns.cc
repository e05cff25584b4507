// The default: a block's age counts for less the more often its conversation has come back.
//
// What prompts look like: a conversation sends its whole history with every turn. Most come once
// and never again; one that came back tends to come back once more, and the more often it did, the
// likelier it is. The chance that it returns now falls with the time since its last turn. So the
// block with the largest
//
//     age / (1 + alpha * level)
//
// leaves, where age is the number of blocks that entered since it was last used, and level is how
// many requests have come back to this block and to the blocks it was built on:
//  - a use raises the level of a block by one;
//  - a new block starts at the level of its parent's birth, plus one when the parent has been used
//    since, which means that the request that brings it is a return. (Its parent's level itself
//    would not do: a system prompt is used by every conversation, which says nothing about one.)
//  - a block that left and came back starts at least one above where it was: ghosts remember.
//
// How much returning is worth differs: when the tier is so large that nearly all that returns is
// still there, only age counts; when it is small, levels do. As ARC does, alpha learns from what
// should not have left: when the ghosts that return have a higher level than ghosts have on
// average, alpha grows, otherwise it shrinks.
//
// One list a level, ordered by last use; within a level a block sits right behind its parent, so
// the oldest is a leaf. Evicting compares the backs of the (at most 15) lists.
#include <algorithm>

#include "storage/eviction/entry_lists.h"
#include "storage/eviction/ghost_table.h"
#include "storage/eviction/policies.h"

namespace kvmill {
namespace {

constexpr int kLevels = 15;              // Ghost values are level + 1, in four bits.
constexpr std::uint64_t kGhosts = 2;     // Per block of capacity.
constexpr std::uint32_t kParksMax = 32;  // Per level and question.
constexpr float kAlphaFirst = 0.08f;
constexpr float kAlphaMin = 0.02f;
constexpr float kAlphaMax = 2.0f;
// By how much ln(alpha) moves when as many ghosts return as the tier has blocks, each one level
// above (or below) the average.
constexpr float kAlphaGain = 8.0f;

class ReturnsPolicy final : public EvictionPolicy {
 public:
  explicit ReturnsPolicy(const Options& options)
      : options_(options),
        lists_(WithLeafFirst(options), kLevels),
        ghosts_(kGhosts * options.capacity_blocks) {}

  void Insert(EntryId id, const EntryTraits& traits) override {
    lists_.Insert(0, id, traits);
    blocks_most_ = std::max(blocks_most_, lists_.size());
    ++now_;
    EntryLists::Node& node = lists_[id];
    int level = 0;
    if (const EntryId parent_id = lists_.Parent(id); parent_id != kNoEntry) {
      const EntryLists::Node& parent = lists_[parent_id];
      level = BirthLevel(parent) + (parent.uses > 0 ? 1 : 0);
    }
    if (const std::uint32_t ghost = ghosts_.Take(node.key_hash); ghost != 0) {
      const int ghost_level = static_cast<int>(ghost) - 1;
      Learn(ghost_level);
      ForgetGhost(ghost_level);
      level = std::max(level, ghost_level + 1);
    }
    node.level = static_cast<std::uint8_t>(std::min(level, kLevels - 1));
    Place(id);
  }

  void Touch(EntryId id) override {
    EntryLists::Node& node = lists_[id];
    if (node.level < kLevels - 1) ++node.level;
    if (node.uses < 0xFF) ++node.uses;
    Place(id);
  }

  void Remove(EntryId id) override { lists_.Erase(id); }

  EntryId Evict(absl::FunctionRef<bool(EntryId)> may_leave) override {
    for (int asks = 0; asks < kAsksMax; ++asks) {
      const EntryId victim = Oldest();
      if (victim == kNoEntry) return kNoEntry;
      if (may_leave(victim)) {
        AddGhost(lists_[victim]);
        lists_.Erase(victim);
        return victim;
      }
      lists_[victim].stamp = now_;
      lists_.MoveToFront(lists_[victim].level, victim);
    }
    return kNoEntry;
  }

  bool Contains(EntryId id) const override { return lists_.Contains(id); }
  EntryId Parent(EntryId id) const override { return lists_.Parent(id); }
  std::uint32_t size() const override { return lists_.size(); }
  std::string_view name() const override { return "returns"; }
  std::size_t bytes() const override { return lists_.bytes() + ghosts_.bytes(); }
  std::uint32_t entries_max() const override { return options_.entries_max; }

 private:
  static Options WithLeafFirst(Options options) {
    options.leaf_first = true;
    return options;
  }

  // Saturated levels and uses make this a lower bound; for a block used that often it matters not.
  static int BirthLevel(const EntryLists::Node& node) {
    return std::max(0, int{node.level} - int{node.uses});
  }

  void Place(EntryId id) {
    EntryLists::Node& node = lists_[id];
    node.stamp = now_;
    lists_.MoveToFrontOfChain(node.level, id);
  }

  // Passing over parents is bounded as long as there is any leaf to name.
  EntryId Oldest() {
    const EntryId oldest = OldestBehind(kParksMax);
    return oldest != kNoEntry ? oldest : OldestBehind(options_.entries_max);
  }

  EntryId OldestBehind(std::uint32_t parks_max) {
    EntryId oldest = kNoEntry;
    float oldest_age = -1;
    for (int level = 0; level < kLevels; ++level) {
      const EntryId back = lists_.BackLeaf(level, parks_max);
      if (back == kNoEntry) continue;
      const auto age = static_cast<float>(now_ - lists_[back].stamp);  // Modulo 2^32.
      const float weighted_age = age / (1.0f + alpha_ * static_cast<float>(level));
      if (weighted_age > oldest_age) {
        oldest_age = weighted_age;
        oldest = back;
      }
    }
    return oldest;
  }

  void Learn(int ghost_level) {
    const float mean = static_cast<float>(ghost_levels_) / static_cast<float>(ghost_count_);
    const float step =
        kAlphaGain / static_cast<float>(blocks_most_) * (static_cast<float>(ghost_level) - mean);
    alpha_ = std::clamp(alpha_ * (1.0f + std::clamp(step, -0.1f, 0.1f)), kAlphaMin, kAlphaMax);
  }

  void AddGhost(const EntryLists::Node& node) {
    const std::uint32_t displaced = ghosts_.Add(node.key_hash, node.level + 1u);
    ++ghost_count_;
    ghost_levels_ += node.level;
    if (displaced != 0) ForgetGhost(static_cast<int>(displaced) - 1);
  }
  void ForgetGhost(int level) {
    --ghost_count_;
    ghost_levels_ -= static_cast<std::uint64_t>(level);
  }

  Options options_;
  EntryLists lists_;  // One a level.
  GhostTable ghosts_;
  std::uint32_t now_ = 0;  // Blocks that entered, modulo 2^32.
  // What the tier has had room for: paces the learning, where capacity_blocks may be far off.
  std::uint32_t blocks_most_ = 0;
  float alpha_ = kAlphaFirst;
  std::uint64_t ghost_count_ = 0;
  std::uint64_t ghost_levels_ = 0;  // Their sum.
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewReturnsPolicy(const EvictionPolicy::Options& options) {
  return std::make_unique<ReturnsPolicy>(options);
}

}  // namespace kvmill
