// Which runs many nodes ask a home for: it keeps a copy of those itself, so that the next ones find
// the blocks where they ask, and their holder is not asked by all.
//
// Bounded: of kRunsMax runs those that were asked for last are known. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_HOT_RUNS_H_
#define KVMILL_SERVICE_CLUSTER_HOT_RUNS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "storage/core/clock.h"

namespace kvmill {

class HotRuns {
 public:
  static constexpr std::size_t kPeers = 3;  // So many different ones within a window.
  static constexpr std::int64_t kWindowNanos = 60'000'000'000;
  static constexpr std::size_t kRunsMax = 1 << 16;  // About 80 bytes each.

  explicit HotRuns(const Clock& clock) : clock_(clock) {}

  // A node asked for blocks of the run. True when that makes the run hot: once a window.
  bool Asked(std::uint64_t anchor_hash, std::string_view peer_id);

  std::size_t runs() const { return runs_.size(); }

 private:
  struct Run {
    std::int64_t since = 0;                        // Begin of its window.
    std::array<std::uint64_t, kPeers> peers = {};  // Hashes of ids.
    std::size_t peer_count = 0;
  };

  const Clock& clock_;
  absl::flat_hash_map<std::uint64_t, Run> runs_;
  std::deque<std::uint64_t> order_;  // Of runs_, as they were entered.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_HOT_RUNS_H_
