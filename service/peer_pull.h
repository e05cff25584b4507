// Copies blocks from other nodes into the local store: Peers::Pull over the client library, which
// brings them by UCX where both nodes have it and with gRPC messages elsewhere.
//
// A pull is cut into batches of about 16 MiB. Pages are received where the store will keep them,
// without another copy; a block is verified and sealed, on threads of this object's own, as soon as
// all of it came. What is damaged, torn, or too late leaves nothing.
//
// Bounds, of Options. In flight are at most `blocks` blocks and `bytes` bytes of one peer, and so
// many of all, whatever it is that peers do; what exceeds them waits here, up to its deadline.
// Bytes are counted as those of tiles (a batch of blocks in 16 bits takes up to five times as
// much), and are memory of the store that cannot be evicted meanwhile. Clients are PeerClients',
// and a pull from a peer that can have none now waits for one, too.
//
// A pull that was cancelled, or is too late, holds what it has in flight until its fetch has ended:
// at its deadline, or when the peer has sent it.
#ifndef KVMILL_SERVICE_PEER_PULL_H_
#define KVMILL_SERVICE_PEER_PULL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "client/client.h"
#include "client/request_context.h"
#include "service/cluster/loop.h"
#include "service/cluster/peers.h"
#include "service/peer_clients.h"
#include "service/pull_batch.h"
#include "service/pull_transports.h"
#include "service/tenants.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Lives on the loop, or ends when the loop has stopped; the others outlive it. Only stats() and
// transports() are for any thread.
class PeerPull final {
 public:
  struct Options {
    struct Limit {
      std::size_t blocks = 0;
      std::uint64_t bytes = 0;
    };
    Limit peer = {512, std::uint64_t{128} << 20};
    Limit all = {2048, std::uint64_t{256} << 20};
    std::uint64_t batch_bytes = std::uint64_t{16} << 20;  // A block at least.
    std::size_t calls_max = 4096;  // Open pulls; more are RESOURCE_EXHAUSTED.
    std::size_t seal_threads = 2;
    SharedTenants shared;  // Nothing of others is pulled.
  };

  PeerPull(Loop& loop, TieredStore& store, PeerClients& clients, const Options& options);
  // Closes the clients: waits for no peer. Pulls end without a word.
  ~PeerPull();
  PeerPull(const PeerPull&) = delete;
  PeerPull& operator=(const PeerPull&) = delete;

  // As Peers::Pull: `done` runs once, on the loop, not within this call, at the deadline at the
  // latest. `call` names it for Cancel, and is the caller's. Statuses of blocks: OK also when it
  // was here before; NOT_FOUND; DATA_LOSS; RESOURCE_EXHAUSTED, no room for it here;
  // FAILED_PRECONDITION, its tenant is at its hard quota here, which is nobody else's business;
  // ABORTED, it was removed here meanwhile. Errors of all: UNAVAILABLE, nobody answers at the
  // member's address, or it is no member any more; a ReplacedError, another process answers there;
  // DEADLINE_EXCEEDED; INVALID_ARGUMENT; RESOURCE_EXHAUSTED, too many pulls. A namespace that this
  // node does not know is learned from the peer, with its tenant, and opened under a name that no
  // engine uses (service/heard_names.h): what engines call it stays their own choice. Blocks
  // count for the quota of its tenant here. Of a tenant that is not shared everything is
  // FAILED_PRECONDITION. Only whole blocks are pulled: one that comes with fewer tokens is
  // DATA_LOSS.
  void Pull(Peers::CallId call, const Member& member, const Fingerprint& fingerprint,
            RunKeys blocks, std::int64_t deadline_nanos,
            Peers::Done<std::vector<absl::Status>> done);
  // `done` does not run. Nothing when it has.
  void Cancel(Peers::CallId call);

  // Opens a namespace, of the tenant that it says, under such a name. `heard`: what a peer calls
  // it; may be empty. It may write to the disk, so not on the loop: `done` runs there later.
  void Open(NamespaceSpec spec, std::string heard, Peers::Done<TieredStore::NamespaceInfo> done);

