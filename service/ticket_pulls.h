// TicketPeers for real: questions over gRPC (GrpcPeers), pages over the client library, which
// brings them by UCX where both nodes have it and with gRPC messages elsewhere.
//
// Pages are received where the store will keep them, and checked on the workers. Each request says
// which process it is for, and another one refuses it.
#ifndef KVMILL_SERVICE_TICKET_PULLS_H_
#define KVMILL_SERVICE_TICKET_PULLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "service/cluster/loop.h"
#include "service/cluster/member.h"
#include "service/cluster/ticket.h"
#include "service/grpc_peers.h"
#include "service/loop_mail.h"
#include "service/peer_clients.h"
#include "service/pull_transports.h"
#include "service/ticket_copies.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

// Lives on the loop, or ends when the loop has stopped; the others outlive it.
class TicketPulls final : public TicketPeers {
 public:
  // `self`: the consumer.
  TicketPulls(Loop& loop, GrpcPeers& peers, PeerClients& clients, StoreTicketCopies& copies,
              WorkerPool& workers, const Member& self)
      : loop_(loop),
        peers_(peers),
        clients_(clients),
        copies_(copies),
        workers_(workers),
        self_(self),
        mail_(std::make_shared<LoopMail>(loop)) {}
  // Closes the clients. Pulls end without a word, and nobody writes into copies any more.
  ~TicketPulls() override;

  CallId Redeem(const Member& producer, const TicketName& name, std::uint64_t seen,
                std::int64_t wait_nanos, std::int64_t deadline_nanos,
                Done<TicketNews> done) override;
  // Ends when nothing is written any more, which may be a moment after the deadline. RESOURCE_
  // EXHAUSTED, too: PeerClients has no room for one more producer.
  CallId Pull(const Member& producer, const TicketName& name, std::vector<Piece> pieces,
              std::int64_t deadline_nanos, Done<std::vector<Landed>> done) override;
  CallId Acknowledge(const Member& producer, const TicketName& name, std::int64_t deadline_nanos,
                     std::function<void(absl::Status)> done) override;
  void Cancel(CallId call) override;

  struct Counts {
    std::uint64_t pages = 0, bytes = 0;  // That came and were right.
    std::uint64_t damaged_pages = 0;
  };
  const Counts& counts() const { return counts_; }
  const PullTransports& transports() const { return transports_; }  // From any thread.

 private:
  class PagePull;
  // `peer`: null when there was none.
  void Ended(CallId call, const PeerClients::PeerPtr& peer, const Member& producer,
             const std::shared_ptr<PagePull>& pull);

  Loop& loop_;
  GrpcPeers& peers_;
  PeerClients& clients_;
  StoreTicketCopies& copies_;
  WorkerPool& workers_;
  const Member self_;
  const std::shared_ptr<LoopMail> mail_;
  CallId next_ = 1;                                    // Of pulls, which are odd; GrpcPeers' are
  std::map<CallId, Done<std::vector<Landed>>> pulls_;  //   doubled.
  Counts counts_;
  PullTransports transports_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_PULLS_H_
