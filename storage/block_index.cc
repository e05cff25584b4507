#include "storage/block_index.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kShardBits = 6;
constexpr std::uint32_t kShardCount = 1u << kShardBits;
constexpr std::uint32_t kChunkEntries = 1024;
constexpr std::uint32_t kNone = 0xFFFFFFFFu;

// The hash is split: the low bits choose the shard, the high 32 bits (the tag) the place in its
// table. A table can then be rebuilt from the tags alone, without touching an entry.
constexpr std::uint32_t ShardOf(std::uint64_t hash) {
  return static_cast<std::uint32_t>(hash) & (kShardCount - 1);
}
constexpr std::uint32_t TagOf(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }

// Arrays of PagePlace of one length, carved from chunks that are never given back.
class PlaceSlab {
 public:
  explicit PlaceSlab(std::size_t length) : length_(length) {}

  PagePlace* Allocate(std::uint64_t* allocated_bytes) {
    if (free_ == nullptr) Grow(allocated_bytes);
    PagePlace* array = free_;
    std::memcpy(&free_, array, sizeof(free_));
    std::fill_n(array, length_, PagePlace{});
    return array;
  }
  void Free(PagePlace* array) {
    std::memcpy(static_cast<void*>(array), &free_, sizeof(free_));
    free_ = array;
  }

 private:
  static_assert(sizeof(PagePlace) >= sizeof(PagePlace*), "the free list lives in the free arrays");

  void Grow(std::uint64_t* allocated_bytes) {
    // From 8 arrays a chunk to 64: little is wasted for few blocks, and little overhead for many.
    const std::size_t arrays = std::size_t{8} << std::min<std::size_t>(chunks_.size(), 3);
    chunks_.push_back(std::make_unique<PagePlace[]>(arrays * length_));
    *allocated_bytes += arrays * length_ * sizeof(PagePlace);
    for (std::size_t i = arrays; i-- > 0;) Free(chunks_.back().get() + i * length_);
  }

  const std::size_t length_;
  PagePlace* free_ = nullptr;
  std::vector<std::unique_ptr<PagePlace[]>> chunks_;
};

}  // namespace

class BlockIndex::Impl {
 public:
  explicit Impl(std::uint32_t entries_max)
      : entries_max_(entries_max),
        // Hashes fill shards unevenly: one sixteenth more is over eight standard deviations at
        // 16,384 entries a shard, and the constant covers small indexes.
        shard_entries_max_(entries_max / kShardCount + entries_max / kShardCount / 16 + 64) {}

  struct Shard {
    mutable Mutex mu;
    // Open addressing with linear probing; 0 is empty, else tag << 32 | local + 1. The pointer and
    // mask are atomic only so that a prefetch can compute an address without the lock; it may be
    // stale, and is never dereferenced.
    std::vector<std::uint64_t> table ABSL_GUARDED_BY(mu);
    std::atomic<const std::uint64_t*> table_hint{nullptr};
    std::atomic<std::uint32_t> mask_hint{0};
    std::uint32_t used ABSL_GUARDED_BY(mu) = 0;
    std::vector<std::unique_ptr<BlockEntry[]>> chunks;  // Grows under mu; elements never move.
    std::uint32_t entry_count ABSL_GUARDED_BY(mu) = 0;  // Locals handed out so far.
    std::uint32_t free_head ABSL_GUARDED_BY(mu) =
        kNone;  // Freed locals, chained through BlockEntry::inserted_at_s.
    std::map<std::size_t, PlaceSlab> slabs ABSL_GUARDED_BY(mu);  // By array length.
    std::uint64_t allocated_bytes ABSL_GUARDED_BY(mu) = 0;

    BlockEntry& entry(std::uint32_t local) const {
      return chunks[local / kChunkEntries][local % kChunkEntries];
    }
  };

  Shard& ShardAt(std::uint64_t hash) { return shards_[ShardOf(hash)]; }
  static EntryId IdOf(std::uint32_t shard, std::uint32_t local) {
    return local << kShardBits | shard;
  }
  static std::uint32_t LocalOf(EntryId id) { return id >> kShardBits; }

