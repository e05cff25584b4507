#include "storage/block_index.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/reserved_memory.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kShardBits = 6;
constexpr std::uint32_t kShardCount = 1u << kShardBits;
constexpr std::uint32_t kNone = 0xFFFFFFFFu;
// Growing a segment places each of its blocks anew, in some 10 ns each.
constexpr std::uint32_t kSegmentBlocks = 8192;
constexpr std::uint32_t kPageBytes = 4096;
constexpr std::uint32_t kCellsMin = kPageBytes / sizeof(std::uint64_t);
// Places in front of a block's first one that hold the rest of a long key.
constexpr std::size_t kKeyPlaces = 2;
static_assert(kKeyPlaces * sizeof(PagePlace) >= kBlockKeyBytesMax - 32);

// A hash is split: the low bits choose the shard; of the high half (the tag), the upper bits choose
// the segment of its table and the lower ones the place there. A segment can then be rebuilt from
// the tags in its cells alone, without touching an entry.
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
    std::memcpy(&free_, static_cast<const void*>(array), sizeof(free_));
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

// One part of a shard's table: open addressing with linear probing. A cell is 0 when empty, else
// tag << 32 | local + 1. Written under the shard's lock; cells and mask are atomic because a batch
// looks for candidates without it. Such a reader may see a segment while it grows: what it finds is
// a guess.
struct Segment {
  std::atomic<std::uint32_t> mask{0};  // Cells - 1; 0: none yet.
  std::uint32_t used = 0;
};

}  // namespace

BlockId BlockEntry::id() const {
  std::array<char, kBlockKeyBytesMax> bytes;
  std::memcpy(bytes.data(), key_.data(), kKeyBytesInline);
  if (has_long_key()) {
    std::memcpy(bytes.data() + kKeyBytesInline, places_ - kKeyPlaces,
                kBlockKeyBytesMax - kKeyBytesInline);
  }
  // What is in the index came in as a BlockKey, and only the empty one is not made from bytes.
  return {namespace_id_, group_,
          key_size_ == 0 ? BlockKey() : *BlockKey::FromBytes({bytes.data(), key_size_})};
}

bool BlockEntry::Is(NamespaceId namespace_id, std::uint8_t group, const BlockKey& key) const {
  return std::memcmp(key_.data(), key.data(), kKeyBytesInline) == 0 &&
         namespace_id_ == namespace_id && key_size_ == key.size() && group_ == group &&
         (!has_long_key() || std::memcmp(places_ - kKeyPlaces, key.data() + kKeyBytesInline,
                                         kBlockKeyBytesMax - kKeyBytesInline) == 0);
}

class BlockIndex::Impl {
 public:
  struct alignas(64) Shard {
    mutable Mutex mu;
    std::uint32_t entry_count ABSL_GUARDED_BY(mu) = 0;  // Locals handed out so far.
    std::uint32_t free_head ABSL_GUARDED_BY(mu) =
        kNone;  // Freed locals, chained through BlockEntry::inserted_at_s.
    std::map<std::size_t, PlaceSlab> slabs ABSL_GUARDED_BY(mu);  // By array length.
    std::uint64_t places_bytes ABSL_GUARDED_BY(mu) = 0;
  };

  // How large everything can become.
  struct Shape {
    explicit Shape(std::uint32_t entries_max)
        : blocks_max(entries_max),
          // Hashes fill shards unevenly: one sixteenth more is over eight standard deviations at
          // 16,384 entries a shard, and the constant covers small indexes.
          shard_blocks_max(entries_max / kShardCount + entries_max / kShardCount / 16 + 64),
          segment_bits(static_cast<std::uint32_t>(
              std::bit_width((entries_max / kShardCount) / kSegmentBlocks))),
          // A segment that is full on average is at most half full, however uneven the hashes.
          segment_cells_max(
              std::max(kCellsMin, 4 * std::bit_ceil((shard_blocks_max >> segment_bits) / 2 + 1))) {}

