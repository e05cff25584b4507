// How this node uses the others' blocks: finds them for lookups, brings them for fetches.
//
// Joins the state machines of service/cluster/ that do it, on the node's loop, with the store, with
// gRPC (GrpcPeers) and with the client library (PeerPull), and lets any thread use them.
#ifndef KVMILL_SERVICE_CLUSTER_BLOCKS_H_
#define KVMILL_SERVICE_CLUSTER_BLOCKS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/elsewhere.h"
#include "service/cluster/announcer.h"
#include "service/cluster/block_bringer.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/remote_fetch.h"
#include "service/cluster/remote_lookup.h"
#include "service/cluster/source_table.h"
#include "service/grpc_peers.h"
#include "service/held_announcer.h"
#include "service/peer_answers.h"
#include "service/peer_pull.h"
#include "storage/tiered_store.h"

namespace kvmill {

class ClusterBlocks {
 public:
  using TimePoint = std::chrono::system_clock::time_point;

  // Requests that wait for peers at once; more do without them.
  static constexpr std::uint32_t kLookupsMax = 1024;
  static constexpr std::uint32_t kBringsMax = 512;

  struct Options {
    Member self;
    std::size_t copies = 0;
    std::int64_t peer_nanos = 200'000'000;  // That a lookup waits for peers, and one call to one.
    PeerPull::Options pull;
  };

  // Made on the loop, and destroyed there or when it has stopped. Loop and store outlive it.
  ClusterBlocks(Loop& loop, TieredStore& store, const Options& options);
  ClusterBlocks(const ClusterBlocks&) = delete;
  ClusterBlocks& operator=(const ClusterBlocks&) = delete;

  // --- On the loop ---
  void SetView(const std::shared_ptr<const ClusterView>& view);

  // --- Thread-safe; callbacks run once, on the loop, unless it stops first ---

  // Whether there is another node that could be asked.
  bool has_peers() const { return has_peers_.load(std::memory_order_relaxed); }

  // Which of the keys, those of a sequence from its first block on, other nodes say that they have,
  // from keys[first] on: one for each key, or none when nobody could be asked.
  void Lookup(const Fingerprint& fingerprint, std::shared_ptr<const std::vector<BlockKey>> keys,
              std::size_t first, const std::string& hint, TimePoint deadline,
              std::function<void(const std::vector<bool>& elsewhere)> done);

  // Brings those of the keys that this node lacks. False: nothing is missing, or nobody can be
  // asked, and `progress` does not run; else as BlockBringer has it. Of the time until `deadline`
  // a quarter is left to whoever passes the blocks on.
  bool Bring(const TieredStore::NamespaceInfo& space, absl::Span<const BlockKey> keys,
             const Elsewhere& elsewhere, TimePoint deadline, BlockBringer::Progress progress);

  // Who has a block of a run, for people.
  struct Where {
    std::vector<Member> homes;  // Best first.
    std::vector<RemoteLookup::Source> holders;
  };
  void Find(const Fingerprint& fingerprint, const RunQuery& query, std::function<void(Where)> done);

  // This node has the first `count` blocks of these runs, from now on: a HeldRuns::Listener.
  void Hold(absl::Span<const Announcement> changed) { held_.Changed(changed); }

  // What peers are answered.
  PeerAnswers& answers() { return answers_; }

  std::map<std::string, GrpcPeers::PeerStats> peer_stats() const { return peers_.stats(); }
  PeerPull::Stats pull_stats() const { return pull_.stats(); }

 private:
  std::int64_t NanosOf(TimePoint deadline, std::int64_t nanos_max) const;

  Loop& loop_;
  TieredStore& store_;
  const Options options_;
  std::atomic<bool> has_peers_{false};  // A stale value costs a call, or a miss.
  std::atomic<std::uint32_t> lookups_{0}, brings_{0};
  std::shared_ptr<const ClusterView> view_;  // Of the loop.

  // On the loop, each used by those below.
  PeerAnswers answers_;
  PeerHealth health_;
  PeerPull pull_;
  GrpcPeers peers_;
  RemoteLookup lookup_;
  RemoteFetch fetch_;
  SourceTable sources_;
  BlockBringer bringer_;
  Announcer announcer_;
  HeldAnnouncer held_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_BLOCKS_H_