  // The block's local number, kNone when it is not in the shard.
  template <typename Matches>
  static std::uint32_t Probe(const Shard& shard, std::uint64_t hash, Matches matches)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    if (shard.table.empty()) return kNone;
    const std::uint32_t mask = static_cast<std::uint32_t>(shard.table.size() - 1);
    const std::uint32_t tag = TagOf(hash);
    for (std::uint32_t at = tag & mask;; at = (at + 1) & mask) {
      const std::uint64_t cell = shard.table[at];
      if (cell == 0) return kNone;
      if (static_cast<std::uint32_t>(cell >> 32) != tag) continue;
      const std::uint32_t local = static_cast<std::uint32_t>(cell) - 1;
      if (matches(local)) return local;
    }
  }
  static std::uint32_t Probe(const Shard& shard, std::uint64_t hash, const BlockId& id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    return Probe(shard, hash, [&](std::uint32_t local) { return shard.entry(local).id == id; });
  }

  static void Place(std::vector<std::uint64_t>& table, std::uint64_t cell) {
    const std::uint32_t mask = static_cast<std::uint32_t>(table.size() - 1);
    std::uint32_t at = static_cast<std::uint32_t>(cell >> 32) & mask;
    while (table[at] != 0) at = (at + 1) & mask;
    table[at] = cell;
  }

  static void GrowTable(Shard& shard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    std::vector<std::uint64_t> table(std::max<std::size_t>(16, shard.table.size() * 2));
    for (std::uint64_t cell : shard.table) {
      if (cell != 0) Place(table, cell);
    }
    shard.allocated_bytes += (table.size() - shard.table.size()) * sizeof(std::uint64_t);
    shard.table.swap(table);
    shard.table_hint.store(shard.table.data(), std::memory_order_relaxed);
    shard.mask_hint.store(static_cast<std::uint32_t>(shard.table.size() - 1),
                          std::memory_order_relaxed);
  }

  // Takes the cell of `local` out and moves later cells of the same run back, so that no tombstones
  // are needed.
  static void EraseCell(Shard& shard, std::uint64_t hash, std::uint32_t local)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    const std::uint32_t mask = static_cast<std::uint32_t>(shard.table.size() - 1);
    const std::uint64_t cell = std::uint64_t{TagOf(hash)} << 32 | (local + 1);
    std::uint32_t hole = TagOf(hash) & mask;
    while (shard.table[hole] != cell) {
      KVMILL_CHECK(shard.table[hole] != 0);
      hole = (hole + 1) & mask;
    }
    for (std::uint32_t at = (hole + 1) & mask; shard.table[at] != 0; at = (at + 1) & mask) {
      const std::uint32_t home = static_cast<std::uint32_t>(shard.table[at] >> 32) & mask;
      // The cell may move to the hole unless its home lies cyclically in (hole, at].
      if (((at - home) & mask) < ((at - hole) & mask)) continue;
      shard.table[hole] = shard.table[at];
      hole = at;
    }
    shard.table[hole] = 0;
    --shard.used;
  }

  const std::uint32_t entries_max_;
  const std::uint32_t shard_entries_max_;
  std::atomic<std::uint32_t> entries_{0};  // Allocated, detached ones included; bounds the index.
  std::atomic<std::uint64_t> in_table_{0};
  std::array<Shard, kShardCount> shards_;
};

BlockIndex::BlockIndex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockIndex::~BlockIndex() = default;

absl::StatusOr<std::unique_ptr<BlockIndex>> BlockIndex::Create(const Options& options) {
  if (options.entries_max == 0 || options.entries_max > (1u << 31)) {
    return absl::InvalidArgumentError(
        absl::StrCat("index of ", options.entries_max, " blocks: want 1 to ", 1u << 31));
  }
  return std::unique_ptr<BlockIndex>(new BlockIndex(std::make_unique<Impl>(options.entries_max)));
}

