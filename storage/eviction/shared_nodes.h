// Memory for the orders of several eviction policies, each with few of the entries: one node an
// entry, which belongs to the one policy that knows the entry, and sentinels for the lists of each.
//
// Internal to storage/. Not thread-safe: its policies are called under one lock. Allocates in the
// constructor only.
#ifndef KVMILL_STORAGE_EVICTION_SHARED_NODES_H_
#define KVMILL_STORAGE_EVICTION_SHARED_NODES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/core/check.h"
#include "storage/eviction/policy.h"

namespace kvmill {

// Of one entry; see storage/eviction/entry_lists.h.
struct EntryNode {
  static constexpr std::uint8_t kUnknown = 0xFF;

  std::uint32_t previous = 0;  // Towards the front.
  std::uint32_t next = 0;      // Towards the back.
  EntryId parent = kNoEntry;
  std::uint32_t children = 0;
  std::uint32_t key_hash = 0;  // The high half of EntryTraits::key_hash; for ghosts.
  std::uint32_t stamp = 0;     // The policy's own: when it was last used.
  // An id may be reused while children of its former block are still here (Remove allows it).
  // They name a former incarnation and are then without a parent. 65536 such reuses under one
  // child would cost that child's new "parent" a count, which is only an order.
  std::uint16_t incarnation = 0;
  std::uint16_t parent_incarnation = 0;
  std::uint8_t list = kUnknown;
  bool parked = false;
  std::uint8_t level = 0;  // The policy's own.
  std::uint8_t uses = 0;   // The policy's own.
};
static_assert(sizeof(EntryNode) == 32);

class SharedNodes {
 public:
  static constexpr int kListsMax = 15;  // Of one policy.

  SharedNodes(std::uint32_t entries_max, std::uint32_t policies_max)
      : entries_max_(entries_max),
        nodes_(std::size_t{entries_max} + std::size_t{policies_max} * kListsMax) {
    for (std::uint32_t i = policies_max; i-- > 0;) free_.push_back(entries_max + i * kListsMax);
  }

  std::uint32_t entries_max() const { return entries_max_; }
  std::size_t bytes() const { return nodes_.size() * sizeof(EntryNode); }

  // For EntryLists. The first of kListsMax nodes behind those of the entries; there are
  // policies_max.
  EntryNode* nodes() { return nodes_.data(); }
  std::uint32_t ClaimSentinels() {
    KVMILL_CHECK(!free_.empty());
    const std::uint32_t first = free_.back();
    free_.pop_back();
    return first;
  }
  void ReturnSentinels(std::uint32_t first) { free_.push_back(first); }

 private:
  const std::uint32_t entries_max_;
  std::vector<EntryNode> nodes_;
  std::vector<std::uint32_t> free_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_SHARED_NODES_H_
