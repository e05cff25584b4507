// What this node answers its peers: which blocks it has, and, as a home, who told it to have some.
#ifndef KVMILL_SERVICE_PEER_ANSWERS_H_
#define KVMILL_SERVICE_PEER_ANSWERS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peers.h"
#include "service/cluster/pointer_table.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Blocks are those of the daemon's own tenant. Loop and store outlive it, and no call of the
// thread-safe part begins or waits once it is destroyed.
class PeerAnswers {
 public:
  PeerAnswers(Loop& loop, const TieredStore& store, const PointerTable::Options& pointers)
      : loop_(loop), store_(store), pointers_(loop.clock(), pointers) {}

  // Thread-safe. `done` runs once: now, when every block is here, or else on the loop.
  void Locate(const Fingerprint& fingerprint, std::vector<RunQuery> queries,
              std::function<void(std::vector<RunAnswer>)> done);
  // Thread-safe. `done` runs once, on the loop. UNAVAILABLE: the holder is not in the view.
  void Announced(const Member& holder, std::vector<Announcement> announcements,
                 std::function<void(absl::Status)> done);

  // On the loop.
  RunAnswer Answer(const Fingerprint& fingerprint, const RunQuery& query) const;
  void SetView(std::shared_ptr<const ClusterView> view);
  PointerTable& pointers() { return pointers_; }

 private:
  // Bits of the keys that are here, whole. Thread-safe, never blocks.
  std::uint32_t Present(const Fingerprint& fingerprint, const RunQuery& query) const;

  Loop& loop_;
  const TieredStore& store_;
  // On the loop.
  PointerTable pointers_;
  std::shared_ptr<const ClusterView> view_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_ANSWERS_H_