absl::StatusOr<EntryId> BlockIndex::Insert(const BlockId& id, std::size_t page_count,
                                           absl::FunctionRef<void(BlockEntry&)> init) {
  const std::uint64_t hash = HashOf(id);
  Impl::Shard& shard = impl_->ShardAt(hash);
  MutexLock lock(shard.mu);
  if (Impl::Probe(shard, hash, id) != kNone)
    return absl::AlreadyExistsError("the block is in the index");

  const bool has_freed = shard.free_head != kNone;
  if (impl_->entries_.fetch_add(1, std::memory_order_relaxed) >= impl_->entries_max_ ||
      (!has_freed && shard.entry_count >= impl_->shard_entries_max_)) {
    impl_->entries_.fetch_sub(1, std::memory_order_relaxed);
    return absl::ResourceExhaustedError(absl::StrCat(
        "the index is full: at most ", impl_->entries_max_, " blocks; evict or remove some"));
  }
  std::uint32_t local = 0;
  if (has_freed) {
    local = shard.free_head;
    shard.free_head = shard.entry(local).inserted_at_s;
  } else {
    local = shard.entry_count++;
    if (local / kChunkEntries == shard.chunks.size()) {
      shard.chunks.push_back(std::make_unique<BlockEntry[]>(kChunkEntries));
      shard.allocated_bytes += kChunkEntries * sizeof(BlockEntry);
    }
  }
  BlockEntry& entry = shard.entry(local);
  entry = BlockEntry{};
  entry.id = id;
  entry.hash = hash;
  if (page_count > 0) {
    PlaceSlab& slab = shard.slabs.try_emplace(page_count, page_count).first->second;
    entry.pages = absl::MakeSpan(slab.Allocate(&shard.allocated_bytes), page_count);
  }
  init(entry);
  // At most three quarters full: linear probes stay short.
  if ((shard.used + 1) * std::size_t{4} > shard.table.size() * 3) Impl::GrowTable(shard);
  Impl::Place(shard.table, std::uint64_t{TagOf(hash)} << 32 | (local + 1));
  ++shard.used;
  impl_->in_table_.fetch_add(1, std::memory_order_relaxed);
  return Impl::IdOf(ShardOf(hash), local);
}

bool BlockIndex::Find(const BlockId& id, absl::FunctionRef<void(EntryId, BlockEntry&)> use) {
  const std::uint64_t hash = HashOf(id);
  Impl::Shard& shard = impl_->ShardAt(hash);
  MutexLock lock(shard.mu);
  const std::uint32_t local = Impl::Probe(shard, hash, id);
  if (local == kNone) return false;
  use(Impl::IdOf(ShardOf(hash), local), shard.entry(local));
  return true;
}

void BlockIndex::With(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use) {
  Impl::Shard& shard = impl_->shards_[entry & (kShardCount - 1)];
  MutexLock lock(shard.mu);
  KVMILL_DCHECK(Impl::LocalOf(entry) < shard.entry_count);
  use(shard.entry(Impl::LocalOf(entry)));
}

