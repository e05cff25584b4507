#include "storage/page_pool.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "storage/arena.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kNoTenant = 0xFFFFFFFFu;
constexpr std::uint32_t kNoExtent = 0xFFFFFFFFu;
constexpr std::size_t kSlotAlignment = 64;
constexpr unsigned kPrefaultThreads = 8;

// What the kernel says could be had without swapping; 0 when it does not say.
std::uint64_t AvailableMemoryBytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name, unit;
  std::uint64_t kib = 0;
  while (meminfo >> name >> kib) {
    std::getline(meminfo, unit);
    if (name == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

}  // namespace

// Extent e of the pool is extent e % extents_per_arena_ of arena e / extents_per_arena_; the first
// of every arena holds the generations of the others.
class PagePool::Impl {
 public:
  absl::Status Create(const Options& options);
  absl::Status Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                       std::vector<SlotRef>* slots);
  void Release(SlotRef slot);
  std::atomic<std::uint64_t>& GenerationWord(SlotRef slot) const;
  std::uint64_t GenerationOffset(SlotRef slot) const;
  absl::Span<std::byte> Bytes(SlotRef slot) const;
  const Arena& ArenaAt(std::uint32_t arena) const { return arenas_[arena]; }
  std::uint32_t ArenaOf(std::uint32_t extent) const { return extent / extents_per_arena_; }
  Stats stats() const;

 private:
  struct Extent {
    std::uint64_t slot_bytes = 0;   // 0: free. Constant while any slot is acquired.
    std::uint32_t run_extents = 0;  // Of a slot larger than an extent, in its first extent; else 0.
    std::uint32_t slots_max = 0;
    std::uint32_t slots_free = 0;
    std::uint32_t next = kNoExtent;  // In the class's list of extents with room.
    std::uint32_t previous = kNoExtent;
    bool run_member = false;  // Later extent of a run.
  };
  struct ClassKey {
    TenantId tenant;
    std::uint64_t slot_bytes;
    friend bool operator==(const ClassKey&, const ClassKey&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const ClassKey& key) {
      return H::combine(std::move(h), key.tenant, key.slot_bytes);
    }
  };
  struct ArenaUse {
    TenantId tenant = kNoTenant;       // While any extent is used.
    TenantId last_tenant = kNoTenant;  // Whose bytes are in it.
    std::uint32_t extents_used = 0;
  };

  absl::Status Prefault(const Options& options);
  void InitializeGenerations(const Arena& arena) const;
  std::uint64_t* FreeBits(std::uint32_t extent) {
    return &free_bits_[std::size_t{extent} * words_per_extent_];
  }

  // First extent of `length` adjacent free ones in an arena that is or can become the tenant's;
  // kNoExtent when there is none.
  std::uint32_t FindFreeRun(TenantId tenant, std::uint32_t length) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeExtents(TenantId tenant, std::uint32_t first, std::uint32_t length)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReturnExtents(std::uint32_t first, std::uint32_t length) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AcquireLarge(TenantId tenant, std::uint64_t slot_bytes, std::size_t count,
                            std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AcquireSmall(TenantId tenant, std::uint64_t slot_bytes, std::size_t count,
                            std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes fresh extents a part of the class.
  absl::Status Open(const ClassKey& key, std::uint32_t first, std::uint32_t length)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // First of `count` adjacent free slots of the extent, or slots_max when there is no such run.
  std::uint32_t FindSlotRun(std::uint32_t extent, std::uint32_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeSlot(std::uint32_t extent, std::uint32_t index, std::vector<SlotRef>* slots)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes up to `count` free slots of the extent, lowest first; how many.
  std::size_t TakeSlots(std::uint32_t extent, std::size_t count, std::vector<SlotRef>* slots)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseLocked(SlotRef slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Link(const ClassKey& key, std::uint32_t extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unlink(const ClassKey& key, std::uint32_t extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Full(std::uint64_t wanted_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::vector<Arena> arenas_;
  std::uint32_t extents_per_arena_ = 0;
  std::uint32_t slots_per_extent_max_ = 0;  // Generation words of an extent.
  std::uint32_t words_per_extent_ = 0;
  std::uint64_t capacity_bytes_ = 0;

  mutable Mutex mu_;
  // Sized in Create and never resized; an element's constants are read without the lock by who
  // holds a slot in it.
  std::vector<Extent> extents_;
  std::vector<std::uint64_t> free_bits_
      ABSL_GUARDED_BY(mu_);  // Bit i of an extent's words: slot i is free.
  std::vector<ArenaUse> uses_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<ClassKey, std::uint32_t> with_room_
      ABSL_GUARDED_BY(mu_);  // First extent that has a free slot.
  std::uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t slots_used_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t extents_free_ ABSL_GUARDED_BY(mu_) = 0;
};

absl::Status PagePool::Impl::Create(const Options& options) {
  if (options.arena_bytes % kExtentBytes != 0 || options.arena_bytes < 2 * kExtentBytes ||
      options.arena_bytes / kExtentBytes > 4096) {
    return absl::InvalidArgumentError(absl::StrCat("arena_bytes ", options.arena_bytes,
                                                   ": want a multiple of ", kExtentBytes,
                                                   " from 2 to 4096 times that"));
  }
  const std::uint64_t arena_count = options.capacity_bytes / options.arena_bytes;
  extents_per_arena_ = static_cast<std::uint32_t>(options.arena_bytes / kExtentBytes);
  if (arena_count == 0 || arena_count * extents_per_arena_ >= kNoExtent) {
    return absl::InvalidArgumentError(absl::StrCat("capacity of ", options.capacity_bytes,
                                                   " bytes: want at least one arena of ",
                                                   options.arena_bytes));
  }
  const std::uint64_t available = AvailableMemoryBytes();
  if (options.prefault && available != 0 && options.capacity_bytes > available) {
    return absl::ResourceExhaustedError(absl::StrCat("host memory of ", options.capacity_bytes,
                                                     " bytes: only ", available,
                                                     " are available; lower --host-bytes"));
  }
  words_per_extent_ =
      static_cast<std::uint32_t>(kExtentBytes / sizeof(std::uint64_t) / extents_per_arena_ / 64);
  words_per_extent_ =
      std::clamp(words_per_extent_, 1u, 512u);  // 512: slots of kSlotAlignment bytes.
  slots_per_extent_max_ = words_per_extent_ * 64;
  arenas_.reserve(arena_count);
  for (std::uint64_t i = 0; i < arena_count; ++i) {
    arenas_.emplace_back();
    KVMILL_RETURN_IF_ERROR(arenas_.back().Open(options.arena_bytes, options.prefault));
  }
  if (options.prefault) KVMILL_RETURN_IF_ERROR(Prefault(options));
  for (const Arena& arena : arenas_) InitializeGenerations(arena);

  MutexLock lock(mu_);
  extents_.resize(arena_count * extents_per_arena_);
  free_bits_.resize(extents_.size() * words_per_extent_);
  uses_.resize(arena_count);
  extents_free_ = arena_count * (extents_per_arena_ - 1);
  capacity_bytes_ = extents_free_ * kExtentBytes;
  return absl::OkStatus();
}

absl::Status PagePool::Impl::Prefault(const Options& options) {
  const std::uint64_t total_bytes = arenas_.size() * options.arena_bytes;
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> done_bytes{0};
  const unsigned thread_count =
      std::clamp(std::thread::hardware_concurrency(), 1u, kPrefaultThreads);
  std::atomic<unsigned> running{thread_count};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < thread_count; ++t) {
    threads.emplace_back([&] {
      for (std::size_t extent; (extent = next.fetch_add(1)) < total_bytes / kExtentBytes;) {
        const std::size_t begin = extent % extents_per_arena_ * kExtentBytes;
        arenas_[extent / extents_per_arena_].Prefault(begin, begin + kExtentBytes);
        done_bytes.fetch_add(kExtentBytes, std::memory_order_relaxed);
      }
      running.fetch_sub(1);
    });
  }
  auto last_report = std::chrono::steady_clock::now();
  while (running.load() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto now = std::chrono::steady_clock::now();
    if (options.progress && now - last_report > std::chrono::milliseconds(500)) {
      last_report = now;
      options.progress(done_bytes.load(std::memory_order_relaxed), total_bytes);
    }
  }
  for (std::thread& thread : threads) thread.join();
  return absl::OkStatus();
}

void PagePool::Impl::InitializeGenerations(const Arena& arena) const {
  // Odd: every slot is free.
  auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(arena.base());
  const std::size_t word_count = std::size_t{extents_per_arena_} * slots_per_extent_max_;
  static_assert(sizeof(std::atomic<std::uint64_t>) == 8 &&
                std::atomic<std::uint64_t>::is_always_lock_free);
  for (std::size_t i = 0; i < std::min(word_count, kExtentBytes / 8); ++i)
    words[i].store(1, std::memory_order_relaxed);
}

std::uint64_t PagePool::Impl::GenerationOffset(SlotRef slot) const {
  // The first extent needs no words of its own, so the words of extent i start at (i - 1).
  const std::uint64_t in_arena = slot.extent % extents_per_arena_;
  return ((in_arena - 1) * slots_per_extent_max_ + slot.index) * sizeof(std::uint64_t);
}

std::atomic<std::uint64_t>& PagePool::Impl::GenerationWord(SlotRef slot) const {
  return *reinterpret_cast<std::atomic<std::uint64_t>*>(arenas_[ArenaOf(slot.extent)].base() +
                                                        GenerationOffset(slot));
}

absl::Span<std::byte> PagePool::Impl::Bytes(SlotRef slot) const {
  const Extent& extent = extents_[slot.extent];
  std::byte* base =
      arenas_[ArenaOf(slot.extent)].base() + slot.extent % extents_per_arena_ * kExtentBytes;
  return absl::MakeSpan(base + slot.index * extent.slot_bytes, extent.slot_bytes);
}

absl::Status PagePool::Impl::Full(std::uint64_t wanted_bytes) const {
  return absl::ResourceExhaustedError(absl::StrCat("page pool is full: ", wanted_bytes,
                                                   " bytes wanted, ", used_bytes_, " of ",
                                                   capacity_bytes_, " in use"));
}

std::uint32_t PagePool::Impl::FindFreeRun(TenantId tenant, std::uint32_t length) const {
  // Arenas that already are the tenant's first, so that the others stay whole for other tenants.
  for (const bool owned : {true, false}) {
    for (std::uint32_t arena = 0; arena < arenas_.size(); ++arena) {
      const ArenaUse& use = uses_[arena];
      if (owned ? use.tenant != tenant : use.tenant != kNoTenant) continue;
      if (extents_per_arena_ - 1 - use.extents_used < length) continue;
      std::uint32_t run = 0;
      for (std::uint32_t i = 1; i < extents_per_arena_; ++i) {
        const Extent& extent = extents_[arena * extents_per_arena_ + i];
        run = extent.slot_bytes == 0 && !extent.run_member ? run + 1 : 0;
        if (run == length) return arena * extents_per_arena_ + i + 1 - length;
      }
    }
  }
  return kNoExtent;
}

absl::Status PagePool::Impl::TakeExtents(TenantId tenant, std::uint32_t first,
                                         std::uint32_t length) {
  ArenaUse& use = uses_[ArenaOf(first)];
  if (use.tenant == kNoTenant && use.last_tenant != kNoTenant && use.last_tenant != tenant) {
    // The memory holds another tenant's bytes, and that tenant's engines may still map it.
    Arena& arena = arenas_[ArenaOf(first)];
    KVMILL_RETURN_IF_ERROR(arena.Renew());
    InitializeGenerations(arena);
  }
  use.tenant = use.last_tenant = tenant;
  use.extents_used += length;
  extents_free_ -= length;
  return absl::OkStatus();
}

void PagePool::Impl::ReturnExtents(std::uint32_t first, std::uint32_t length) {
  for (std::uint32_t i = 0; i < length; ++i) extents_[first + i] = Extent{};
  ArenaUse& use = uses_[ArenaOf(first)];
  use.extents_used -= length;
  extents_free_ += length;
  if (use.extents_used == 0) use.tenant = kNoTenant;
}

void PagePool::Impl::Link(const ClassKey& key, std::uint32_t extent) {
  auto [it, created] = with_room_.try_emplace(key, kNoExtent);
  extents_[extent].previous = kNoExtent;
  extents_[extent].next = it->second;
  if (it->second != kNoExtent) extents_[it->second].previous = extent;
  it->second = extent;
}

void PagePool::Impl::Unlink(const ClassKey& key, std::uint32_t extent) {
  Extent& e = extents_[extent];
  if (e.previous != kNoExtent) {
    extents_[e.previous].next = e.next;
  } else {
    auto it = with_room_.find(key);
    it->second = e.next;
    if (e.next == kNoExtent) with_room_.erase(it);
  }
  if (e.next != kNoExtent) extents_[e.next].previous = e.previous;
  e.next = e.previous = kNoExtent;
}

absl::Status PagePool::Impl::Open(const ClassKey& key, std::uint32_t first, std::uint32_t length) {
  KVMILL_RETURN_IF_ERROR(TakeExtents(key.tenant, first, length));
  // Last first: the list then hands them out in the order of their addresses.
  for (std::uint32_t i = length; i-- > 0;) {
    Extent& extent = extents_[first + i];
    extent.slot_bytes = key.slot_bytes;
    extent.slots_max = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(kExtentBytes / key.slot_bytes, slots_per_extent_max_));
    extent.slots_free = extent.slots_max;
    std::uint64_t* bits = FreeBits(first + i);
    for (std::uint32_t word = 0; word < words_per_extent_; ++word) {
      const std::uint32_t begin = word * 64;
      bits[word] = begin + 64 <= extent.slots_max ? ~std::uint64_t{0}
                   : begin < extent.slots_max ? (std::uint64_t{1} << (extent.slots_max - begin)) - 1
                                              : 0;
    }
    Link(key, first + i);
  }
  return absl::OkStatus();
}

std::uint32_t PagePool::Impl::FindSlotRun(std::uint32_t extent, std::uint32_t count) {
  const Extent& e = extents_[extent];
  if (e.slots_free < count) return e.slots_max;
  const std::uint64_t* bits = FreeBits(extent);
  std::uint32_t run = 0;
  for (std::uint32_t i = 0; i < e.slots_max; ++i) {
    run = (bits[i / 64] >> (i % 64)) & 1 ? run + 1 : 0;
    if (run == count) return i + 1 - count;
  }
  return e.slots_max;
}

void PagePool::Impl::TakeSlot(std::uint32_t extent, std::uint32_t index,
                              std::vector<SlotRef>* slots) {
  Extent& e = extents_[extent];
  const ClassKey key{uses_[ArenaOf(extent)].tenant, e.slot_bytes};
  FreeBits(extent)[index / 64] &= ~(std::uint64_t{1} << (index % 64));
  if (--e.slots_free == 0) Unlink(key, extent);
  used_bytes_ += e.slot_bytes;
  ++slots_used_;
  slots->push_back({extent, index});
}

std::size_t PagePool::Impl::TakeSlots(std::uint32_t extent, std::size_t count,
                                      std::vector<SlotRef>* slots) {
  std::size_t taken = 0;
  for (std::uint32_t word = 0; word < words_per_extent_ && taken < count; ++word) {
    while (FreeBits(extent)[word] != 0 && taken < count) {
      TakeSlot(extent,
               word * 64 + static_cast<std::uint32_t>(std::countr_zero(FreeBits(extent)[word])),
               slots);
      ++taken;
    }
  }
  return taken;
}

absl::Status PagePool::Impl::AcquireLarge(TenantId tenant, std::uint64_t slot_bytes,
                                          std::size_t count, std::vector<SlotRef>* slots) {
  const std::uint32_t length =
      static_cast<std::uint32_t>((slot_bytes + kExtentBytes - 1) / kExtentBytes);
  if (length > extents_per_arena_ - 1) {
    return absl::InvalidArgumentError(absl::StrCat("a page of ", slot_bytes,
                                                   " bytes: an arena holds at most ",
                                                   (extents_per_arena_ - 1) * kExtentBytes));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t first = FindFreeRun(tenant, length);
    if (first == kNoExtent) return Full(slot_bytes * count);
    KVMILL_RETURN_IF_ERROR(TakeExtents(tenant, first, length));
    extents_[first].slot_bytes = slot_bytes;
    extents_[first].run_extents = length;
    extents_[first].slots_max = 1;
    for (std::uint32_t e = 1; e < length; ++e) extents_[first + e].run_member = true;
    used_bytes_ += slot_bytes;
    ++slots_used_;
    slots->push_back({first, 0});
  }
  return absl::OkStatus();
}

absl::Status PagePool::Impl::AcquireSmall(TenantId tenant, std::uint64_t slot_bytes,
                                          std::size_t count, std::vector<SlotRef>* slots) {
  const ClassKey key{tenant, slot_bytes};
  const std::uint32_t per_extent = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kExtentBytes / slot_bytes, slots_per_extent_max_));
  const auto first_with_room = [&] {
    auto it = with_room_.find(key);
    return it == with_room_.end() ? kNoExtent : it->second;
  };
  if (count <= per_extent) {
    // A gap that fits, in one of the first few extents with room; then a fresh extent.
    constexpr int kExtentsLookedAt = 8;
    std::uint32_t extent = first_with_room();
    for (int looked = 0; extent != kNoExtent && looked < kExtentsLookedAt;
         ++looked, extent = extents_[extent].next) {
      const std::uint32_t index = FindSlotRun(extent, static_cast<std::uint32_t>(count));
      if (index == extents_[extent].slots_max) continue;
      for (std::uint32_t i = 0; i < count; ++i) TakeSlot(extent, index + i, slots);
      return absl::OkStatus();
    }
  }
  // Adjacent fresh extents make one run of the whole block.
  const std::uint32_t wanted = static_cast<std::uint32_t>((count + per_extent - 1) / per_extent);
  if (wanted < extents_per_arena_) {
    const std::uint32_t first = FindFreeRun(tenant, wanted);
    if (first != kNoExtent) {
      KVMILL_RETURN_IF_ERROR(Open(key, first, wanted));
      std::size_t left = count;
      for (std::uint32_t i = 0; i < wanted; ++i) left -= TakeSlots(first + i, left, slots);
      return absl::OkStatus();
    }
  }
  // Wherever there is room.
  for (std::size_t left = count; left > 0;) {
    std::uint32_t extent = first_with_room();
    if (extent == kNoExtent) {
      extent = FindFreeRun(tenant, 1);
      if (extent == kNoExtent) return Full(slot_bytes * count);
      KVMILL_RETURN_IF_ERROR(Open(key, extent, 1));
    }
    left -= TakeSlots(extent, left, slots);
  }
  return absl::OkStatus();
}

absl::Status PagePool::Impl::Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                                     std::vector<SlotRef>* slots) {
  if (slot_bytes == 0 || tenant == kNoTenant) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots of ", slot_bytes, " bytes for tenant ", tenant));
  }
  const std::uint64_t rounded = (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  if (count > capacity_bytes_ / rounded) {
    return absl::InvalidArgumentError(absl::StrCat(count, " slots of ", slot_bytes,
                                                   " bytes: the pool has ", capacity_bytes_,
                                                   " bytes in all"));
  }
  const std::size_t had = slots->size();
  MutexLock lock(mu_);
  absl::Status acquired = rounded > kExtentBytes ? AcquireLarge(tenant, rounded, count, slots)
                                                 : AcquireSmall(tenant, rounded, count, slots);
  if (!acquired.ok()) {
    for (std::size_t i = had; i < slots->size(); ++i) ReleaseLocked((*slots)[i]);
    slots->resize(had);
    return acquired;
  }
  // The generations are odd since the slots were freed; no byte of ours may become visible before
  // that.
  std::atomic_thread_fence(std::memory_order_release);
  return absl::OkStatus();
}

void PagePool::Impl::ReleaseLocked(SlotRef slot) {
  Extent& extent = extents_[slot.extent];
  KVMILL_CHECK(extent.slot_bytes != 0 && slot.index < extent.slots_max);
  std::atomic<std::uint64_t>& generation = GenerationWord(slot);
  const std::uint64_t value = generation.load(std::memory_order_relaxed);
  generation.store(value + (value % 2 == 0 ? 1 : 2), std::memory_order_seq_cst);
  used_bytes_ -= extent.slot_bytes;
  --slots_used_;
  if (extent.run_extents != 0) {
    ReturnExtents(slot.extent, extent.run_extents);
    return;
  }
  std::uint64_t& word = FreeBits(slot.extent)[slot.index / 64];
  const std::uint64_t bit = std::uint64_t{1} << (slot.index % 64);
  KVMILL_CHECK((word & bit) == 0);  // Released twice.
  word |= bit;
  const ClassKey key{uses_[ArenaOf(slot.extent)].tenant, extent.slot_bytes};
  if (extent.slots_free++ == 0) Link(key, slot.extent);
  if (extent.slots_free == extent.slots_max) {
    Unlink(key, slot.extent);
    ReturnExtents(slot.extent, 1);
  }
}

void PagePool::Impl::Release(SlotRef slot) {
  MutexLock lock(mu_);
  ReleaseLocked(slot);
}

PagePool::Stats PagePool::Impl::stats() const {
  MutexLock lock(mu_);
  return {capacity_bytes_, used_bytes_, extents_free_, slots_used_};
}

PagePool::PagePool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PagePool::~PagePool() = default;

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(const Options& options) {
  auto impl = std::make_unique<Impl>();
  KVMILL_RETURN_IF_ERROR(impl->Create(options));
  return std::unique_ptr<PagePool>(new PagePool(std::move(impl)));
}

absl::Status PagePool::Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                               std::vector<SlotRef>* slots) {
  return impl_->Acquire(tenant, slot_bytes, count, slots);
}

void PagePool::Publish(SlotRef slot) {
  std::atomic<std::uint64_t>& generation = impl_->GenerationWord(slot);
  const std::uint64_t value = generation.load(std::memory_order_relaxed);
  KVMILL_CHECK(value % 2 == 1);
  generation.store(value + 1, std::memory_order_release);
}

void PagePool::Release(SlotRef slot) { impl_->Release(slot); }
absl::Span<std::byte> PagePool::Bytes(SlotRef slot) const { return impl_->Bytes(slot); }

std::uint64_t PagePool::Generation(SlotRef slot) const {
  return impl_->GenerationWord(slot).load(std::memory_order_acquire);
}

PagePool::Location PagePool::Locate(SlotRef slot) const {
  Location location;
  location.arena = impl_->ArenaOf(slot.extent);
  const Arena& arena = impl_->ArenaAt(location.arena);
  location.offset_bytes = static_cast<std::uint64_t>(impl_->Bytes(slot).data() - arena.base());
  location.generation_offset_bytes = impl_->GenerationOffset(slot);
  return location;
}

int PagePool::ArenaFd(std::uint32_t arena) const { return impl_->ArenaAt(arena).fd(); }

PagePool::Stats PagePool::stats() const { return impl_->stats(); }

}  // namespace kvmill
