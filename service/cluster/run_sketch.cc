#include "service/cluster/run_sketch.h"

#include <algorithm>

namespace kvmill {

Holds HoldsBlock(const RunSketch& sketch, std::size_t place, std::uint64_t key_hash) {
  if (place >= sketch.count) return Holds::kNo;
  const std::uint16_t tag = sketch.tags[place];
  if (tag == RunSketch::kSeveral) return Holds::kPerhaps;
  return tag == TagOf(key_hash) ? Holds::kYes : Holds::kNo;
}

Holds HoldsAll(const RunSketch& mine, const RunSketch& theirs) {
  if (theirs.count == 0) return Holds::kYes;
  if (mine.count < theirs.count) return Holds::kNo;
  if (!mine.known() || !theirs.known()) return Holds::kPerhaps;
  if (mine.count == theirs.count && mine.blocks == theirs.blocks && mine.sum == theirs.sum) {
    return Holds::kYes;
  }
  // As many places and other blocks: behind a gap, or two whose tags are the same by chance.
  Holds holds = mine.count == theirs.count ? Holds::kPerhaps : Holds::kYes;
  bool several = false;
  for (std::size_t place = 0; place < theirs.count; ++place) {
    const std::uint16_t own = mine.tags[place], other = theirs.tags[place];
    several |= other == RunSketch::kSeveral;
    if (own == RunSketch::kSeveral) {
      holds = Holds::kPerhaps;
    } else if (own != other) {
      return Holds::kNo;
    }
  }
  // What is behind a gap has no tags.
  return !several && theirs.blocks > theirs.count ? Holds::kPerhaps : holds;
}

std::uint8_t StraightPlaces(const RunSketch& sketch) {
  std::uint8_t place = 0;
  while (place < sketch.count && sketch.tags[place] != RunSketch::kSeveral) ++place;
  return place;
}

Holds HoldsStraight(const RunSketch& mine, const RunSketch& theirs) {
  Holds holds = Holds::kYes;
  for (std::size_t place = 0; place < StraightPlaces(theirs); ++place) {
    if (place >= mine.count) return Holds::kNo;
    if (mine.tags[place] == RunSketch::kSeveral) {
      holds = Holds::kPerhaps;
    } else if (mine.tags[place] != theirs.tags[place]) {
      return Holds::kNo;
    }
  }
  return holds;
}

std::uint8_t CommonPlaces(const RunSketch& mine, const RunSketch& theirs) {
  const std::uint8_t most = std::min(mine.count, theirs.count);
  std::uint8_t place = 0;
  while (place < most && mine.tags[place] == theirs.tags[place] &&
         mine.tags[place] != RunSketch::kSeveral) {
    ++place;
  }
  return place;
}

}  // namespace kvmill