void BlockIndex::FindBatch(NamespaceId namespace_id, std::uint8_t group,
                           absl::Span<const BlockKey> keys, absl::Span<Presence> found) const {
  KVMILL_CHECK(found.size() == keys.size());
  // Three passes over a slice, so that the cache misses of table and entry overlap: hash and
  // prefetch the table cell; find the candidate by tag and prefetch its entry; compare the key.
  constexpr std::size_t kSlice = 64;
  std::array<std::uint64_t, kSlice> hashes;
  std::array<std::uint32_t, kSlice> candidates;
  BlockId id;
  id.namespace_id = namespace_id;
  id.group = group;
  for (std::size_t begin = 0; begin < keys.size(); begin += kSlice) {
    const std::size_t count = std::min(kSlice, keys.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      id.key = keys[begin + i];
      hashes[i] = HashOf(id);
      const Impl::Shard& shard = impl_->shards_[ShardOf(hashes[i])];
      const std::uint64_t* table = shard.table_hint.load(std::memory_order_relaxed);
      __builtin_prefetch(table +
                         (TagOf(hashes[i]) & shard.mask_hint.load(std::memory_order_relaxed)));
    }
    for (std::size_t i = 0; i < count; ++i) {
      const Impl::Shard& shard = impl_->shards_[ShardOf(hashes[i])];
      MutexLock lock(shard.mu);
      candidates[i] = Impl::Probe(shard, hashes[i], [](std::uint32_t) { return true; });
      if (candidates[i] == kNone) continue;
      const char* entry = reinterpret_cast<const char*>(&shard.entry(candidates[i]));
      __builtin_prefetch(entry);
      __builtin_prefetch(entry + 64);
    }
    for (std::size_t i = 0; i < count; ++i) {
      found[begin + i] = Presence{};
      if (candidates[i] == kNone) continue;
      id.key = keys[begin + i];
      const Impl::Shard& shard = impl_->shards_[ShardOf(hashes[i])];
      MutexLock lock(shard.mu);
      const BlockEntry* entry = &shard.entry(candidates[i]);
      if ((entry->flags & kDetached) != 0 || !(entry->id == id)) {
        // Another key with this tag, or it changed since: the full probe decides.
        const std::uint32_t local = Impl::Probe(shard, hashes[i], id);
        if (local == kNone) continue;
        entry = &shard.entry(local);
      }
      found[begin + i] = Presence{entry->flags, entry->token_count};
    }
  }
}

bool BlockIndex::Detach(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use) {
  Impl::Shard& shard = impl_->shards_[entry & (kShardCount - 1)];
  MutexLock lock(shard.mu);
  BlockEntry& e = shard.entry(Impl::LocalOf(entry));
  if ((e.flags & kDetached) != 0) return false;
  use(e);
  e.flags |= kDetached;
  Impl::EraseCell(shard, e.hash, Impl::LocalOf(entry));
  impl_->in_table_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void BlockIndex::Free(EntryId entry) {
  Impl::Shard& shard = impl_->shards_[entry & (kShardCount - 1)];
  MutexLock lock(shard.mu);
  BlockEntry& e = shard.entry(Impl::LocalOf(entry));
  KVMILL_CHECK((e.flags & kDetached) != 0 && e.references == 0);
  if (!e.pages.empty()) shard.slabs.at(e.pages.size()).Free(e.pages.data());
  e = BlockEntry{};
  e.flags = kDetached;
  e.inserted_at_s = shard.free_head;
  shard.free_head = Impl::LocalOf(entry);
  impl_->entries_.fetch_sub(1, std::memory_order_relaxed);
}

void BlockIndex::ForEach(absl::FunctionRef<bool(EntryId, const BlockEntry&)> visit) const {
  constexpr std::uint32_t kEntriesPerLock = 256;
  for (std::uint32_t s = 0; s < kShardCount; ++s) {
    const Impl::Shard& shard = impl_->shards_[s];
    for (std::uint32_t begin = 0;; begin += kEntriesPerLock) {
      MutexLock lock(shard.mu);
      if (begin >= shard.entry_count) break;
      const std::uint32_t end = std::min(shard.entry_count, begin + kEntriesPerLock);
      for (std::uint32_t local = begin; local < end; ++local) {
        const BlockEntry& entry = shard.entry(local);
        if ((entry.flags & kDetached) != 0) continue;
        if (!visit(Impl::IdOf(s, local), entry)) return;
      }
    }
  }
}

std::uint32_t BlockIndex::ids_max() const { return impl_->shard_entries_max_ << kShardBits; }

std::uint64_t BlockIndex::size() const { return impl_->in_table_.load(std::memory_order_relaxed); }

std::uint64_t BlockIndex::metadata_bytes() const {
  std::uint64_t bytes = sizeof(Impl);
  for (const Impl::Shard& shard : impl_->shards_) {
    MutexLock lock(shard.mu);
    bytes += shard.allocated_bytes;
  }
  return bytes;
}

}  // namespace kvmill
