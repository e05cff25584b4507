#include "service/cluster/anchor.h"

#include <algorithm>

namespace kvmill {

std::vector<AnchorRun> RunsOf(absl::Span<const BlockKey> keys, std::size_t first_index,
                              const BlockKey& first_anchor) {
  std::vector<AnchorRun> runs;
  runs.reserve(keys.size() / kRunBlocks + 2);
  for (std::size_t first = 0; first < keys.size();) {
    const std::size_t inside = (first_index + first) % kRunBlocks;
    const std::size_t count = std::min(kRunBlocks - inside, keys.size() - first);
    runs.push_back({inside == 0 ? keys[first] : first_anchor, first, count});
    first += count;
  }
  return runs;
}

}  // namespace kvmill
