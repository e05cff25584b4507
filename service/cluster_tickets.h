// This node's tickets: joins the state machines of both sides (service/cluster/ticket_table.h,
// ticket_redeem.h), on the cluster's loop, with the store, with gRPC and with the client library,
// and lets any thread use them.
//
// One ticket, from its making to its end:
//   1. TicketService::Create calls Create: TicketTable makes the ticket, StoreTicketHolds holds its
//      blocks. What TieredStore finishes and seals it tells the table.
//   2. The ticket travels with the request, outside of kvmill, to the decode engine.
//   3. TicketService::Redeem, at that engine's node, calls Redeem: TicketRedeem asks the producer,
//      again and again, what is new (TicketPulls::Redeem, Peer.AskTicket, Ask).
//   4. It begins copies (StoreTicketCopies) and pulls finished pages into them (TicketPulls::Pull;
//      there Read, called by DataPlane or by Peer.ReadTicket).
//   5. It seals a copy (StoreTicketCopies::Commit), and tells the engine all along.
//   6. It acknowledges (TicketPulls::Acknowledge, Acknowledge): TicketTable lets go of the blocks.
// At the node that made it there is no 4 and no 5; the rest is the same, over the node's own
// address. Instead of 6: Revoke, SessionEnded, or the deadline, which TicketTable keeps.
#ifndef KVMILL_SERVICE_CLUSTER_TICKETS_H_
#define KVMILL_SERVICE_CLUSTER_TICKETS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/loop.h"
#include "service/cluster/member.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/ticket_redeem.h"
#include "service/cluster/ticket_table.h"
#include "service/grpc_peers.h"
#include "service/loop_mail.h"
#include "service/peer_clients.h"
#include "service/tenants.h"
#include "service/ticket_codec.h"
#include "service/ticket_copies.h"
#include "service/ticket_holds.h"
#include "service/ticket_pulls.h"
#include "storage/core/mutex.h"
#include "storage/core/worker_pool.h"
#include "storage/tiered_store.h"

namespace kvmill {

class ClusterTickets {
 public:
  // Reads of one consumer at a time: twice what a consumer has (producer_pulls_max).
  static constexpr std::size_t kReadsMax = 64;

  struct Options {
    std::uint64_t held_bytes_max = 0;    // StoreTicketHolds
    std::uint64_t copied_bytes_max = 0;  // StoreTicketCopies
    Member self;                         // This node.
    SharedTenants shared;                // Whose tickets there are.
    TicketTable::Options table;
    TicketRedeem::Options redeem;
  };

  // Made on the loop, and destroyed there or when it has stopped. The others outlive it.
  ClusterTickets(Loop& loop, TieredStore& store, GrpcPeers& peers, PeerClients& clients,
                 PeerHealth& health, const Options& options);
  ~ClusterTickets();
  ClusterTickets(const ClusterTickets&) = delete;
  ClusterTickets& operator=(const ClusterTickets&) = delete;

  // On the loop. `fresh`: these are the members, as far as anybody knows.
  void SetMembers(const std::vector<Member>& members, bool fresh);

  // --- Thread-safe; callbacks run once, on the loop, unless it stops first ---

  // For an engine here, whose session is `request.owner`. `lives`, on the loop: whether that
  // session still is there, and somebody waits for the ticket; ABORTED when not. `done` comes when
  // everything that is stored from then on is held. INVALID_ARGUMENT, too, when the consumer is no
  // member of the cluster.
  void Create(TicketTable::Request request, std::function<bool()> lives,
              std::function<void(absl::StatusOr<std::string> ticket)> done);
  // FAILED_PRECONDITION: it was made by another process, which is in the ticket.
  absl::Status CheckMadeHere(const TicketBearer& ticket) const;
  // As CheckMadeHere, or NoSuchTicketError. That the ticket is of the caller's tenant was looked at
  // before, for this and for Redeem.
  void Revoke(const TicketBearer& ticket, std::function<void(absl::Status)> done);
  void SessionEnded(const std::string& session);

