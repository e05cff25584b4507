#include "storage/page_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "storage/arena_memory.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/device_arenas.h"
#include "storage/extent_table.h"
#include "storage/slot_classes.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kArenaBytesMax = std::uint64_t{16} << 30;
constexpr std::uint32_t kGenerationsPerArena = kExtentBytes / kGenerationBytes;
constexpr std::uint32_t kBitWordsPerExtent = kSlotsPerExtentMax / 64;
// How many partly used extents, and how many arenas, are searched for a place where slots are
// adjacent before other places do.
constexpr std::uint32_t kAdjacentTriesMax = 8;

// Orders the odd generation before the bytes that the slot's new owner writes, for readers that see
// those bytes. ThreadSanitizer does not know fences; in this process the pool's mutex gives the
// same order.
void FenceBeforeBytes() {
#ifndef ABSL_HAVE_THREAD_SANITIZER
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

absl::Status CheckOptions(const PagePool::Options& options) {
  if (options.arena_bytes % kExtentBytes != 0 || options.arena_bytes < 2 * kExtentBytes ||
      options.arena_bytes > kArenaBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("arena_bytes ", options.arena_bytes,
                                                   ": want a multiple of ", kExtentBytes, " from ",
                                                   2 * kExtentBytes, " to ", kArenaBytesMax));
  }
  if (options.capacity_bytes < options.arena_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("capacity_bytes ", options.capacity_bytes,
                                                   ": want at least one arena, ",
                                                   options.arena_bytes));
  }
  if (options.capacity_bytes / kExtentBytes >= kNone) {
    return absl::InvalidArgumentError(absl::StrCat("capacity_bytes ", options.capacity_bytes,
                                                   ": want less than ",
                                                   std::uint64_t{kNone} * kExtentBytes));
  }
  return absl::OkStatus();
}

}  // namespace

class PagePool::Impl {
 public:
  Impl(std::unique_ptr<ArenaMemory> memory, std::unique_ptr<DeviceArenas> device_arenas,
       std::uint32_t arena_count, std::uint32_t extents_per_arena);

