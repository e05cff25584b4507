#include "service/cluster/hot_runs.h"

#include <algorithm>

#include "storage/core/checksum.h"

namespace kvmill {

bool HotRuns::Asked(std::uint64_t anchor_hash, std::string_view peer_id) {
  const std::int64_t now = clock_.MonotonicNanos();
  const std::uint64_t peer =
      Checksum({reinterpret_cast<const std::byte*>(peer_id.data()), peer_id.size()});
  const auto [found, added] = runs_.try_emplace(anchor_hash);
  Run& run = found->second;
  if (added) order_.push_back(anchor_hash);
  if (added || now - run.since >= kWindowNanos) run = {.since = now};
  bool hot = false;
  const auto end = run.peers.begin() + static_cast<std::ptrdiff_t>(run.peer_count);
  if (run.peer_count < kPeers && std::find(run.peers.begin(), end, peer) == end) {
    run.peers[run.peer_count++] = peer;
    hot = run.peer_count == kPeers;
  }
  if (runs_.size() > kRunsMax) {
    runs_.erase(order_.front());
    order_.pop_front();
  }
  return hot;
}

}  // namespace kvmill
