// What a node has of one run, in some 80 bytes: good enough to say of a block whether it is among
// it, and of two nodes whether one lacks what the other has.
//
// Sequences that share their first blocks and part within a run have one anchor, so a place of a
// run may hold several blocks. A sketch names the block of each place that holds one, by 16 bits of
// its hash, and says of the others only that there are several: there it cannot tell, and the node
// has to be asked. Nothing that a sketch says is served; a wrong one is a miss, or a copy more or
// less. docs/formats.md ("Placement") has the bytes.
//
// Pure functions, thread-safe.
#ifndef KVMILL_SERVICE_CLUSTER_RUN_SKETCH_H_
#define KVMILL_SERVICE_CLUSTER_RUN_SKETCH_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "storage/core/run_link.h"

namespace kvmill {

// 16 bits of KeyHash; never 0.
constexpr std::uint16_t TagOf(std::uint64_t key_hash) {
  // Not the highest bits: those of an anchor are its shard's, the same for all that a home has.
  const auto tag = static_cast<std::uint16_t>(key_hash);
  return tag == 0 ? std::uint16_t{1} : tag;
}

enum class Holds : std::uint8_t { kNo = 0, kPerhaps = 1, kYes = 2 };

struct RunSketch {
  static constexpr std::uint16_t kSeveral = 0;

  // The run's first places that hold some block. 0: nothing is here, or not the anchor; all else
  // is 0 then, too.
  std::uint8_t count = 0;
  // Of the run, those behind a gap included.
  std::uint32_t blocks = 0;
  // The exclusive or of their hashes: with `blocks`, which ones they are. 0: not known, as of a
  // node of an earlier version, whose places all look like several.
  std::uint64_t sum = 0;
  // Of each place below `count`, TagOf its block, or kSeveral; 0 behind them.
  std::array<std::uint16_t, kRunBlocks> tags{};

  bool known() const { return count == 0 || sum != 0; }

  friend bool operator==(const RunSketch&, const RunSketch&) = default;
};

// Whether the block is among the first `count` places.
Holds HoldsBlock(const RunSketch& sketch, std::size_t place, std::uint64_t key_hash);

// Whether `mine` has all blocks of `theirs`.
Holds HoldsAll(const RunSketch& mine, const RunSketch& theirs);

// Likewise, of the blocks before the first place where `theirs` has several.
Holds HoldsStraight(const RunSketch& mine, const RunSketch& theirs);
// How many places that are.
std::uint8_t StraightPlaces(const RunSketch& sketch);

// How many of the first places of `theirs` hold one block, and `mine` the same one.
std::uint8_t CommonPlaces(const RunSketch& mine, const RunSketch& theirs);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_RUN_SKETCH_H_