  absl::Status Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                       std::vector<SlotRef>* slots);
  void Publish(SlotRef slot);
  void Release(SlotRef slot);
  absl::Span<std::byte> Bytes(SlotRef slot) const;
  std::uint64_t Generation(SlotRef slot) const;
  Location Locate(SlotRef slot) const;
  int ArenaFd(std::uint32_t arena) const;
  std::uint64_t arena_bytes() const {
    const std::uint32_t extents = extents_per_arena_ - (device_arenas_ == nullptr ? 0 : 1);
    return std::uint64_t{extents} * kExtentBytes;
  }
  int GenerationFd(std::uint32_t arena) const;
  Stats stats() const;
  std::uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  std::uint32_t ArenaOf(SlotRef slot) const { return slot.extent / extents_per_arena_; }
  std::vector<ArenaUse> ArenasInUse() const;
  bool HasArena(TenantId tenant) const;
  std::uint64_t BeginEmptying(std::uint32_t arena, TenantId heir);
  void EndEmptying(std::uint32_t arena, std::uint64_t ticket);
  bool IsEmptyingFor(TenantId heir) const;
  bool IsEmptied(std::uint32_t arena, std::uint64_t ticket) const;

 private:
  // An extent as its slot class sees it. The class and stride of an extent change only while none
  // of its slots is acquired, so owners of a slot read them without the lock.
  struct Extent {
    std::uint64_t stride_bytes = 0;  // From one slot to the next; 0: in no class.
    std::uint32_t slot_class = 0;
    std::uint32_t slot_count = 0;
    std::uint32_t used = 0;
    std::uint32_t extent_count = 1;  // More than 1: one slot over adjacent extents.
    bool partial = false;            // In the list of partly used extents of its tenant and class.
    std::uint32_t prev = kNone;
    std::uint32_t next = kNone;
  };

  absl::Status CheckRequest(std::size_t slot_bytes, std::size_t count) const;
  bool TryAcquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                  std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AcquireLarge(std::uint32_t tenant_index, std::size_t slot_bytes, std::size_t count,
                    std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AcquireSmall(std::uint32_t tenant_index, std::uint32_t slot_class, std::size_t count,
                    std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the arena's memory fit for another tenant, outside the lock.
  absl::Status Renew(std::uint32_t arena) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseLocked(SlotRef slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void BeginClass(std::uint32_t extent, std::uint32_t slot_class)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void UseSlots(std::uint32_t extent, std::uint32_t first, std::uint32_t count,
                std::vector<SlotRef>* slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // First of `count` adjacent free slots, kNone without such a run.
  std::uint32_t FindFreeRun(std::uint32_t extent, std::uint32_t count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::uint32_t& PartialHead(std::uint32_t tenant_index, std::uint32_t slot_class)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return partial_heads_[std::size_t{tenant_index} * kSlotClassCount + slot_class];
  }
  // Puts the extent into, or takes it out of, the list of partly used extents.
  void UpdatePartial(std::uint32_t extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::atomic<std::uint64_t>& UsedWord(SlotRef slot) const {
    return used_bits_[std::size_t{slot.extent} * kBitWordsPerExtent + slot.index / 64];
  }
  bool IsUsed(SlotRef slot) const {
    return slot.extent < extent_count_ && slot.index < kSlotsPerExtentMax &&
           (UsedWord(slot).load(std::memory_order_relaxed) >> (slot.index % 64) & 1) != 0;
  }
  std::uint64_t GenerationOffset(SlotRef slot) const {
    return (std::uint64_t{slot.extent % extents_per_arena_} * generations_per_extent_ +
            slot.index) *
           kGenerationBytes;
  }
  std::atomic_ref<std::uint64_t> GenerationWord(SlotRef slot) const {
    std::byte* arena = memory_->address(slot.extent / extents_per_arena_);
    return std::atomic_ref<std::uint64_t>(
        *reinterpret_cast<std::uint64_t*>(arena + GenerationOffset(slot)));
  }
  void InitGenerations(std::uint32_t arena);
  // Where the slots of an extent begin.
  std::byte* ExtentAddress(std::uint32_t extent) const {
    if (device_arenas_ == nullptr) return memory_->base() + extent * kExtentBytes;
    const std::size_t number = extent % extents_per_arena_;
    return device_arenas_->address(extent / extents_per_arena_) + (number - 1) * kExtentBytes;
  }

  const std::uint32_t extents_per_arena_;
  const std::uint32_t extent_count_;
  const std::uint32_t generations_per_extent_;
  const std::uint32_t slots_per_extent_max_;
  const std::uint64_t capacity_bytes_;
  // Everything, or of a pool in a device's memory the generations.
  const std::unique_ptr<ArenaMemory> memory_;
  const std::unique_ptr<DeviceArenas> device_arenas_;  // Null: the pool is in host memory.

  // Whether the arena's descriptor was handed out. Set by a caller that holds one of its slots,
  // read when it has none: never at once.
  const std::unique_ptr<std::atomic<bool>[]> shared_;
  // Changed by Renew, while no slot of the arena is acquired; read by owners of one.
  const std::unique_ptr<std::atomic<std::uint64_t>[]> epochs_;
  // See Extent for what is read without the lock.
  std::vector<Extent> extents_;
  // One bit a slot. Changed under mu_; the owner of a slot reads its own bit without.
  const std::unique_ptr<std::atomic<std::uint64_t>[]> used_bits_;

  mutable Mutex mu_;
  CondVar renewed_;
  ExtentTable table_ ABSL_GUARDED_BY(mu_);
  std::vector<std::uint32_t> partial_heads_ ABSL_GUARDED_BY(mu_);  // [tenant index][slot class]
  std::uint32_t renewing_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<std::uint64_t> used_bytes_{0};  // Changes under mu_; a stale one is of a moment ago.
  std::uint64_t slots_used_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t last_ticket_ ABSL_GUARDED_BY(mu_) = 0;
};

PagePool::Impl::Impl(std::unique_ptr<ArenaMemory> memory,
                     std::unique_ptr<DeviceArenas> device_arenas, std::uint32_t arena_count,
                     std::uint32_t extents_per_arena)
    : extents_per_arena_(extents_per_arena),
      extent_count_(arena_count * extents_per_arena),
      generations_per_extent_(kGenerationsPerArena / extents_per_arena),
      slots_per_extent_max_(std::min(kSlotsPerExtentMax, generations_per_extent_)),
      capacity_bytes_(std::uint64_t{arena_count} * (extents_per_arena - 1) * kExtentBytes),
      memory_(std::move(memory)),
      device_arenas_(std::move(device_arenas)),
      shared_(std::make_unique<std::atomic<bool>[]>(arena_count)),
      epochs_(std::make_unique<std::atomic<std::uint64_t>[]>(arena_count)),
      extents_(extent_count_),
      used_bits_(std::make_unique<std::atomic<std::uint64_t>[]>(std::size_t{extent_count_} *
                                                                kBitWordsPerExtent)),
      table_(arena_count, extents_per_arena),
      partial_heads_(std::size_t{arena_count} * kSlotClassCount, kNone) {
  for (std::uint32_t arena = 0; arena < arena_count; ++arena) InitGenerations(arena);
}

void PagePool::Impl::InitGenerations(std::uint32_t arena) {
  // Fresh memory is zero, which is even; no slot is complete yet.
  auto* words = reinterpret_cast<std::uint64_t*>(memory_->address(arena));
  std::fill_n(words, std::size_t{generations_per_extent_} * extents_per_arena_, 1);
}

absl::Status PagePool::Impl::CheckRequest(std::size_t slot_bytes, std::size_t count) const {
  const std::uint64_t slot_bytes_max = std::uint64_t{extents_per_arena_ - 1} * kExtentBytes;
  if (slot_bytes == 0 || slot_bytes > slot_bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot of ", slot_bytes, " bytes: want 1 to ", slot_bytes_max));
  }
  const std::uint64_t arena_count = extent_count_ / extents_per_arena_;
  std::uint64_t count_max = 0;
  if (slot_bytes > kExtentBytes) {
    const std::uint64_t run = (slot_bytes + kExtentBytes - 1) / kExtentBytes;
    count_max = arena_count * ((extents_per_arena_ - 1) / run);
  } else {
    count_max = arena_count * (extents_per_arena_ - 1) *
                SlotsPerExtent(SlotClassOf(slot_bytes, slots_per_extent_max_));
  }
  if (count > count_max) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " slots of ", slot_bytes, " bytes: the whole pool holds ", count_max));
  }
  return absl::OkStatus();
}

absl::Status PagePool::Impl::Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                                     std::vector<SlotRef>* slots) {
  KVMILL_RETURN_IF_ERROR(CheckRequest(slot_bytes, count));
  slots->reserve(slots->size() + count);  // Outside the lock.
  MutexLock lock(mu_);
  while (!TryAcquire(tenant, slot_bytes, count, slots)) {
    const std::uint32_t arena = table_.TakeForRenewal(tenant);
    if (arena != kNone) {
      KVMILL_RETURN_IF_ERROR(Renew(arena));
    } else if (renewing_ > 0) {
      renewed_.Wait(mu_);
    } else {
      return absl::ResourceExhaustedError(absl::StrCat(
          "page pool: no room for ", count, " slots of ", slot_bytes, " bytes, ",
          used_bytes_.load(std::memory_order_relaxed), " of ", capacity_bytes_, " bytes in use"));
    }
  }
  FenceBeforeBytes();
  return absl::OkStatus();
}

