// Sketches for tests, put together in the simplest way.
#ifndef KVMILL_TESTS_CLUSTER_SKETCHES_H_
#define KVMILL_TESTS_CLUSTER_SKETCHES_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "service/cluster/run_sketch.h"

namespace kvmill {

// Of blocks by place and hash, in this order.
inline RunSketch SketchOfBlocks(
    const std::vector<std::pair<std::size_t, std::uint64_t>>& places_and_hashes) {
  RunSketch sketch;
  for (const auto& [place, hash] : places_and_hashes) {
    if (place > sketch.count) break;
    sketch.tags[place] = place < sketch.count ? RunSketch::kSeveral : TagOf(hash);
    sketch.count = static_cast<std::uint8_t>(place + 1);
  }
  if (sketch.count == 0) return sketch;
  for (const auto& [place, hash] : places_and_hashes) {
    ++sketch.blocks;
    sketch.sum ^= hash;
  }
  return sketch;
}

// A run's first `count` places, one made-up block in each: those of another `sequence` are others.
inline RunSketch Places(std::size_t count, std::uint64_t sequence = 0) {
  std::vector<std::pair<std::size_t, std::uint64_t>> blocks;
  for (std::size_t place = 0; place < count; ++place) {
    blocks.emplace_back(place, (sequence * 100 + place + 1) * 0x9e3779b97f4a7c15);
  }
  return SketchOfBlocks(blocks);
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_SKETCHES_H_
