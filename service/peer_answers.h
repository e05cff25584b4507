// What this node answers its peers: which blocks it has, and, as a home, who told it to have some.
// As a home that keeps copies it passes on what it hears to its Replicator.
#ifndef KVMILL_SERVICE_PEER_ANSWERS_H_
#define KVMILL_SERVICE_PEER_ANSWERS_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/hot_runs.h"
#include "service/cluster/loop.h"
#include "service/cluster/peers.h"
#include "service/cluster/pointer_table.h"
#include "service/cluster/replicator.h"
#include "service/tenants.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Blocks are those of the tenants that are shared. Loop and store outlive it, and no call of the
// thread-safe part begins or waits once it is destroyed.
class PeerAnswers {
 public:
  PeerAnswers(Loop& loop, const TieredStore& store, const PointerTable::Options& pointers,
              const SharedTenants& shared = SharedTenants())
      : loop_(loop),
        store_(store),
        shared_(shared),
        pointers_(loop.clock(), pointers),
        hot_(loop.clock()) {}

  // Thread-safe. `done` runs once: now, when every block is here, or else on the loop. `asker`: the
  // node id of who asks; empty: not known.
  void Locate(const std::string& asker, const Fingerprint& fingerprint,
              std::vector<RunQuery> queries, std::function<void(std::vector<RunAnswer>)> done);

  // Thread-safe; `done` runs once, on the loop. UNAVAILABLE: the holder is not in the view.
  void Announced(const Member& holder, std::vector<Announcement> announcements,
                 std::function<void(absl::Status)> done);
  // UNAVAILABLE, too, while this node keeps nothing for others.
  void HandedOver(const Member& holder, std::vector<Announcement> announcements,
                  Peers::Done<std::vector<std::uint8_t>> done);
  void Compare(const Member& holder, const Digests& digests, Peers::Done<std::uint64_t> done);

  // Thread-safe, may take a moment. What is here of these runs; nothing without a lister.
  using Lister = std::function<std::vector<HeldRun>(const std::vector<RunList>& lists)>;
  std::vector<HeldRun> ListRuns(const std::vector<RunList>& lists) const {
    return lister_ == nullptr ? std::vector<HeldRun>() : lister_(lists);
  }
  // Before the first call.
  void SetLister(Lister lister) { lister_ = std::move(lister); }

  // On the loop. `replicator`: null when it ends.
  void SetReplicator(Replicator* replicator) { replicator_ = replicator; }
  RunAnswer Answer(const Fingerprint& fingerprint, const RunQuery& query) const;
  void SetView(std::shared_ptr<const ClusterView> view);
  PointerTable& pointers() { return pointers_; }

 private:
  // Bits of the keys that are here, whole. Thread-safe, never blocks.
  std::uint32_t Present(const Fingerprint& fingerprint, const RunQuery& query) const;
  absl::Status CheckMember(const Member& holder) const;

  Loop& loop_;
  const TieredStore& store_;
  const SharedTenants shared_;
  Lister lister_;
  // On the loop.
  PointerTable pointers_;
  HotRuns hot_;
  Replicator* replicator_ = nullptr;
  std::shared_ptr<const ClusterView> view_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_ANSWERS_H_
