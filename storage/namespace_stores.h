// How much each namespace stored since the start: what is counted when a block is sealed.
#ifndef KVMILL_STORAGE_NAMESPACE_STORES_H_
#define KVMILL_STORAGE_NAMESPACE_STORES_H_

#include <array>
#include <atomic>
#include <cstdint>

#include "storage/core/block_key.h"
#include "storage/namespace_table.h"

namespace kvmill {

// Thread-safe; takes no lock. 64 KiB.
class NamespaceStores {
 public:
  struct Stored {
    std::uint64_t blocks = 0;  // Layer groups of blocks.
    std::uint64_t bytes = 0;   // Of their pages.
  };
  void Add(NamespaceId id, std::uint64_t bytes) {
    counts_[id].blocks.fetch_add(1, std::memory_order_relaxed);
    counts_[id].bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  // The two may be a store apart.
  Stored Of(NamespaceId id) const {
    return {counts_[id].blocks.load(std::memory_order_relaxed),
            counts_[id].bytes.load(std::memory_order_relaxed)};
  }

 private:
  struct Counts {
    std::atomic<std::uint64_t> blocks{0}, bytes{0};
  };
  std::array<Counts, kNamespacesMax> counts_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_NAMESPACE_STORES_H_
