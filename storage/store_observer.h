// Who wants to know when blocks come to the tiered store or leave it.
#ifndef KVMILL_STORAGE_STORE_OBSERVER_H_
#define KVMILL_STORAGE_STORE_OBSERVER_H_

#include "storage/core/block_key.h"

namespace kvmill {

class StoreObserver {
 public:
  virtual ~StoreObserver() = default;

  // This layer group of the block was sealed here, or left the last tier that had it, a moment ago;
  // moves between tiers are no change. Says that something happened, not what: two calls may come
  // in another order than what they tell of, so who wants to know looks (TieredStore::Inspect)
  // after the call. What is looked up then is never older than the call.
  //
  // Called from any thread of the store or of its callers, without a lock held, while they work:
  // must return at once.
  virtual void Changed(const BlockId& id) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_STORE_OBSERVER_H_
