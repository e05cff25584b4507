// Memory for pages: a fixed, preallocated budget of shareable memory, of the host or of a device.
//
// The budget is divided into arenas (256 MiB by default; of host memory each a sealed memfd, of a
// device's memory what the device exports by descriptor), each belonging to one tenant while any of
// it is used; an arena into 2 MiB extents; an extent is given to one slot class (slots of one size)
// while any of it is used. Slots larger than an extent take several adjacent extents. Slot
// addresses never move, and nothing is allocated after Create(), with one exception below.
//
// An arena that a tenant leaves is cleaned before another tenant gets it, in that Acquire and
// without a lock: zeroed while its descriptor was never handed out, else replaced by fresh memory
// (a new memfd at the same address), since whoever mapped it for the old tenant would see the new
// tenant's bytes. Both take about as long as writing the arena once. On a device it is always
// replaced, and its address may change.
//
// Every slot has a 64-bit generation in host memory, where readers of the arena see it: in the
// first extent of an arena of host memory, in a sealed memfd of one extent beside an arena of a
// device's memory, which the CPU may not be able to write. It is odd while the slot is free or
// being written, even while its contents are complete. Acquire makes it odd before the caller's
// first byte, Publish makes it even after the last; no value ever repeats. A reader loads it
// (acquire), reads, fences and loads again: equal and even means the bytes were whole.
//
// The pool itself never touches a byte of a device's memory: filling and reading slots is a matter
// of the device's streams, and Publish comes after the copy has ended.
//
// For storage/ and service/node.cc; not for engines. Thread-safe.
#ifndef KVMILL_STORAGE_PAGE_POOL_H_
#define KVMILL_STORAGE_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/device/device.h"
#include "storage/huge_pages.h"

namespace kvmill {

inline constexpr std::size_t kExtentBytes = std::size_t{2} << 20;

using TenantId =
    std::uint32_t;  // Dense number of a tenant; arenas are never shared between tenants.

// Place of a slot: 8 bytes in an index entry. Meaningful to the pool that made it.
struct SlotRef {
  std::uint32_t extent = 0xFFFFFFFFu;  // Extent number over all arenas.
  std::uint32_t index = 0;             // Slot within the extent.

  bool valid() const { return extent != 0xFFFFFFFFu; }
  friend bool operator==(const SlotRef&, const SlotRef&) = default;
};

// Whether it is the next one in the same extent: as large, right behind it, and its generation
// right behind that one's.
constexpr bool Follows(SlotRef slot, SlotRef before) {
  return slot.extent == before.extent && slot.index == before.index + 1;
}

inline constexpr std::size_t kGenerationBytes = sizeof(std::uint64_t);  // Of one slot's word.

class PagePool {
 public:
  struct Options {
    std::uint64_t capacity_bytes = 0;  // Rounded down to whole arenas; at least one.
    std::uint64_t arena_bytes = std::uint64_t{256}
                                << 20;  // Multiple of kExtentBytes, 2 extents to 16 GiB.
    bool prefault = true;               // Touch all memory in Create (parallel); off only in tests.
    HugePages huge_pages = HugePages::kAuto;  // Of memory that is touched.
    // Where the arenas lie; null: in host memory. Outlives the pool.
    Device* device = nullptr;
    // A device that copies to and from arenas of host memory: they are pinned for it. May be null;
    // outlives the pool.
    Device* pin_for = nullptr;
    // Called from Create about twice a second with the bytes touched so far, for a progress line.
    // May be null.
    std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> progress;
  };

  struct Stats {
    std::uint64_t capacity_bytes = 0;  // What slots can use: without the generation extents.
    std::uint64_t used_bytes = 0;      // Of acquired slots, with what their rounding takes.
    std::uint64_t extents_free = 0;    // Extents that no slot class holds, in arenas of any tenant.
    std::uint64_t slots_used = 0;
    std::uint64_t huge_bytes = 0;    // Of the arenas' host memory, generations included.
    std::uint64_t memory_bytes = 0;  // All of that.
    int huge_error = 0;              // An errno: why not all of it, if it was touched.
  };

  // INVALID_ARGUMENT for bad options; RESOURCE_EXHAUSTED naming size and limit when the memory
  // cannot be had.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(const Options& options);
  ~PagePool();

  // `count` slots of `slot_bytes` each for `tenant`, appended to `slots`. Adjacent where possible:
  // whole extents next to each other, the rest together in one extent.
  // All or none: RESOURCE_EXHAUSTED when they do not fit (the caller evicts and retries),
  // INVALID_ARGUMENT when they could never fit. Never blocks on I/O. Generations are odd on return.
  absl::Status Acquire(TenantId tenant, std::size_t slot_bytes, std::size_t count,
                       std::vector<SlotRef>* slots);

  // The slot's contents are complete: its generation becomes even. Release-ordered after every byte
  // written before.
  void Publish(SlotRef slot);

  // The slot is free; its generation becomes odd first, so late readers notice. `slot` must be
  // acquired and unused by others. Here and below a slot that is not acquired fails a check.
  void Release(SlotRef slot);

  // Whole slot: at least slot_bytes as acquired, aligned to 64. Valid until Release. Of a pool in a
  // device's memory: for the device's streams only, unless the device is host_accessible.
  absl::Span<std::byte> Bytes(SlotRef slot) const;
  std::uint64_t Generation(SlotRef slot) const;

  // For readers in other processes (map): a slot lies at `offset_bytes` in the memory of ArenaFd,
  // its generation word at `generation_offset_bytes` in that of GenerationFd.
  struct Location {
    std::uint32_t arena = 0;
    std::uint64_t arena_epoch = 0;  // Another one when the arena got fresh memory.
    std::uint64_t offset_bytes = 0;
    std::uint64_t generation_offset_bytes = 0;
  };
  Location Locate(SlotRef slot) const;
  // The arena's memfd: cannot be written, grown or shrunk through any later mapping. Of a device's
  // memory: for Device::Import. Borrowed, valid while the caller holds a slot in the arena. (From
  // then on the arena counts as handed out.)
  int ArenaFd(std::uint32_t arena) const;
  std::uint64_t arena_bytes() const;  // Of the memory of any ArenaFd.
  // The memfd of the arena's generations, equally sealed and borrowed; of host memory the same one.
  int GenerationFd(std::uint32_t arena) const;

  Stats stats() const;
  std::uint64_t used_bytes() const;  // Of stats(), without a lock.

  // --- Making an arena free for another tenant (storage/memory_tiers_room.cc) ---
  std::uint32_t ArenaOf(SlotRef slot) const;
  struct ArenaUse {
    std::uint32_t arena = 0;
    TenantId tenant = 0;
    std::uint64_t slots_used = 0;
  };
  // Those that belong to a tenant, but for those that are being emptied.
  std::vector<ArenaUse> ArenasInUse() const;
  bool HasArena(TenantId tenant) const;
  // From now on nobody gets a slot in this arena; once its last slot is released, only `heir` may
  // have the arena. Until then, or EndEmptying. 0 when it is not in use, the heir's, or being
  // emptied already; else a ticket.
  std::uint64_t BeginEmptying(std::uint32_t arena, TenantId heir);
  // Nothing when the heir got the arena, or with a ticket of before.
  void EndEmptying(std::uint32_t arena, std::uint64_t ticket);
  bool IsEmptyingFor(TenantId heir) const;  // Any of them, or one that it has not taken yet.
  // Whether its last slot was released since.
  bool IsEmptied(std::uint32_t arena, std::uint64_t ticket) const;

 private:
  class Impl;
  explicit PagePool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_PAGE_POOL_H_