bool PagePool::Impl::TryAcquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                                std::vector<SlotRef>* slots) {
  const std::uint32_t tenant_index = table_.FindOrAddTenant(tenant);
  if (tenant_index == kNone) return false;
  const std::size_t before = slots->size();
  const bool acquired =
      slot_bytes > kExtentBytes
          ? AcquireLarge(tenant_index, slot_bytes, count, slots)
          : AcquireSmall(tenant_index, SlotClassOf(slot_bytes, slots_per_extent_max_), count,
                         slots);
  if (!acquired) {
    while (slots->size() > before) {
      ReleaseLocked(slots->back());
      slots->pop_back();
    }
  }
  table_.ForgetIfIdle(tenant_index);
  return acquired;
}

bool PagePool::Impl::AcquireLarge(std::uint32_t tenant_index, std::size_t slot_bytes,
                                  std::size_t count, std::vector<SlotRef>* slots) {
  const auto run = static_cast<std::uint32_t>((slot_bytes + kExtentBytes - 1) / kExtentBytes);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t first = table_.Take(tenant_index, run, kNone);
    if (first == kNone) return false;
    Extent& extent = extents_[first];
    extent.stride_bytes = std::uint64_t{run} * kExtentBytes;
    extent.slot_count = 1;
    extent.extent_count = run;
    UseSlots(first, 0, 1, slots);
  }
  return true;
}

