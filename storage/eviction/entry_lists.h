// The order in which a policy holds its entries: a few doubly linked lists over one preallocated
// array of nodes (its own, or one that several policies share), and the parent of each entry, so
// that leaves can leave first.
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
#include "storage/eviction/shared_nodes.h"

namespace kvmill {

class EntryLists {
 public:
  using Node = EntryNode;

  EntryLists(const EvictionPolicy::Options& options, int list_count)
      : entries_max_(options.entries_max),
        leaf_first_(options.leaf_first),
        shared_(options.nodes),
        own_(shared_ != nullptr
                 ? 0
                 : std::size_t{options.entries_max} + static_cast<std::size_t>(list_count)),
        nodes_(shared_ != nullptr ? shared_->nodes() : own_.data()),
        sentinels_(shared_ != nullptr ? shared_->ClaimSentinels() : entries_max_),
        lengths_(static_cast<std::size_t>(list_count), 0) {
    KVMILL_CHECK(shared_ == nullptr ||
                 (shared_->entries_max() == entries_max_ && list_count <= SharedNodes::kListsMax));
    for (int list = 0; list < list_count; ++list) {
      nodes_[Sentinel(list)].previous = Sentinel(list);
      nodes_[Sentinel(list)].next = Sentinel(list);
    }
  }
  // Shared nodes are as if nobody had known them.
  ~EntryLists();
  EntryLists(const EntryLists&) = delete;
  EntryLists& operator=(const EntryLists&) = delete;

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
  // Of its own nodes; shared ones are counted by who shares them.
  std::size_t bytes() const { return own_.size() * sizeof(Node); }

 private:
  static constexpr std::uint8_t kUnknown = EntryNode::kUnknown;

  std::uint32_t Sentinel(int list) const { return sentinels_ + static_cast<std::uint32_t>(list); }
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
  SharedNodes* const shared_;  // Null: own_ are the nodes.
  std::vector<Node> own_;
  Node* const nodes_;  // Entries, and from sentinels_ on one sentinel a list.
  const std::uint32_t sentinels_;
  std::vector<std::uint32_t> lengths_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_ENTRY_LISTS_H_