  // For an engine here. As TicketRedeem::Start; UNAVAILABLE, too, when the producer is no member of
  // the cluster as this node knows it.
  struct Redeeming;
  using RedeemingPtr = std::shared_ptr<Redeeming>;  // Of whoever may cancel it, and of the loop.
  RedeemingPtr Redeem(const TicketBearer& ticket, std::int64_t nanos, TicketRedeem::Update update,
                      TicketRedeem::Done done);
  // Nothing of it runs any more, but for what runs now.
  void Cancel(const RedeemingPtr& redeeming);

  // For the consumers of tickets of this node.
  void Ask(const TicketHolder& holder, std::uint64_t seen, std::int64_t wait_nanos,
           std::function<void(absl::StatusOr<TicketNews>)> done);
  // Pages in the order of the pieces and their layers. RESOURCE_EXHAUSTED: kReadsMax of this
  // consumer are under way.
  struct Pages {
    std::vector<StoreTicketHolds::Page> pages;
    std::shared_ptr<const void> reading;  // It is, until this is gone. From any thread.
  };
  void Read(const TicketHolder& holder, std::vector<TicketPiece> pieces,
            std::function<void(absl::StatusOr<Pages>)> done);
  void Acknowledge(const TicketHolder& holder, std::function<void(absl::Status)> done);

  // As the daemon drains: whoever redeems here is told UNAVAILABLE, and what comes later is, too.
  void Stop();

  // As it was a moment ago.
  struct Stats {
    TicketTable::Counts made;
    TicketRedeem::Counts redeemed;
    TicketPulls::Counts pulled;
    std::uint64_t tickets = 0, held_bytes = 0;    // Promised now.
    std::uint64_t redeeming = 0, copy_bytes = 0;  // Tickets at work, and memory of their copies.
  };
  Stats stats() const {
    MutexLock lock(stats_mu_);
    return stats_;
  }
  const PullTransports& transports() const { return pulls_.transports(); }

 private:
  void Start(const RedeemingPtr& redeeming, const TicketBearer& ticket, std::int64_t deadline_nanos,
             TicketRedeem::Update update);
  void End(const RedeemingPtr& redeeming, const TicketRedeem::Outcome& outcome);
  absl::Status CheckConsumer(const std::string& consumer) const;
  // Of whose share a ticket of this namespace counts.
  std::string TenantOf(const Fingerprint& fingerprint) const;
  TicketName NameOf(const TicketHolder& holder) const;
  // Null: there are as many as may be.
  std::shared_ptr<const void> BeginRead(const std::string& consumer);
  void PublishStats();

  Loop& loop_;
  TieredStore& store_;
  const Options options_;
  const std::shared_ptr<LoopMail> mail_;
  // On the loop.
  absl::Status stopped_;
  std::vector<Member> members_;
  bool fresh_ = false;
  std::map<Redeeming*, RedeemingPtr> redeeming_;
  std::map<std::string, std::weak_ptr<std::atomic<std::size_t>>> reads_;  // By consumer's node id.
  // What takes long: disk reads, checksums. The state machines below give it tasks and have ended
  // when it is joined; tasks do not know them.
  WorkerPool workers_;
  StoreTicketHolds holds_;
  TicketTable table_;
  StoreTicketCopies copies_;
  TicketPulls pulls_;
  TicketRedeem redeem_;
  Loop::TimerId stats_timer_ = 0;
  mutable Mutex stats_mu_;
  Stats stats_ ABSL_GUARDED_BY(stats_mu_);
};

// One engine's wait for a ticket. On the loop.
struct ClusterTickets::Redeeming {
  TicketRedeem::CallerId caller = 0;  // 0: it has not begun, or is over.
  bool over = false;
  TicketRedeem::Done done;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_TICKETS_H_