bool PagePool::Impl::AcquireSmall(std::uint32_t tenant_index, std::uint32_t slot_class,
                                  std::size_t count, std::vector<SlotRef>* slots) {
  const std::uint32_t slots_per_extent = SlotsPerExtent(slot_class);
  // Whole extents first, as long a run of them as there is.
  std::size_t whole = count / slots_per_extent;
  auto run = static_cast<std::uint32_t>(std::min<std::size_t>(whole, extents_per_arena_ - 1));
  while (whole > 0 && run > 0) {
    run = static_cast<std::uint32_t>(std::min<std::size_t>(whole, run));
    const std::uint32_t first = table_.Take(tenant_index, run, kAdjacentTriesMax);
    if (first == kNone) {
      run /= 2;
      continue;
    }
    for (std::uint32_t extent = first; extent < first + run; ++extent) {
      BeginClass(extent, slot_class);
      UseSlots(extent, 0, slots_per_extent, slots);
    }
    whole -= run;
    count -= std::size_t{run} * slots_per_extent;
  }
  while (count > 0) {
    const auto part = static_cast<std::uint32_t>(std::min<std::size_t>(count, slots_per_extent));
    // Together in a partly used extent, or in a new one, or wherever there is a free slot.
    std::uint32_t extent = PartialHead(tenant_index, slot_class);
    std::uint32_t found = kNone;
    for (std::uint32_t tries = 0; extent != kNone && tries < kAdjacentTriesMax; ++tries) {
      found = FindFreeRun(extent, part);
      if (found != kNone) break;
      extent = extents_[extent].next;
    }
    if (found != kNone) {
      UseSlots(extent, found, part, slots);
      return true;
    }
    extent = table_.Take(tenant_index, 1, kNone);
    if (extent != kNone) {
      BeginClass(extent, slot_class);
      UseSlots(extent, 0, part, slots);
      count -= part;
      continue;
    }
    extent = PartialHead(tenant_index, slot_class);
    if (extent == kNone) return false;
    for (std::uint32_t i = 0; i < slots_per_extent && count > 0; ++i) {
      if (IsUsed({extent, i})) continue;
      UseSlots(extent, i, 1, slots);
      --count;
    }
  }
  return true;
}

absl::Status PagePool::Impl::Renew(std::uint32_t arena) {
  ++renewing_;
  mu_.Unlock();
  absl::Status status;
  if (device_arenas_ != nullptr) status = device_arenas_->Renew(arena);
  if (shared_[arena].load(std::memory_order_relaxed)) {
    if (status.ok()) status = memory_->Renew(arena);
    if (status.ok()) {
      InitGenerations(arena);
      shared_[arena].store(false, std::memory_order_relaxed);
      epochs_[arena].fetch_add(1, std::memory_order_relaxed);
    }
  } else if (device_arenas_ == nullptr) {
    // Nobody else has mapped it: faster, cannot fail, and the generations just go on.
    std::memset(memory_->address(arena) + kExtentBytes, 0, (extents_per_arena_ - 1) * kExtentBytes);
  }
  mu_.Lock();
  --renewing_;
  table_.AddRenewed(arena, status.ok());
  renewed_.NotifyAll();
  return status;
}

