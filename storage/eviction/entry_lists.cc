#include "storage/eviction/entry_lists.h"

namespace kvmill {

EntryLists::~EntryLists() {
  if (shared_ == nullptr) return;
  // Parents wait for their children, which may be on another list.
  for (std::uint32_t erased = 1; erased > 0;) {
    erased = 0;
    for (int list = 0; list < static_cast<int>(lengths_.size()); ++list) {
      for (EntryId leaf = BackLeaf(list); leaf != kNoEntry; leaf = BackLeaf(list), ++erased) {
        Erase(leaf);
      }
    }
  }
  // What is left waits for a child that it no longer has (see EntryNode::incarnation).
  for (EntryId id = 0; size_ > 0 && id < entries_max_; ++id) {
    const bool here =
        nodes_[id].previous >= sentinels_ && nodes_[id].previous < sentinels_ + lengths_.size();
    if (!nodes_[id].parked || !here || !Contains(id)) continue;
    nodes_[id].list = kUnknown;
    --size_;
  }
  shared_->ReturnSentinels(sentinels_);
}

void EntryLists::Insert(int list, EntryId id, const EntryTraits& traits) {
  KVMILL_CHECK(id < entries_max_ && nodes_[id].list == kUnknown);
  Node& node = nodes_[id];
  node.parent = kNoEntry;
  node.children = 0;
  node.key_hash = static_cast<std::uint32_t>(traits.key_hash >> 32);
  node.stamp = 0;
  node.level = 0;
  node.uses = 0;
  node.parked = false;
  if (leaf_first_ && traits.parent != id && Contains(traits.parent)) {
    Node& parent = nodes_[traits.parent];
    node.parent = traits.parent;
    node.parent_incarnation = parent.incarnation;
    ++parent.children;
  }
  LinkAfter(Sentinel(list), list, id);
  ++size_;
}

void EntryLists::Erase(EntryId id) {
  KVMILL_CHECK(Contains(id));
  Node& node = nodes_[id];
  if (const EntryId parent_id = Parent(id); parent_id != kNoEntry) {
    Node& parent = nodes_[parent_id];
    KVMILL_DCHECK(parent.children > 0);
    if (parent.children > 0 && --parent.children == 0 && parent.parked) {
      const int list = parent.list;
      Detach(parent_id);
      LinkAfter(nodes_[Sentinel(list)].previous, list, parent_id);
    }
  }
  Detach(id);
  if (node.children > 0) ++node.incarnation;
  node.list = kUnknown;
  --size_;
}

void EntryLists::Park(EntryId id) {
  KVMILL_DCHECK(!nodes_[id].parked && nodes_[id].children > 0);
  Unlink(id);
  nodes_[id].previous = Sentinel(nodes_[id].list);
  nodes_[id].parked = true;
}

}  // namespace kvmill