    std::size_t entries_bytes() const {
      return (std::size_t{shard_blocks_max} << kShardBits) * sizeof(BlockEntry);
    }
    std::size_t links_bytes() const {
      return entries_bytes() / sizeof(BlockEntry) * sizeof(RunLink);
    }
    std::size_t cells_bytes() const {
      return (std::size_t{segment_cells_max} << (kShardBits + segment_bits)) *
             sizeof(std::uint64_t);
    }

    std::uint32_t blocks_max;
    std::uint32_t shard_blocks_max;
    std::uint32_t segment_bits;  // Of a shard.
    std::uint32_t segment_cells_max;
  };

  Impl(const Options& options, const Shape& shape, ReservedMemory entries, ReservedMemory cells,
       std::optional<ReservedMemory> links)
      : shape_(shape),
        hash_(options.hash),
        entries_memory_(std::move(entries)),
        cells_memory_(std::move(cells)),
        links_memory_(std::move(links)),
        entries_(reinterpret_cast<BlockEntry*>(entries_memory_.base())),
        cells_(reinterpret_cast<std::atomic<std::uint64_t>*>(cells_memory_.base())),
        links_(links_memory_.has_value() ? reinterpret_cast<RunLink*>(links_memory_->base())
                                         : nullptr),
        segments_(std::size_t{kShardCount} << shape.segment_bits) {}

  static EntryId IdOf(std::uint32_t shard, std::uint32_t local) {
    return local << kShardBits | shard;
  }
  static std::uint32_t LocalOf(EntryId id) { return id >> kShardBits; }
  Shard& ShardAt(EntryId id) { return shards_[id & (kShardCount - 1)]; }

  // Shards fill at the same pace, so entries by id fill their memory from the beginning.
  BlockEntry& EntryAt(EntryId id) const { return entries_[id]; }

  // Where a hash belongs. Computed without any lock.
  struct Home {
    std::uint32_t shard;
    std::uint32_t tag;
    std::size_t segment;
    std::atomic<std::uint64_t>* cells;
  };
  Home HomeOf(std::uint32_t shard, std::uint32_t tag) const {
    const std::size_t segment = std::size_t{shard} << shape_.segment_bits |
                                (std::uint64_t{tag} << shape_.segment_bits) >> 32;
    return {shard, tag, segment, cells_ + segment * shape_.segment_cells_max};
  }
  Home HomeOf(std::uint64_t hash) const { return HomeOf(ShardOf(hash), TagOf(hash)); }
  std::uint32_t MaskOf(const Home& home) const {
    return segments_[home.segment].mask.load(std::memory_order_relaxed);
  }

  // The block's local number, kNone when no cell of the run has the tag and satisfies `matches`.
  // Right under the shard's lock, a guess without.
  template <typename Matches>
  std::uint32_t Probe(const Home& home, Matches matches) const {
    const std::uint32_t mask = MaskOf(home);
    std::uint32_t at = home.tag & mask;
    for (std::uint32_t steps = 0; steps <= mask; ++steps, at = (at + 1) & mask) {
      const std::uint64_t cell = home.cells[at].load(std::memory_order_relaxed);
      if (cell == 0) return kNone;
      if (static_cast<std::uint32_t>(cell >> 32) != home.tag) continue;
      const std::uint32_t local = static_cast<std::uint32_t>(cell) - 1;
      if (matches(local)) return local;
    }
    return kNone;
  }
  std::uint32_t Probe(const Home& home, NamespaceId namespace_id, std::uint8_t group,
                      const BlockKey& key) const {
    return Probe(home, [&](std::uint32_t local) {
      return EntryAt(IdOf(home.shard, local)).Is(namespace_id, group, key);
    });
  }

  // Room for one more cell; false when the segment cannot have any. Under the shard's lock.
  bool Reserve(const Home& home) {
    Segment& segment = segments_[home.segment];
    const std::uint32_t cells = CellsOf(segment);
    // At most three quarters full: linear probes stay short.
    if ((segment.used + 1) * std::uint64_t{4} <= cells * std::uint64_t{3}) return true;
    // Keys chosen to meet in one segment make its probes long, and in the end it refuses them.
    if (cells == shape_.segment_cells_max) return segment.used + cells / 16 < cells;
    Grow(home, cells == 0 ? kCellsMin : cells * 2);
    return true;
  }