void PagePool::Impl::BeginClass(std::uint32_t extent, std::uint32_t slot_class) {
  Extent& e = extents_[extent];
  e.slot_class = slot_class;
  e.slot_count = SlotsPerExtent(slot_class);
  e.stride_bytes = SlotStrideBytes(slot_class);
}

void PagePool::Impl::UseSlots(std::uint32_t extent, std::uint32_t first, std::uint32_t count,
                              std::vector<SlotRef>* slots) {
  Extent& e = extents_[extent];
  for (std::uint32_t index = first; index < first + count; ++index) {
    const SlotRef slot{extent, index};
    KVMILL_DCHECK(!IsUsed(slot) && (GenerationWord(slot).load(std::memory_order_relaxed) & 1) == 1);
    UsedWord(slot).fetch_or(std::uint64_t{1} << (index % 64), std::memory_order_relaxed);
    slots->push_back(slot);
  }
  e.used += count;
  UpdatePartial(extent);
  used_bytes_.fetch_add(count * e.stride_bytes, std::memory_order_relaxed);
  slots_used_ += count;
}

std::uint32_t PagePool::Impl::FindFreeRun(std::uint32_t extent, std::uint32_t count) const {
  const Extent& e = extents_[extent];
  if (e.slot_count - e.used < count) return kNone;
  std::uint32_t free = 0;
  for (std::uint32_t index = 0; index < e.slot_count;) {
    const std::uint64_t used = UsedWord({extent, index}).load(std::memory_order_relaxed);
    if (index % 64 == 0 && used == ~std::uint64_t{0}) {
      free = 0;
      index += 64;
      continue;
    }
    free = (used >> (index % 64) & 1) != 0 ? 0 : free + 1;
    ++index;
    if (free == count) return index - count;
  }
  return kNone;
}

void PagePool::Impl::UpdatePartial(std::uint32_t extent) {
  Extent& e = extents_[extent];
  const bool partial =
      e.used > 0 && e.used < e.slot_count && !table_.IsEmptying(extent / extents_per_arena_);
  if (partial == e.partial) return;
  std::uint32_t& head = PartialHead(table_.TenantIndexOf(extent), e.slot_class);
  if (partial) {
    e.prev = kNone;
    e.next = head;
    if (head != kNone) extents_[head].prev = extent;
    head = extent;
  } else {
    if (e.prev != kNone) {
      extents_[e.prev].next = e.next;
    } else {
      head = e.next;
    }
    if (e.next != kNone) extents_[e.next].prev = e.prev;
  }
  e.partial = partial;
}

void PagePool::Impl::Publish(SlotRef slot) {
  KVMILL_CHECK(IsUsed(slot));
  const std::atomic_ref<std::uint64_t> word = GenerationWord(slot);
  const std::uint64_t generation = word.load(std::memory_order_relaxed);
  KVMILL_CHECK(generation % 2 == 1);
  word.store(generation + 1, std::memory_order_release);
}

void PagePool::Impl::Release(SlotRef slot) {
  MutexLock lock(mu_);
  ReleaseLocked(slot);
}

void PagePool::Impl::ReleaseLocked(SlotRef slot) {
  KVMILL_CHECK(IsUsed(slot));
  const std::atomic_ref<std::uint64_t> word = GenerationWord(slot);
  const std::uint64_t generation = word.load(std::memory_order_relaxed);
  if (generation % 2 == 0) word.store(generation + 1, std::memory_order_release);
  UsedWord(slot).fetch_and(~(std::uint64_t{1} << (slot.index % 64)), std::memory_order_relaxed);
  Extent& e = extents_[slot.extent];
  --e.used;
  used_bytes_.fetch_sub(e.stride_bytes, std::memory_order_relaxed);
  --slots_used_;
  UpdatePartial(slot.extent);
  if (e.used > 0) return;
  const std::uint32_t extent_count = e.extent_count;
  e = Extent{};
  table_.Return(slot.extent, extent_count);
}

