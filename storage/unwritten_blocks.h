// Blocks that are in memory and on no disk, by tenant: what a flush has to write, without a walk of
// the index.
//
// Internal to storage/, for stores with a disk tier. Thread-safe; changes under the lock of the
// block's entry, whose flags it follows, and so never under two of them for one block.
#ifndef KVMILL_STORAGE_UNWRITTEN_BLOCKS_H_
#define KVMILL_STORAGE_UNWRITTEN_BLOCKS_H_

#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/core/block_key.h"
#include "storage/core/mutex.h"
#include "storage/page_pool.h"

namespace kvmill {

class UnwrittenBlocks {
 public:
  void Add(TenantId tenant, const BlockId& id) {
    MutexLock lock(mu_);
    blocks_[tenant].insert(id);
  }
  // Nothing when it is not there.
  void Remove(TenantId tenant, const BlockId& id) {
    MutexLock lock(mu_);
    const auto of = blocks_.find(tenant);
    if (of == blocks_.end()) return;
    of->second.erase(id);
    if (of->second.empty()) blocks_.erase(of);
  }
  // Of one tenant, or of all.
  std::vector<BlockId> Of(std::optional<TenantId> tenant) const {
    std::vector<BlockId> ids;
    MutexLock lock(mu_);
    for (const auto& [whose, blocks] : blocks_) {
      if (!tenant.has_value() || *tenant == whose)
        ids.insert(ids.end(), blocks.begin(), blocks.end());
    }
    return ids;
  }

 private:
  mutable Mutex mu_;
  absl::flat_hash_map<TenantId, absl::flat_hash_set<BlockId>> blocks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_UNWRITTEN_BLOCKS_H_