  // Under the shard's lock, which is held for one segment only.
  void Grow(const Home& home, std::uint32_t cells) {
    Segment& segment = segments_[home.segment];
    std::vector<std::uint64_t> old;
    old.reserve(segment.used);
    for (std::uint32_t at = 0; at < CellsOf(segment); ++at) {
      const std::uint64_t cell = home.cells[at].load(std::memory_order_relaxed);
      if (cell == 0) continue;
      old.push_back(cell);
      home.cells[at].store(0, std::memory_order_relaxed);
    }
    segment.mask.store(cells - 1, std::memory_order_relaxed);
    segment.used = 0;
    for (const std::uint64_t cell : old) Place(home, cell);
  }

  void Place(const Home& home, std::uint64_t cell) {
    const std::uint32_t mask = MaskOf(home);
    std::uint32_t at = static_cast<std::uint32_t>(cell >> 32) & mask;
    while (home.cells[at].load(std::memory_order_relaxed) != 0) at = (at + 1) & mask;
    home.cells[at].store(cell, std::memory_order_relaxed);
    ++segments_[home.segment].used;
  }

  // Takes the cell of `local` out and moves later cells of the same run back, so that no tombstones
  // are needed. Under the shard's lock.
  void EraseCell(const Home& home, std::uint32_t local) {
    const std::uint32_t mask = MaskOf(home);
    const std::uint64_t cell = std::uint64_t{home.tag} << 32 | (local + 1);
    std::uint32_t hole = home.tag & mask;
    for (;; hole = (hole + 1) & mask) {
      const std::uint64_t found = home.cells[hole].load(std::memory_order_relaxed);
      if (found == cell) break;
      KVMILL_CHECK(found != 0);
    }
    for (std::uint32_t at = (hole + 1) & mask;; at = (at + 1) & mask) {
      const std::uint64_t moved = home.cells[at].load(std::memory_order_relaxed);
      if (moved == 0) break;
      const std::uint32_t first = static_cast<std::uint32_t>(moved >> 32) & mask;
      // The cell may move to the hole unless its first place lies cyclically in (hole, at].
      if (((at - first) & mask) < ((at - hole) & mask)) continue;
      home.cells[hole].store(moved, std::memory_order_relaxed);
      hole = at;
    }
    home.cells[hole].store(0, std::memory_order_relaxed);
    --segments_[home.segment].used;
  }

  static std::uint32_t CellsOf(const Segment& segment) {
    const std::uint32_t mask = segment.mask.load(std::memory_order_relaxed);
    return mask == 0 ? 0 : mask + 1;
  }

  // What Insert takes from its shard and Free gives back.
  static PagePlace* AllocatePlaces(Shard& shard, std::size_t page_count, bool long_key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    const std::size_t length = page_count + (long_key ? kKeyPlaces : 0);
    if (length == 0) return nullptr;
    PlaceSlab& slab = shard.slabs.try_emplace(length, length).first->second;
    return slab.Allocate(&shard.places_bytes) + (long_key ? kKeyPlaces : 0);
  }
  static void FreePlaces(Shard& shard, PagePlace* places, std::size_t page_count, bool long_key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard.mu) {
    const std::size_t length = page_count + (long_key ? kKeyPlaces : 0);
    if (length != 0) shard.slabs.at(length).Free(places - (long_key ? kKeyPlaces : 0));
  }

  const Shape shape_;
  std::uint64_t (*const hash_)(NamespaceId, std::uint8_t, const BlockKey&);
  const ReservedMemory entries_memory_;
  const ReservedMemory cells_memory_;
  const std::optional<ReservedMemory> links_memory_;
  BlockEntry* const entries_;                // By EntryId.
  std::atomic<std::uint64_t>* const cells_;  // segment_cells_max each segment.
  RunLink* const links_;                     // By EntryId; null: none are kept.
  std::vector<Segment> segments_;            // Those of a shard side by side, under its lock.
  std::array<Shard, kShardCount> shards_;
  std::atomic<std::uint32_t> blocks_{0};  // Allocated, detached ones included; bounds the index.
  std::atomic<std::uint64_t> in_table_{0};
};

