// The order in which a policy holds its entries: a few doubly linked lists over one preallocated
// array of nodes, and the parent of each entry, so that leaves can leave first.
//
// Internal to storage/eviction. Not thread-safe. Allocates in the constructor only.
//
// An entry is on exactly one list. The back of a list is where its victims come from. An entry that
// is found there while it still has children is parked: it stays a member of its list, but out of
// order, until its last child leaves; then it returns to the back, where it was found. Each parking
// is paid for by one earlier placement, so BackLeaf() is constant time, amortized.
#ifndef KVMILL_STORAGE_EVICTION_ENTRY_LISTS_H_
#define KVMILL_STORAGE_EVICTION_ENTRY_LISTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/core/check.h"
#include "storage/eviction/policy.h"

namespace kvmill {

class EntryLists {
 public:
  struct Node {
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
  static_assert(sizeof(Node) == 32);

  EntryLists(const EvictionPolicy::Options& options, int list_count)
      : entries_max_(options.entries_max),
        leaf_first_(options.leaf_first),
        nodes_(std::size_t{options.entries_max} + static_cast<std::size_t>(list_count)),
        lengths_(static_cast<std::size_t>(list_count), 0) {
    for (std::uint32_t i = entries_max_; i < nodes_.size(); ++i) {
      nodes_[i].previous = i;
      nodes_[i].next = i;
    }
  }

  bool Contains(EntryId id) const { return id < entries_max_ && nodes_[id].list != kUnknown; }
  Node& operator[](EntryId id) {
    KVMILL_DCHECK(Contains(id));
    return nodes_[id];
  }
  const Node& operator[](EntryId id) const {
    KVMILL_DCHECK(Contains(id));
    return nodes_[id];
  }

  // The parent of a known entry, or kNoEntry when it has none here.
  EntryId Parent(EntryId id) const {
    const Node& node = nodes_[id];
    if (node.parent == kNoEntry) return kNoEntry;
    const Node& parent = nodes_[node.parent];
    const bool same = parent.list != kUnknown && parent.incarnation == node.parent_incarnation;
    return same ? node.parent : kNoEntry;
  }

  // Makes `id` known, with its parent, at the front of `list`.
  void Insert(int list, EntryId id, const EntryTraits& traits);
  // Forgets `id`.
  void Erase(EntryId id);

  void MoveToFront(int list, EntryId id) {
    Detach(id);
    LinkAfter(Sentinel(list), list, id);
  }
  // Right behind `ahead`, on its list. `ahead` must not be parked, nor be `id`.
  void MoveBehind(EntryId ahead, EntryId id) {
    KVMILL_DCHECK(ahead != id && !nodes_[ahead].parked);
    Detach(id);
    LinkAfter(ahead, nodes_[ahead].list, id);
  }
  // To the front, or right behind its parent where that is on the same list: a parent that was
  // touched just before stays ahead of its children, and so leaves after them.
  void MoveToFrontOfChain(int list, EntryId id) {
    const EntryId parent = Parent(id);
    if (parent != kNoEntry && nodes_[parent].list == list && !nodes_[parent].parked) {
      MoveBehind(parent, id);
    } else {
      MoveToFront(list, id);
    }
  }

  // The entry nearest the back of `list` that has no children here; kNoEntry when there is none, or
  // none behind the first `parks_max` entries that have children. Parks those that it passes.
  EntryId BackLeaf(int list, std::uint32_t parks_max = kNoEntry) {
    for (std::uint32_t parks = 0;; ++parks) {
      const std::uint32_t back = nodes_[Sentinel(list)].previous;
      if (back >= entries_max_) return kNoEntry;
      if (nodes_[back].children == 0) return back;
      if (parks == parks_max) return kNoEntry;
      Park(back);
    }
  }
  // Takes an entry that has children out of the order of its list.
  void Park(EntryId id);

  // Neighbours on the list, or kNoEntry at its end. For parked entries: kNoEntry.
  EntryId Ahead(EntryId id) const { return AsEntry(nodes_[id].previous); }
  EntryId Back(int list) const { return AsEntry(nodes_[Sentinel(list)].previous); }

  // Entries whose list it is, parked ones too.
  std::uint32_t length(int list) const { return lengths_[static_cast<std::size_t>(list)]; }
  std::uint32_t size() const { return size_; }
  std::size_t bytes() const { return nodes_.size() * sizeof(Node); }

 private:
  static constexpr std::uint8_t kUnknown = 0xFF;

  std::uint32_t Sentinel(int list) const { return entries_max_ + static_cast<std::uint32_t>(list); }
  EntryId AsEntry(std::uint32_t index) const { return index < entries_max_ ? index : kNoEntry; }

  void Unlink(EntryId id) {
    Node& node = nodes_[id];
    nodes_[node.previous].next = node.next;
    nodes_[node.next].previous = node.previous;
  }
  // Off its list, parked or not.
  void Detach(EntryId id) {
    Node& node = nodes_[id];
    if (!node.parked) Unlink(id);
    node.parked = false;
    --lengths_[node.list];
  }
  void LinkAfter(std::uint32_t ahead, int list, EntryId id) {
    Node& node = nodes_[id];
    node.list = static_cast<std::uint8_t>(list);
    node.previous = ahead;
    node.next = nodes_[ahead].next;
    nodes_[node.next].previous = id;
    nodes_[ahead].next = id;
    ++lengths_[static_cast<std::size_t>(list)];
  }

  std::uint32_t entries_max_;
  bool leaf_first_;
  std::uint32_t size_ = 0;
  std::vector<Node> nodes_;  // Entries, then one sentinel a list.
  std::vector<std::uint32_t> lengths_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_ENTRY_LISTS_H_
