// An observer of the store that also hears where blocks are, and looks it up.
//
// Given as TieredStore::Options::observer, which tells the store that there is more to tell.
#ifndef KVMILL_STORAGE_BLOCK_WATCHER_H_
#define KVMILL_STORAGE_BLOCK_WATCHER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "storage/core/block_key.h"
#include "storage/core/tier.h"
#include "storage/store_observer.h"

namespace kvmill {

// What is so of a block now.
struct BlockState {
  bool whole = false;       // Every layer group of the namespace is here, in some tier.
  Tier tier = Tier::kDisk;  // Of a whole block: of the fastest tiers of its groups, the slowest.
  std::uint16_t token_count = 0;
};

// Where to look. Thread-safe; never blocks, and changes and counts nothing.
class BlockLook {
 public:
  // One answer a key (same size).
  virtual void LookAt(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
                      absl::Span<BlockState> found) const = 0;

 protected:
  ~BlockLook() = default;
};

// Each call says that something happened, not what is so now, as StoreObserver::Changed does, and
// under the same rules: who wants to know looks after the call.
class BlockWatcher : public StoreObserver {
 public:
  // Before everything else: lives as long as the store.
  virtual void Watch(const BlockLook& look) = 0;

  // Whether it asks for the places of blocks in their sequences (RunLink), which cost the index 16
  // bytes a block. Constant.
  virtual bool wants_links() const { return false; }

  // This layer group of the block was sealed here a moment ago. `parent`: the block before it, as
  // far as who stored it said; may be empty.
  virtual void Stored(const BlockId& id, const BlockKey& parent) = 0;
  // It left the last tier that had it.
  virtual void Removed(const BlockId& id) = 0;
  // The fastest tier that has it is another one now.
  virtual void Moved(const BlockId& id) = 0;

  // All blocks of the namespace that are there now are about to be removed, each with a Removed;
  // then Cleared is called.
  virtual void Clearing(NamespaceId space) = 0;
  virtual void Cleared(NamespaceId space) = 0;

 private:
  void Changed(const BlockId&) final {}  // Stored or Removed was called instead.
};

// A watcher and an observer, told one after the other. Borrows both; `observer` may be null.
class WatcherAndObserver final : public BlockWatcher {
 public:
  WatcherAndObserver(BlockWatcher& watcher, StoreObserver* observer)
      : watcher_(watcher), observer_(observer) {}

  void Watch(const BlockLook& look) override { watcher_.Watch(look); }
  bool wants_links() const override { return observer_ != nullptr || watcher_.wants_links(); }
  void Stored(const BlockId& id, const BlockKey& parent) override {
    watcher_.Stored(id, parent);
    if (observer_ != nullptr) observer_->Changed(id);
  }
  void Removed(const BlockId& id) override {
    watcher_.Removed(id);
    if (observer_ != nullptr) observer_->Changed(id);
  }
  void Moved(const BlockId& id) override { watcher_.Moved(id); }
  void Clearing(NamespaceId space) override { watcher_.Clearing(space); }
  void Cleared(NamespaceId space) override { watcher_.Cleared(space); }

 private:
  BlockWatcher& watcher_;
  StoreObserver* const observer_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_BLOCK_WATCHER_H_