BlockIndex::BlockIndex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockIndex::~BlockIndex() = default;

absl::StatusOr<std::unique_ptr<BlockIndex>> BlockIndex::Create(const Options& options) {
  if (options.entries_max == 0 || options.entries_max > (1u << 31)) {
    return absl::InvalidArgumentError(
        absl::StrCat("index of ", options.entries_max, " blocks: want 1 to ", 1u << 31));
  }
  const Impl::Shape shape(options.entries_max);
  KVMILL_ASSIGN_OR_RETURN(ReservedMemory entries, ReservedMemory::Create(shape.entries_bytes()));
  KVMILL_ASSIGN_OR_RETURN(ReservedMemory cells, ReservedMemory::Create(shape.cells_bytes()));
  std::optional<ReservedMemory> links;
  if (options.keeps_links) {
    KVMILL_ASSIGN_OR_RETURN(ReservedMemory memory, ReservedMemory::Create(shape.links_bytes()));
    links.emplace(std::move(memory));
  }
  return std::unique_ptr<BlockIndex>(new BlockIndex(std::make_unique<Impl>(
      options, shape, std::move(entries), std::move(cells), std::move(links))));
}

absl::StatusOr<EntryId> BlockIndex::Insert(const BlockId& id, std::size_t page_count,
                                           absl::FunctionRef<void(BlockEntry&)> init,
                                           const RunLink& link) {
  KVMILL_CHECK(page_count <= std::numeric_limits<std::uint16_t>::max());
  const Impl::Home home = impl_->HomeOf(impl_->hash_(id.namespace_id, id.group, id.key));
  Impl::Shard& shard = impl_->shards_[home.shard];
  MutexLock lock(shard.mu);
  if (impl_->Probe(home, id.namespace_id, id.group, id.key) != kNone) {
    return absl::AlreadyExistsError("the block is in the index");
  }

  const bool has_freed = shard.free_head != kNone;
  if (impl_->blocks_.fetch_add(1, std::memory_order_relaxed) >= impl_->shape_.blocks_max ||
      (!has_freed && shard.entry_count >= impl_->shape_.shard_blocks_max) ||
      !impl_->Reserve(home)) {
    impl_->blocks_.fetch_sub(1, std::memory_order_relaxed);
    return absl::ResourceExhaustedError(absl::StrCat(
        "the index is full: at most ", impl_->shape_.blocks_max, " blocks; evict or remove some"));
  }
  const std::uint32_t local = has_freed ? shard.free_head : shard.entry_count++;
  const EntryId entry_id = Impl::IdOf(home.shard, local);
  BlockEntry& entry = impl_->EntryAt(entry_id);
  if (has_freed) shard.free_head = entry.inserted_at_s;
  new (&entry) BlockEntry();
  entry.namespace_id_ = id.namespace_id;
  entry.group_ = id.group;
  entry.key_size_ = static_cast<std::uint8_t>(id.key.size());
  entry.tag_ = home.tag;
  std::memcpy(entry.key_.data(), id.key.data(), BlockEntry::kKeyBytesInline);
  entry.page_count_ = static_cast<std::uint16_t>(page_count);
  entry.places_ = Impl::AllocatePlaces(shard, page_count, entry.has_long_key());
  if (entry.has_long_key()) {
    std::memcpy(static_cast<void*>(entry.places_ - kKeyPlaces),
                id.key.data() + BlockEntry::kKeyBytesInline,
                kBlockKeyBytesMax - BlockEntry::kKeyBytesInline);
  }
  if (impl_->links_ != nullptr) impl_->links_[entry_id] = link;
  init(entry);
  impl_->Place(home, std::uint64_t{home.tag} << 32 | (local + 1));
  impl_->in_table_.fetch_add(1, std::memory_order_relaxed);
  return entry_id;
}

