// A block that comes whole and sealed from another node, on its way into the tiered store.
//
// TieredStore::BeginCopy gives memory of the host pool for its pages; whoever copies the block lets
// them be received there, in any order, and then commits. Nobody sees the block before that, and
// nothing is left of a copy that is dropped.
#ifndef KVMILL_STORAGE_BLOCK_COPY_H_
#define KVMILL_STORAGE_BLOCK_COPY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/block_writer.h"
#include "storage/core/block_key.h"
#include "storage/page_pool.h"
#include "storage/tenant_accounts.h"

namespace kvmill {

// Movable; of one thread at a time. Its pages count as used host memory and cannot be evicted, so
// whoever makes copies bounds them. May not outlive the store.
class BlockCopy {
 public:
  BlockCopy() = default;  // Not valid.
  BlockCopy(BlockCopy&& other) noexcept;
  BlockCopy& operator=(BlockCopy&& other) noexcept;
  ~BlockCopy() { Drop(); }

  bool valid() const { return store_ != nullptr; }

  // Where the pages go: one a layer of the group, in the group's order, each of exactly the bytes
  // that BeginCopy was told, aligned to 64. What is in them before is of no meaning. Valid until
  // Commit or the end of this object.
  absl::Span<const absl::Span<std::byte>> pages() const { return pages_; }

  // --- Of a block that comes while it is assembled elsewhere ---
  // Another length for the page of a layer, before it is received: pages with raw heads are longer
  // than TieredStore::PlainPageBytes said, which is known when the layer is finished. Nothing when
  // it has that length. On an error, as of BeginCopy, the page stays as it is.
  absl::Status ResizePage(std::size_t layer, std::uint32_t page_bytes, absl::Duration room_wait);
  // The checks of Commit for one page, which nobody may be writing. DATA_LOSS.
  absl::Status CheckPage(std::size_t layer) const;
  // PagesDigest of what is there: to compare with that of the block that was sealed, before Commit.
  std::uint64_t Digest() const;

  // Verifies every page on the calling thread (VerifyPage: namespace, key, group, layer, format,
  // tokens, every checksum; all heads are there) and seals the block: from then on it is like one
  // that was assembled here. The pages must not be written any more. Valid no more afterwards,
  // whatever came of it; unless it is OK nothing is visible and the pages are free.
  //   DATA_LOSS: a page is not what it should be, and says what. Counted as a checksum failure of
  //   the peer tier.
  //   ALREADY_EXISTS: the block was sealed here meanwhile; the first bytes stay.
  //   ABORTED: the block was removed since BeginCopy.
  //   RESOURCE_EXHAUSTED: the index is full.
  absl::Status Commit();

 private:
  friend class TieredStore;
  void Drop();

  class TieredStore* store_ = nullptr;
  BlockId id_;
  BlockOrigin origin_;
  std::uint32_t removals_ = 0;  // TieredStore::Impl::removals_ when it began.
  std::vector<SlotRef> slots_;
  std::vector<absl::Span<std::byte>> pages_;
  TenantCharge charge_;  // For the pages.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_BLOCK_COPY_H_