absl::Span<std::byte> PagePool::Impl::Bytes(SlotRef slot) const {
  KVMILL_CHECK(IsUsed(slot));
  const Extent& e = extents_[slot.extent];
  return absl::MakeSpan(ExtentAddress(slot.extent) + slot.index * e.stride_bytes, e.stride_bytes);
}

std::uint64_t PagePool::Impl::Generation(SlotRef slot) const {
  KVMILL_CHECK(IsUsed(slot));
  return GenerationWord(slot).load(std::memory_order_acquire);
}

PagePool::Location PagePool::Impl::Locate(SlotRef slot) const {
  KVMILL_CHECK(IsUsed(slot));
  Location location;
  location.arena = slot.extent / extents_per_arena_;
  location.arena_epoch = epochs_[location.arena].load(std::memory_order_relaxed);
  std::uint64_t extent = slot.extent % extents_per_arena_;
  if (device_arenas_ != nullptr) --extent;
  location.offset_bytes = extent * kExtentBytes + slot.index * extents_[slot.extent].stride_bytes;
  location.generation_offset_bytes = GenerationOffset(slot);
  return location;
}

int PagePool::Impl::ArenaFd(std::uint32_t arena) const {
  KVMILL_CHECK(arena < extent_count_ / extents_per_arena_);
  shared_[arena].store(true, std::memory_order_relaxed);
  return device_arenas_ == nullptr ? memory_->fd(arena) : device_arenas_->fd(arena);
}

int PagePool::Impl::GenerationFd(std::uint32_t arena) const {
  KVMILL_CHECK(arena < extent_count_ / extents_per_arena_);
  shared_[arena].store(true, std::memory_order_relaxed);
  return memory_->fd(arena);
}

PagePool::Stats PagePool::Impl::stats() const {
  MutexLock lock(mu_);
  Stats stats;
  stats.capacity_bytes = capacity_bytes_;
  stats.used_bytes = used_bytes();
  stats.extents_free = capacity_bytes_ / kExtentBytes - table_.extents_held();
  stats.slots_used = slots_used_;
  stats.huge_bytes = memory_->huge_bytes();
  stats.memory_bytes = memory_->bytes();
  stats.huge_error = memory_->huge_error();
  return stats;
}

std::vector<PagePool::ArenaUse> PagePool::Impl::ArenasInUse() const {
  std::vector<ArenaUse> uses;
  MutexLock lock(mu_);
  for (std::uint32_t arena = 0; arena < extent_count_ / extents_per_arena_; ++arena) {
    if (!table_.IsAssigned(arena) || table_.IsEmptying(arena)) continue;
    ArenaUse use{arena, table_.TenantOf(arena), 0};
    const std::uint32_t first = arena * extents_per_arena_;
    for (std::uint32_t extent = first; extent < first + extents_per_arena_; ++extent) {
      use.slots_used += extents_[extent].used;
    }
    uses.push_back(use);
  }
  return uses;
}

bool PagePool::Impl::HasArena(TenantId tenant) const {
  MutexLock lock(mu_);
  return table_.HasArena(tenant);
}

std::uint64_t PagePool::Impl::BeginEmptying(std::uint32_t arena, TenantId heir) {
  MutexLock lock(mu_);
  if (!table_.BeginEmptying(arena, heir, last_ticket_ + 1)) return 0;
  ++last_ticket_;
  const std::uint32_t first = arena * extents_per_arena_;
  for (std::uint32_t extent = first; extent < first + extents_per_arena_; ++extent) {
    UpdatePartial(extent);
  }
  return last_ticket_;
}

void PagePool::Impl::EndEmptying(std::uint32_t arena, std::uint64_t ticket) {
  MutexLock lock(mu_);
  if (!table_.EndEmptying(arena, ticket) || !table_.IsAssigned(arena)) return;
  const std::uint32_t first = arena * extents_per_arena_;
  for (std::uint32_t extent = first; extent < first + extents_per_arena_; ++extent) {
    UpdatePartial(extent);
  }
}

