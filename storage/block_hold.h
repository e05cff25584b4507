// A hold on a block that is sealed, being assembled, or expected: what there is of it stays, and
// layers can be read as soon as they are finished, before the block is sealed.
//
// A layer is finished when every head of it is written: its page has then the bytes that it will be
// sealed with. Nothing else in the store sees a block before it is sealed; a hold does, because
// whoever copies a block while it is computed (docs/decisions/0031-tickets.md) seals its copy only
// when this store has sealed the block.
#ifndef KVMILL_STORAGE_BLOCK_HOLD_H_
#define KVMILL_STORAGE_BLOCK_HOLD_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Called without a lock, by the thread that wrote or ended the block, which waits: post it
// somewhere. Not called for what was so when Hold returned. May come a moment after the hold was
// let go, and `finished` a moment after `ended`.
struct BlockHoldListener {
  std::function<void(std::uint32_t layer)> finished;  // Place in the layer group. May be null.
  std::function<void()> ended;                        // kSealed or kFailed; once. May be null.
};

// Made by TieredStore::Hold. Thread-safe. Whoever reads a page shares the hold until it has been
// read; the last one lets the block go. May not outlive the store.
class BlockHold {
 public:
  enum class State {
    kExpected,    // Not there. Whoever stores the block next is followed.
    kAssembling,  // Some layers may be finished.
    kSealed,      // All are, and nothing changes any more.
    kFailed,      // Given up by its writers, or sealed with other bytes; finished layers stay.
  };
  ~BlockHold();
  BlockHold(const BlockHold&) = delete;
  BlockHold& operator=(const BlockHold&) = delete;

  const BlockId& id() const { return id_; }
  State state() const;
  // Why it failed; OK otherwise.
  absl::Status why() const;
  // The page of a finished layer; empty when it is not finished. Stays there, unchanged, as long as
  // this object.
  absl::Span<const std::byte> Page(std::uint32_t layer) const;
  // Of a sealed block, PagesDigest of all its pages; 0 of others.
  std::uint64_t digest() const;

 private:
  friend class TieredStore;
  BlockHold(TieredStore& store, const BlockId& id, const BlockOrigin& origin,
            BlockHoldListener listener)
      : store_(store), id_(id), origin_(origin), listener_(std::move(listener)) {}

  // From kExpected.
  void Follow(std::shared_ptr<BlockWriter::Assembly> assembly);
  // Null: whether it is kExpected.
  bool Follows(const BlockWriter::Assembly* assembly) const;
  // True for whoever ended it, who tells the listener.
  bool End(BlockRef sealed);
  bool Fail(const absl::Status& why);

  TieredStore& store_;
  const BlockId id_;
  const BlockOrigin origin_;
  const BlockHoldListener listener_;

  // Taken after the store's own, never before.
  mutable Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kExpected;
  absl::Status why_ ABSL_GUARDED_BY(mu_);
  // Shared with writers and the store. Kept to the end: it owns the pages of a block that failed.
  std::shared_ptr<BlockWriter::Assembly> assembly_ ABSL_GUARDED_BY(mu_);
  BlockRef sealed_ ABSL_GUARDED_BY(mu_);
  std::uint64_t digest_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_BLOCK_HOLD_H_