bool BlockIndex::Find(const BlockId& id, absl::FunctionRef<void(EntryId, BlockEntry&)> use) {
  const Impl::Home home = impl_->HomeOf(impl_->hash_(id.namespace_id, id.group, id.key));
  MutexLock lock(impl_->shards_[home.shard].mu);
  const std::uint32_t local = impl_->Probe(home, id.namespace_id, id.group, id.key);
  if (local == kNone) return false;
  const EntryId entry = Impl::IdOf(home.shard, local);
  use(entry, impl_->EntryAt(entry));
  return true;
}

void BlockIndex::With(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use) {
  Impl::Shard& shard = impl_->ShardAt(entry);
  MutexLock lock(shard.mu);
  BlockEntry& e = impl_->EntryAt(entry);
  KVMILL_DCHECK(Impl::LocalOf(entry) < shard.entry_count && (e.flags & kFreed) == 0);
  use(e);
}

bool BlockIndex::At(EntryId entry, absl::FunctionRef<void(const BlockEntry&)> use) const {
  if (entry >= ids_max()) return false;
  const Impl::Shard& shard = impl_->ShardAt(entry);
  MutexLock lock(shard.mu);
  if (Impl::LocalOf(entry) >= shard.entry_count) return false;
  const BlockEntry& e = impl_->EntryAt(entry);
  if ((e.flags & (kDetached | kFreed)) != 0) return false;
  use(e);
  return true;
}

RunLink BlockIndex::LinkOf(EntryId entry) const {
  return impl_->links_ == nullptr ? RunLink() : impl_->links_[entry];
}

void BlockIndex::Prefetch(absl::Span<const BlockId> ids) const {
  constexpr std::size_t kSlice = 64;
  std::array<Impl::Home, kSlice> homes;
  for (; !ids.empty(); ids.remove_prefix(std::min(kSlice, ids.size()))) {
    const absl::Span<const BlockId> slice = ids.first(std::min(kSlice, ids.size()));
    for (std::size_t i = 0; i < slice.size(); ++i) {
      homes[i] = impl_->HomeOf(impl_->hash_(slice[i].namespace_id, slice[i].group, slice[i].key));
      __builtin_prefetch(homes[i].cells + (homes[i].tag & impl_->MaskOf(homes[i])));
    }
    for (std::size_t i = 0; i < slice.size(); ++i) {
      const std::uint32_t guess = impl_->Probe(homes[i], [](std::uint32_t) { return true; });
      if (guess == kNone) continue;
      __builtin_prefetch(&impl_->EntryAt(Impl::IdOf(homes[i].shard, guess)));
    }
  }
}

void BlockIndex::FindBatch(NamespaceId namespace_id, std::uint8_t group,
                           absl::Span<const BlockKey> keys, absl::Span<Presence> found) const {
  KVMILL_CHECK(found.size() == keys.size());
  // Three passes over a slice, so that the cache misses of table and entry overlap: hash and
  // prefetch the table cell; guess the entry by its tag and prefetch it; lock and compare the key.
  constexpr std::size_t kSlice = 64;
  std::array<Impl::Home, kSlice> homes;
  std::array<std::uint32_t, kSlice> guesses;
  for (std::size_t begin = 0; begin < keys.size(); begin += kSlice) {
    const std::size_t count = std::min(kSlice, keys.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      homes[i] = impl_->HomeOf(impl_->hash_(namespace_id, group, keys[begin + i]));
      __builtin_prefetch(homes[i].cells + (homes[i].tag & impl_->MaskOf(homes[i])));
    }
    for (std::size_t i = 0; i < count; ++i) {
      guesses[i] = impl_->Probe(homes[i], [](std::uint32_t) { return true; });
      if (guesses[i] == kNone) continue;
      __builtin_prefetch(&impl_->EntryAt(Impl::IdOf(homes[i].shard, guesses[i])));
    }
    for (std::size_t i = 0; i < count; ++i) {
      const BlockKey& key = keys[begin + i];
      const Impl::Home& home = homes[i];
      found[begin + i] = Presence{};
      MutexLock lock(impl_->shards_[home.shard].mu);
      const BlockEntry* entry = nullptr;
      if (guesses[i] != kNone) entry = &impl_->EntryAt(Impl::IdOf(home.shard, guesses[i]));
      if (entry == nullptr || (entry->flags & kDetached) != 0 ||
          !entry->Is(namespace_id, group, key)) {
        // Absent, or another key with this tag, or it changed since: the probe under the lock says.
        const std::uint32_t local = impl_->Probe(home, namespace_id, group, key);
        if (local == kNone) continue;
        entry = &impl_->EntryAt(Impl::IdOf(home.shard, local));
      }
      found[begin + i] = Presence{entry->flags, entry->token_count};
    }
  }
}

