// Sizes of slots: how many slots an extent is cut into.
//
// A slot class is a number of slots per extent, not a number of bytes: all sizes of which the same
// number fit share extents at no loss. Up to 32 slots an extent every number is a class; above, 16
// a doubling, so a slot wastes at most 1/16 and pages of many sizes (unfinished blocks, blocks with
// raw heads) share few classes. Worked example: pages of 110912 bytes fit 18 times into 2 MiB,
// class 17, a stride of 116480 bytes.
//
// Internal to storage/. Pure functions.
#ifndef KVMILL_STORAGE_SLOT_CLASSES_H_
#define KVMILL_STORAGE_SLOT_CLASSES_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "storage/page_pool.h"

namespace kvmill {

inline constexpr std::uint32_t kSlotsPerExtentMax = 2048;
inline constexpr std::uint32_t kSlotClassCount = 128;
inline constexpr std::size_t kSlotAlignment = 64;

// The class with the most slots per extent that hold `slot_bytes` (1 to kExtentBytes), but not more
// than `slots_max` of them (1 to kSlotsPerExtentMax).
constexpr std::uint32_t SlotClassOf(std::size_t slot_bytes, std::uint32_t slots_max) {
  const std::size_t aligned = (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  const std::uint32_t slots =
      static_cast<std::uint32_t>(std::min<std::size_t>(kExtentBytes / aligned, slots_max));
  if (slots < 32) return slots - 1;
  const std::uint32_t width = static_cast<std::uint32_t>(std::bit_width(slots));
  return 31 + (width - 6) * 16 + (slots >> (width - 5)) - 16;
}

constexpr std::uint32_t SlotsPerExtent(std::uint32_t slot_class) {
  if (slot_class < 31) return slot_class + 1;
  const std::uint32_t above = slot_class - 31;
  return (16 + above % 16) << (1 + above / 16);
}

// From one slot to the next.
constexpr std::size_t SlotStrideBytes(std::uint32_t slot_class) {
  return kExtentBytes / SlotsPerExtent(slot_class) / kSlotAlignment * kSlotAlignment;
}

static_assert(SlotClassOf(kExtentBytes, kSlotsPerExtentMax) == 0);
static_assert(SlotClassOf(1, kSlotsPerExtentMax) == kSlotClassCount - 1);
static_assert(SlotsPerExtent(kSlotClassCount - 1) == kSlotsPerExtentMax);
static_assert(SlotStrideBytes(SlotClassOf(110912, kSlotsPerExtentMax)) == 116480);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_SLOT_CLASSES_H_
