// Where in the cluster a block belongs: by the anchor of its run, not by its own key, so that a
// prompt of many blocks has few homes and is looked up in few round trips.
//
// Pure functions, thread-safe, without allocation unless they return a vector. docs/formats.md
// ("Placement") has the bytes and test vectors: all nodes of a cluster must compute the same.
#ifndef KVMILL_SERVICE_CLUSTER_ANCHOR_H_
#define KVMILL_SERVICE_CLUSTER_ANCHOR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"
#include "storage/core/run_link.h"

namespace kvmill {

// Index, in its sequence, of the block whose key is the anchor of block `index`.
constexpr std::size_t AnchorIndex(std::size_t index) { return index / kRunBlocks * kRunBlocks; }

// Blocks that lie next to each other in one sequence and have one anchor.
struct AnchorRun {
  BlockKey anchor;
  std::size_t first = 0;  // Of the caller's keys.
  std::size_t count = 0;  // 1 to kRunBlocks.
};

// The runs of `keys`: stored keys of consecutive blocks, the first of which has the index
// `first_index` in its sequence. When that is in the middle of a run, `first_anchor` is the key of
// the run's first block; it is not looked at otherwise. An empty one there gives a run whose anchor
// is empty: those blocks have no home that the caller could know.
std::vector<AnchorRun> RunsOf(absl::Span<const BlockKey> keys, std::size_t first_index = 0,
                              const BlockKey& first_anchor = BlockKey());

// What shards are cut from: the number of a block's shard is the highest bits of it.
inline std::uint64_t AnchorHash(const Fingerprint& fingerprint, const BlockKey& anchor) {
  return KeyHash(fingerprint, anchor);
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_ANCHOR_H_
