// This daemon as a node of a cluster: the loop, and the state machines on it. Membership makes
// views, in the background; what uses other nodes' blocks (ClusterBlocks) goes by them.
#ifndef KVMILL_SERVICE_CLUSTER_NODE_H_
#define KVMILL_SERVICE_CLUSTER_NODE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/membership.h"
#include "service/cluster/registry.h"
#include "service/cluster_blocks.h"
#include "service/cluster_tickets.h"
#include "service/thread_loop.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Thread-safe.
class ClusterNode {
 public:
  // The registry lives on the loop and calls back there.
  using MakeRegistry = std::function<absl::StatusOr<std::unique_ptr<Registry>>(Loop&)>;

  struct Options {
    Membership::Options membership;  // Passed Membership::Check.
    PeerClients::Options clients;    // Also for the TLS of all that is asked of peers.
    ClusterBlocks::Options blocks;   // Their `self` and `tls` are taken from those above.
    ClusterTickets::Options tickets;
  };
  // Waits for nobody: the node joins when the registry answers. The store outlives the node. Logs
  // what changes.
  static absl::StatusOr<std::unique_ptr<ClusterNode>> Start(const Clock& clock, TieredStore& store,
                                                            Options options,
                                                            const MakeRegistry& make_registry);
  // Without Leave the node vanishes when its lease ends.
  ~ClusterNode();

  const std::string& node_id() const { return membership_options_.self.member.id; }
  // Never null, never waits for the loop.
  std::shared_ptr<const MembershipSnapshot> snapshot() const;

  // What it does with other nodes' blocks.
  ClusterBlocks& blocks() const { return *blocks_; }
  // What it promises others, and has from them.
  ClusterTickets& tickets() const { return *tickets_; }

  // Peers see it as soon as the registry has it.
  void SetDraining();
  // Takes this node out of the registry. Returns when it is, or after `limit` with the reason.
  // Once.
  absl::Status Leave(std::chrono::milliseconds limit);

 private:
  ClusterNode(const Clock& clock, const Membership::Options& options)
      : membership_options_(options), loop_(clock) {}
  ViewKeeper::Options ViewOptions();
  void Published(std::shared_ptr<const MembershipSnapshot> snapshot);

  const Membership::Options membership_options_;
  mutable Mutex mu_;
  std::shared_ptr<const MembershipSnapshot> snapshot_ ABSL_GUARDED_BY(mu_) =
      std::make_shared<const MembershipSnapshot>();
  ThreadLoop loop_;
  std::unique_ptr<PeerClients> clients_;  // On the loop, as is what follows.
  // Of these two, what is thread-safe is constant after Start.
  std::unique_ptr<ClusterBlocks> blocks_;
  std::unique_ptr<ClusterTickets> tickets_;
  std::unique_ptr<ViewKeeper> views_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<WorkerPool> view_maker_;  // One thread.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_NODE_H_