bool PagePool::Impl::IsEmptyingFor(TenantId heir) const {
  MutexLock lock(mu_);
  if (table_.emptying_count() == 0) return false;
  for (std::uint32_t arena = 0; arena < extent_count_ / extents_per_arena_; ++arena) {
    if (table_.IsEmptying(arena) && table_.HeirOf(arena) == heir) return true;
  }
  return false;
}

bool PagePool::Impl::IsEmptied(std::uint32_t arena, std::uint64_t ticket) const {
  MutexLock lock(mu_);
  // Or the heir has it already.
  return !table_.IsAssigned(arena) || !table_.IsEmptyingFor(arena, ticket);
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(const Options& options) {
  KVMILL_RETURN_IF_ERROR(CheckOptions(options));
  ArenaMemory::Options memory_options;
  memory_options.arena_count =
      static_cast<std::uint32_t>(options.capacity_bytes / options.arena_bytes);
  memory_options.arena_bytes = options.device == nullptr ? options.arena_bytes : kExtentBytes;
  memory_options.prefault = options.prefault;
  memory_options.huge_pages = options.huge_pages;
  memory_options.progress = options.progress;
  if (options.device == nullptr) memory_options.pin_for = options.pin_for;
  KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<ArenaMemory> memory, ArenaMemory::Create(memory_options));
  std::unique_ptr<DeviceArenas> device_arenas;
  if (options.device != nullptr) {
    KVMILL_ASSIGN_OR_RETURN(
        device_arenas,
        DeviceArenas::Create(*options.device, memory_options.arena_count, options.arena_bytes));
  }
  return std::unique_ptr<PagePool>(new PagePool(std::make_unique<Impl>(
      std::move(memory), std::move(device_arenas), memory_options.arena_count,
      static_cast<std::uint32_t>(options.arena_bytes / kExtentBytes))));
}

PagePool::PagePool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PagePool::~PagePool() = default;

absl::Status PagePool::Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                               std::vector<SlotRef>* slots) {
  return impl_->Acquire(tenant, slot_bytes, count, slots);
}
void PagePool::Publish(SlotRef slot) { impl_->Publish(slot); }
void PagePool::Release(SlotRef slot) { impl_->Release(slot); }
absl::Span<std::byte> PagePool::Bytes(SlotRef slot) const { return impl_->Bytes(slot); }
std::uint64_t PagePool::Generation(SlotRef slot) const { return impl_->Generation(slot); }
PagePool::Location PagePool::Locate(SlotRef slot) const { return impl_->Locate(slot); }
int PagePool::ArenaFd(std::uint32_t arena) const { return impl_->ArenaFd(arena); }
std::uint64_t PagePool::arena_bytes() const { return impl_->arena_bytes(); }
int PagePool::GenerationFd(std::uint32_t arena) const { return impl_->GenerationFd(arena); }
PagePool::Stats PagePool::stats() const { return impl_->stats(); }
std::uint64_t PagePool::used_bytes() const { return impl_->used_bytes(); }
std::uint32_t PagePool::ArenaOf(SlotRef slot) const { return impl_->ArenaOf(slot); }
std::vector<PagePool::ArenaUse> PagePool::ArenasInUse() const { return impl_->ArenasInUse(); }
bool PagePool::HasArena(TenantId tenant) const { return impl_->HasArena(tenant); }
std::uint64_t PagePool::BeginEmptying(std::uint32_t arena, TenantId heir) {
  return impl_->BeginEmptying(arena, heir);
}
void PagePool::EndEmptying(std::uint32_t arena, std::uint64_t ticket) {
  impl_->EndEmptying(arena, ticket);
}
bool PagePool::IsEmptyingFor(TenantId heir) const { return impl_->IsEmptyingFor(heir); }
bool PagePool::IsEmptied(std::uint32_t arena, std::uint64_t ticket) const {
  return impl_->IsEmptied(arena, ticket);
}

}  // namespace kvmill