  // Counters since the start, and gauges.
  struct Stats {
    std::uint64_t pulls = 0, failed_pulls = 0;
    std::uint64_t blocks = 0, bytes = 0;  // Sealed here.
    std::uint64_t missing_blocks = 0;
    std::uint64_t damaged_blocks = 0;
    std::uint64_t blocks_in_flight = 0, bytes_in_flight = 0;
  };
  Stats stats() const;
  const PullTransports& transports() const { return transports_; }

 private:
  using PeerPtr = PeerClients::PeerPtr;
  struct Op {
    Member member;
    PeerPtr peer;           // In use by the pull; null: no client could be had yet.
    bool greeting = false;  // It waits until the process there has said who it is.
    Fingerprint fingerprint{};
    RunKeys blocks;
    bool bad = false;       // It only waits to be told so.
    bool learning = false;  // The peer was asked for the namespace.
    std::int64_t deadline_nanos = 0;
    NamespaceId namespace_id = 0;
    std::shared_ptr<const ClientNamespace> ns;  // Shared with the batches. Null: not known here.
    std::uint64_t block_bytes = 0;              // Of a whole block in tiles.
    std::vector<PullBatch::Wanted> wanted;      // Empty until the namespace is known.
    std::vector<absl::Status> statuses;
    std::size_t next = 0;  // The first block that no batch asks for.
    std::size_t answered = 0;
    std::vector<std::shared_ptr<PullBatch>> batches;  // That run.
    Loop::TimerId timer = 0;
    Peers::Done<std::vector<absl::Status>> done;
    RequestPtr request = CurrentRequest();  // For which it is: batches carry it.
  };

  absl::Status Check(const RunKeys& blocks, std::int64_t deadline_nanos) const;
  // Whether the op's peer may be asked now. Not OK: it never will be.
  absl::StatusOr<bool> Reach(Peers::CallId call, Op* op);
  void Greeted(Peers::CallId call, const absl::Status& said);
  // Ends pulls from peers whose client was closed.
  void PeersChanged();
  void SetNamespace(Op* op, const TieredStore::NamespaceInfo& space);
  // Asks the peer for the namespace and opens it here.
  void Learn(Peers::CallId call, Op* op);
  void Learned(Peers::CallId call, const absl::StatusOr<TieredStore::NamespaceInfo>& space);
  // Starts whatever may start.
  void Pump();
  void PumpSoon();
  void StartBatches(Peers::CallId call, Op* op);
  void StartBatch(Peers::CallId call, Op* op, std::size_t count);
  void BatchEnded(Peers::CallId call, const PeerPtr& peer, std::size_t first,
                  const std::shared_ptr<PullBatch>& batch, PullBatch::Result result);
  // One more batch of the peer is in flight, or one less.
  void Take(const PeerPtr& peer, std::size_t blocks, std::uint64_t bytes);
  void GiveBack(const PeerPtr& peer, std::size_t blocks, std::uint64_t bytes);
  void Finish(Peers::CallId call, absl::StatusOr<std::vector<absl::Status>> result);

  Loop& loop_;
  TieredStore& store_;
  PeerClients& clients_;
  const Options options_;
  std::map<Peers::CallId, Op> ops_;
  std::deque<Peers::CallId> queue_;  // Of pulls with blocks that nobody was asked for yet.
  bool pumping_ = false;             // A Pump is posted.
  Options::Limit in_flight_;
  std::map<PeerClients::PeerId, Options::Limit> in_flight_of_;  // Of whom there is something.

  struct Counters {
    std::atomic<std::uint64_t> pulls{0}, failed_pulls{0}, blocks{0}, bytes{0}, missing_blocks{0},
        damaged_blocks{0}, blocks_in_flight{0}, bytes_in_flight{0};
  } counters_;

  PullTransports transports_;

  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  WorkerPool sealers_;  // Last: what they run uses the rest.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_PULL_H_
