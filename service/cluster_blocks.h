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
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/elsewhere.h"
#include "service/cluster/announcer.h"
#include "service/cluster/block_bringer.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/handover.h"
#include "service/cluster/loop.h"
#include "service/cluster/namespace_learner.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/remote_fetch.h"
#include "service/cluster/remote_lookup.h"
#include "service/cluster/replicator.h"
#include "service/cluster/source_table.h"
#include "service/grpc_peers.h"
#include "service/held_announcer.h"
#include "service/held_runs.h"
#include "service/peer_answers.h"
#include "service/peer_clients.h"
#include "service/peer_pull.h"
#include "service/tenants.h"
#include "storage/core/mutex.h"
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
    std::size_t copies = 0;  // R
    RateLimit::Options replication;
    const HeldRuns* held = nullptr;         // Of the store; outlives this.
    std::int64_t peer_nanos = 200'000'000;  // That a lookup waits for peers, and one call to one.
    PeerPull::Options pull;                 // Its `shared` is taken from here.
    SharedTenants shared;  // Whose blocks this node asks others for, and tells them of.
    TlsFiles tls;          // Of connections to peers.
  };

  // Made on the loop, and destroyed there or when it has stopped. The others outlive it.
  ClusterBlocks(Loop& loop, TieredStore& store, PeerClients& clients, const Options& options);
  ~ClusterBlocks();
  ClusterBlocks(const ClusterBlocks&) = delete;
  ClusterBlocks& operator=(const ClusterBlocks&) = delete;

  // --- On the loop ---
  void SetView(const std::shared_ptr<const ClusterView>& view);
  // The members of which a view is being made.
  void SetMembers(const std::vector<Member>& members);

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

  // A namespace that this node does not know, of a tenant that is shared: another node is asked,
  // and it is open here when `done` has it. Errors as NamespaceLearner::Learn, or why it could not
  // be opened.
  void Learn(const NamespaceQuestion& question, const std::string& hint, TimePoint deadline,
             std::function<void(absl::StatusOr<TieredStore::NamespaceInfo>)> done);

  // Options::peer_nanos, and the rate of Options::replication, of what begins from now on.
  void SetPeerNanos(std::int64_t nanos);
  void SetReplicationRate(std::uint64_t bytes_per_second);

  // From `nanos` on nobody waits for a peer any more: who does goes on with what has come by then.
  void EndWaiting(std::int64_t nanos);

  // Who has a block of a run, for people: all members are asked. Of a query whose anchor is its own
  // block the anchor is looked up, if this node has the block; else the homes are as it says.
  struct Where {
    std::vector<Member> homes;  // Best first.
    std::vector<RemoteLookup::Source> holders;
  };
  void Find(const Fingerprint& fingerprint, const RunQuery& asked, TimePoint deadline,
            std::function<void(Where)> done);

  // This node has the first `count` blocks of these runs, from now on: a HeldRuns::Listener.
  void Hold(absl::Span<const Announcement> changed, absl::Span<const HeldTable::Left> left) {
    held_.Changed(changed, left);
  }

  // Has others take over what only this node has, as it leaves, hot runs first: all blocks that are
  // stored by now. Waits for it, `limit_nanos` at most; on another thread than the loop, once.
  Handover::Report HandOver(std::int64_t limit_nanos);
  // Blocks of the store that HandOver asks nobody to take (HeldRuns::CountOthers).
  std::uint64_t CountLeftOut(std::chrono::nanoseconds limit) const {
    return options_.held == nullptr ? 0 : options_.held->CountOthers(limit);
  }

  // What peers are answered.
  PeerAnswers& answers() { return answers_; }
  // On the loop: shared with what else speaks to peers.
  GrpcPeers& peers() { return peers_; }
  PeerHealth& health() { return health_; }

  std::map<std::string, GrpcPeers::PeerStats> peer_stats() const { return peers_.stats(); }
  std::vector<std::string> peer_refusals() const { return peers_.Refusals(); }
  PeerPull::Stats pull_stats() const { return pull_.stats(); }
  const PullTransports& pull_transports() const { return pull_.transports(); }

  // Of copies, as it was a moment ago.
  struct CopyStats {
    Replicator::Stats copied;
    std::uint64_t queued_runs = 0;
    std::uint64_t handed_over_blocks = 0, left_blocks = 0;  // When this node left,
    std::uint64_t handing_over_blocks = 0;                  //   and while it does: that wait.
    std::uint64_t differed_digests = 0;
  };
  CopyStats copy_stats() const {
    MutexLock lock(stats_mu_);
    return stats_;
  }

 private:
  static PeerPull::Options PullOptions(const Options& options);
  Replicator::Options ReplicatorOptions();
  NamespaceLearner::Options LearnerOptions();
  std::vector<HeldRun> ListRuns(const std::vector<RunList>& lists) const;
  std::uint64_t BytesOf(const Fingerprint& fingerprint, const BlockKey& key) const;
  void ListHeld(std::promise<std::vector<Announcement>>* held);
  void PublishStats();
  Member SelfMember() const;
  std::int64_t NanosOf(TimePoint deadline, std::int64_t nanos_max) const;

  Loop& loop_;
  TieredStore& store_;
  const Options options_;
  std::atomic<std::int64_t> peer_nanos_;  // A stale value is the one of before.
  std::atomic<bool> has_peers_{false};    // A stale value costs a call, or a miss.
  std::atomic<std::uint32_t> lookups_{0}, brings_{0};
  std::shared_ptr<const ClusterView> view_;  // Of the loop.

  // On the loop, each used by those below.
  PeerAnswers answers_;
  PeerHealth health_;
  PeerPull pull_;
  GrpcPeers peers_;
  RemoteLookup lookup_;
  RemoteFetch fetch_;
  NamespaceLearner learner_;
  SourceTable sources_;
  BlockBringer bringer_;
  Announcer announcer_;
  Replicator replicator_;
  Handover handover_;
  bool closed_ = false;  // EndWaiting.
  Loop::TimerId close_timer_ = 0;
  Loop::TimerId stats_timer_ = 0;
  mutable Mutex stats_mu_;
  CopyStats stats_ ABSL_GUARDED_BY(stats_mu_);
  HeldAnnouncer held_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_BLOCKS_H_
