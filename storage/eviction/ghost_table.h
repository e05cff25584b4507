// Remembers blocks that left, each with a small value, in 4 bytes a block.
//
// Internal to storage/eviction. Not thread-safe. Allocates in the constructor only.
//
// A set-associative table: a hash picks a set of 8 slots, a full set forgets its oldest. So the
// order of forgetting is that of a queue, approximately. A slot is (fingerprint : 28, value : 4);
// two blocks are taken for each other when all 32 bits of their hashes agree (or 28, in a table
// of one set), which costs one wrong guess about a block's worth.
#ifndef KVMILL_STORAGE_EVICTION_GHOST_TABLE_H_
#define KVMILL_STORAGE_EVICTION_GHOST_TABLE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/core/check.h"

namespace kvmill {

class GhostTable {
 public:
  // Holds `ghosts` of them, rounded up to a multiple of 8.
  explicit GhostTable(std::uint64_t ghosts) : sets_((ghosts + kWays - 1) / kWays) {}

  // Remembers `value` (1 to 15) for `hash`, forgetting what was known of it. Returns the value that
  // left the table for it, 0 for none.
  std::uint32_t Add(std::uint32_t hash, std::uint32_t value) {
    KVMILL_DCHECK(value >= 1 && value <= 15);
    Set& set = SetOf(hash);
    auto place = Find(set, hash);
    if (place == set.end()) --place;
    const std::uint32_t displaced = *place & 15u;
    std::move_backward(set.begin(), place, place + 1);
    set.front() = hash << 4 | value;
    return displaced;
  }

  // The value of `hash`, which is forgotten; 0 when it is not here.
  std::uint32_t Take(std::uint32_t hash) {
    Set& set = SetOf(hash);
    const auto place = Find(set, hash);
    if (place == set.end()) return 0;
    const std::uint32_t value = *place & 15u;
    std::move(place + 1, set.end(), place);
    set.back() = 0;
    return value;
  }

  std::size_t bytes() const { return sets_.size() * sizeof(Set); }

 private:
  static constexpr std::size_t kWays = 8;
  using Set = std::array<std::uint32_t, kWays>;  // Newest first; 0 is an empty slot.

  Set& SetOf(std::uint32_t hash) {
    return sets_[static_cast<std::size_t>((std::uint64_t{hash} * sets_.size()) >> 32)];
  }
  static Set::iterator Find(Set& set, std::uint32_t hash) {
    return std::find_if(set.begin(), set.end(), [&](std::uint32_t slot) {
      return slot >> 4 == (hash & 0x0FFFFFFFu) && (slot & 15u) != 0;
    });
  }

  std::vector<Set> sets_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EVICTION_GHOST_TABLE_H_
