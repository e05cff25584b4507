// Every block that this daemon knows, in any tier.
//
// A sharded hash table from BlockId (full key compared) to BlockEntry, addressed by a dense EntryId
// that stays valid until Free. Metadata budget: at most 192 bytes a block, key and table included,
// plus 16 bytes a page (design: index); metadata_bytes() reports it.
//
// A lookup touches two cache lines: a cell of the table, and the entry, which is one line and holds
// all that is compared. Both lie in memory reserved for entries_max blocks, so that growing moves
// no entry and no address is read from memory. A table is cut into segments of at most a few
// thousand blocks that grow one by one: no insert waits for more than one of them.
//
// Thread-safe. Entries are read and changed under their shard's lock only, inside the callbacks of
// Find, With and ForEach; callbacks must be short and must not call the index, block or do I/O.
#ifndef KVMILL_STORAGE_BLOCK_INDEX_H_
#define KVMILL_STORAGE_BLOCK_INDEX_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/core/block_key.h"
#include "storage/core/run_link.h"
#include "storage/eviction/policy.h"
#include "storage/page_pool.h"

namespace kvmill {

// Where one page of a block is. `slot` is of the pool that the block's flags name, and invalid
// while the block is in no memory; `page_bytes` always holds.
struct PagePlace {
  SlotRef slot;
  std::uint32_t page_bytes = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(PagePlace) == 16);

enum BlockFlags : std::uint8_t {
  kInHost = 1,     // The places are valid, in the host pool.
  kOnDisk = 2,     // The disk store has it.
  kUnwritten = 4,  // Waits for the disk or is being written: it must not leave memory.
  kDetached = 8,   // Not in the table any more; lives on for its references.
  kFreed = 16,     // The index's own: not a block at all.
  kInGpu = 32,     // The places are valid, in the GPU's pool; never together with kInHost.
  kLeaving = 64,   // With kInGpu: chosen to leave, in no order of eviction while it is copied.
};

class alignas(64) BlockEntry {
 public:
  BlockId id() const;
  NamespaceId namespace_id() const { return namespace_id_; }
  std::uint64_t bytes() const {  // Of all pages; the same as long as the block is there.
    std::uint64_t sum = 0;
    for (const PagePlace& place : pages()) sum += place.page_bytes;
    return sum;
  }
  absl::Span<PagePlace> pages() {  // One a layer of the group.
    return absl::MakeSpan(places_, page_count_);
  }
  absl::Span<const PagePlace> pages() const { return absl::MakeConstSpan(places_, page_count_); }

  std::uint32_t references = 0;     // Pins; pages of a referenced entry stay.
  std::uint32_t inserted_at_s = 0;  // Of the owner's clock.
  std::uint16_t token_count = 0;
  std::uint8_t flags = 0;  // BlockFlags.
  std::uint8_t uses = 0;   // Since it came; 255 is as many, or more.

 private:
  friend class BlockIndex;
  static constexpr std::size_t kKeyBytesInline = 32;

  bool Is(NamespaceId namespace_id, std::uint8_t group, const BlockKey& key) const;
  // A longer key continues in the two places before the first one.
  bool has_long_key() const { return key_size_ > kKeyBytesInline; }

  std::uint8_t group_ = 0;
  std::uint8_t key_size_ = 0;
  std::uint16_t page_count_ = 0;
  NamespaceId namespace_id_ = 0;
  std::uint32_t tag_ = 0;  // The high half of the hash.
  PagePlace* places_ = nullptr;
  std::array<std::byte, kKeyBytesInline> key_{};  // Zeros behind a shorter one.
};
static_assert(sizeof(BlockEntry) == 64);

class BlockIndex {
 public:
  struct Options {
    std::uint32_t entries_max = 0;  // 1 to 2^31.
    bool keeps_links = false;       // 16 bytes a block more.
    // For tests that need keys to collide.
    std::uint64_t (*hash)(NamespaceId, std::uint8_t group, const BlockKey&) = &HashOf;
  };
  static absl::StatusOr<std::unique_ptr<BlockIndex>> Create(const Options& options);
  ~BlockIndex();

  // Adds a block with `page_count` (at most 65535) empty places; `init` fills the entry before
  // anyone can find it. ALREADY_EXISTS, RESOURCE_EXHAUSTED (naming the limit). `link` is dropped
  // unless the index keeps links.
  absl::StatusOr<EntryId> Insert(const BlockId& id, std::size_t page_count,
                                 absl::FunctionRef<void(BlockEntry&)> init,
                                 const RunLink& link = RunLink());

  // Calls `use` with the block's entry; false when it is not in the table.
  bool Find(const BlockId& id, absl::FunctionRef<void(EntryId, BlockEntry&)> use);
  // The same for an entry that the caller knows to exist (detached ones included).
  void With(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use);
  // The same for any number; false when no block in the table has it now.
  bool At(EntryId entry, absl::FunctionRef<void(const BlockEntry&)> use) const;
  // What was given to Insert. Under the entry's lock: in the callbacks of Find, At and ForNext.
  RunLink LinkOf(EntryId entry) const;

  // What Find of these will look at, to the cache. A hint; takes no lock.
  void Prefetch(absl::Span<const BlockId> ids) const;

  // One answer a key, for many keys of one namespace and group, with prefetching: the entry's flags
  // and token count, flags 0 when absent.
  struct Presence {
    std::uint8_t flags = 0;
    std::uint16_t token_count = 0;
  };
  void FindBatch(NamespaceId namespace_id, std::uint8_t group, absl::Span<const BlockKey> keys,
                 absl::Span<Presence> found) const;

  // Takes the entry out of the table (the id becomes free for a new block) and sets kDetached;
  // entry and places stay until Free. `use` is called under the same lock. False when it was
  // detached already.
  bool Detach(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use);
  // Gives a detached entry back, once. Its places must be empty, nobody may refer to it.
  void Free(EntryId entry);

  // Visits blocks in the table, shard by shard, a bounded number under one lock; `visit` returns
  // false to stop. Blocks that come or go meanwhile may be missed.
  void ForEach(absl::FunctionRef<bool(EntryId, const BlockEntry&)> visit) const;
  // The same in steps of at most kStepEntries blocks, under one lock each. False, and nothing
  // visited, at the end.
  static constexpr std::uint32_t kStepEntries = 256;
  struct Cursor {
    std::uint32_t shard = 0;
    std::uint32_t local = 0;
  };
  bool ForNext(Cursor* cursor, absl::FunctionRef<void(EntryId, const BlockEntry&)> visit) const;

  std::uint32_t ids_max() const;         // Every EntryId is below; a little more than entries_max.
  std::uint64_t size() const;            // Blocks in the table.
  std::uint64_t metadata_bytes() const;  // Everything the index has touched.

 private:
  class Impl;
  explicit BlockIndex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_BLOCK_INDEX_H_
