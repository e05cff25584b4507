// What a block says of its place in a sequence, as much as is kept of it: enough to find the run of
// kRunBlocks that it belongs to, when the blocks before it are known.
//
// A run's first block is its anchor. A block knows the block before it (its parent), and the parent
// knows its own; so the anchor is found by walking back, up to 31 steps. A block that was copied
// from another node comes without its parents: it names its anchor.
//
// Blocks are named by a 64-bit hash here. Two that collide are a wrong count of a run, which is a
// miss; nothing is served by it.
#ifndef KVMILL_STORAGE_CORE_RUN_LINK_H_
#define KVMILL_STORAGE_CORE_RUN_LINK_H_

#include <cstddef>
#include <cstdint>

#include "storage/core/block_key.h"
#include "storage/core/namespace.h"

namespace kvmill {

inline constexpr std::size_t kRunBlocks = 32;

// XXH3-64 of the fingerprint and the key: the same in every process and version.
std::uint64_t KeyHash(const Fingerprint& fingerprint, const BlockKey& key);

struct RunLink {
  enum class Kind : std::uint8_t {
    kNone = 0,    // In no run that anyone could find: a tail, or its place is not known.
    kFirst = 1,   // It is an anchor itself; `place` and `hash` are 0.
    kParent = 2,  // `hash` is of the block before it.
    kAnchor = 3,  // `hash` is of the anchor.
  };
  std::uint64_t hash = 0;  // KeyHash.
  Kind kind = Kind::kNone;
  std::uint8_t place = 0;  // In the run: below kRunBlocks.

  friend bool operator==(const RunLink&, const RunLink&) = default;
};
static_assert(sizeof(RunLink) == 16);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_RUN_LINK_H_