bool BlockIndex::Detach(EntryId entry, absl::FunctionRef<void(BlockEntry&)> use) {
  Impl::Shard& shard = impl_->ShardAt(entry);
  MutexLock lock(shard.mu);
  BlockEntry& e = impl_->EntryAt(entry);
  if ((e.flags & kDetached) != 0) return false;
  use(e);
  e.flags |= kDetached;
  impl_->EraseCell(impl_->HomeOf(entry & (kShardCount - 1), e.tag_), Impl::LocalOf(entry));
  impl_->in_table_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void BlockIndex::Free(EntryId entry) {
  Impl::Shard& shard = impl_->ShardAt(entry);
  MutexLock lock(shard.mu);
  BlockEntry& e = impl_->EntryAt(entry);
  KVMILL_CHECK((e.flags & kDetached) != 0 && (e.flags & kFreed) == 0 && e.references == 0);
  Impl::FreePlaces(shard, e.places_, e.page_count_, e.has_long_key());
  e = BlockEntry{};
  e.flags = kDetached | kFreed;
  e.inserted_at_s = shard.free_head;
  shard.free_head = Impl::LocalOf(entry);
  impl_->blocks_.fetch_sub(1, std::memory_order_relaxed);
}

bool BlockIndex::ForNext(Cursor* cursor,
                         absl::FunctionRef<void(EntryId, const BlockEntry&)> visit) const {
  for (; cursor->shard < kShardCount; ++cursor->shard, cursor->local = 0) {
    const Impl::Shard& shard = impl_->shards_[cursor->shard];
    MutexLock lock(shard.mu);
    if (cursor->local >= shard.entry_count) continue;
    const std::uint32_t end = std::min(shard.entry_count, cursor->local + kStepEntries);
    for (; cursor->local < end; ++cursor->local) {
      const EntryId id = Impl::IdOf(cursor->shard, cursor->local);
      const BlockEntry& entry = impl_->EntryAt(id);
      if ((entry.flags & kDetached) == 0) visit(id, entry);
    }
    return true;
  }
  return false;
}

void BlockIndex::ForEach(absl::FunctionRef<bool(EntryId, const BlockEntry&)> visit) const {
  Cursor cursor;
  bool more = true;
  const auto visit_unless_stopped = [&](EntryId id, const BlockEntry& entry) {
    if (more) more = visit(id, entry);
  };
  while (more && ForNext(&cursor, visit_unless_stopped)) {
  }
}

std::uint32_t BlockIndex::ids_max() const { return impl_->shape_.shard_blocks_max << kShardBits; }

std::uint64_t BlockIndex::size() const { return impl_->in_table_.load(std::memory_order_relaxed); }

std::uint64_t BlockIndex::metadata_bytes() const {
  std::uint64_t bytes = sizeof(Impl) + impl_->segments_.size() * sizeof(Segment);
  std::uint64_t entry_count_most = 0;
  for (const Impl::Shard& shard : impl_->shards_) {
    MutexLock lock(shard.mu);
    bytes += shard.places_bytes;
    entry_count_most = std::max<std::uint64_t>(entry_count_most, shard.entry_count);
  }
  bytes += (entry_count_most << kShardBits) *
           (sizeof(BlockEntry) + (impl_->links_ != nullptr ? sizeof(RunLink) : 0));
  for (const Segment& segment : impl_->segments_) {
    bytes += Impl::CellsOf(segment) * sizeof(std::uint64_t);
  }
  return bytes;
}

}  // namespace kvmill
