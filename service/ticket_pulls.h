// TicketPeers for real: questions over gRPC (GrpcPeers), pages over the client library, which
// brings them by UCX where both nodes have it and with gRPC messages elsewhere.
//
// Pages are received where the store will keep them, and checked on the workers. A client of a
// producer (four threads, a connection, and UCX's buffers) lives while pages are pulled from there,
// and for kIdleNanos more.
#ifndef KVMILL_SERVICE_TICKET_PULLS_H_
#define KVMILL_SERVICE_TICKET_PULLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "client/client.h"
#include "service/cluster/loop.h"
#include "service/cluster/member.h"
#include "service/cluster/ticket.h"
#include "service/grpc_peers.h"
#include "service/loop_mail.h"
#include "service/ticket_copies.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

// Lives on the loop, or ends when the loop has stopped; the others outlive it.
class TicketPulls final : public TicketPeers {
 public:
  static constexpr std::size_t kClientsMax = 64;
  static constexpr std::int64_t kIdleNanos = 60'000'000'000;

  struct Options {
    Member self;
    DataPath path = DataPath::kAuto;
    bool data_plane_plaintext = false;  // As this node's own data plane.
    TlsFiles tls;                       // Of connections to peers.
  };
  TicketPulls(Loop& loop, GrpcPeers& peers, StoreTicketCopies& copies, WorkerPool& workers,
              const Options& options);
  // Pulls end without a word. Waits until nobody writes into copies any more.
  ~TicketPulls() override;

  CallId Redeem(const Member& producer, const TicketSecret& secret, std::uint64_t seen,
                std::int64_t wait_nanos, std::int64_t deadline_nanos,
                Done<TicketNews> done) override;
  // Ends when nothing is written any more, which may be a moment after the deadline. RESOURCE_
  // EXHAUSTED: kClientsMax producers are being asked.
  CallId Pull(const Member& producer, const TicketSecret& secret, std::vector<Piece> pieces,
              std::int64_t deadline_nanos, Done<std::vector<Landed>> done) override;
  CallId Acknowledge(const Member& producer, const TicketSecret& secret,
                     std::int64_t deadline_nanos, std::function<void(absl::Status)> done) override;
  void Cancel(CallId call) override;

  // Who is not among the members, in this incarnation and at this address, is not asked any more.
  void Keep(const std::vector<Member>& members);

  struct Counts {
    std::uint64_t pages = 0, bytes = 0;  // That came and were right.
    std::uint64_t damaged_pages = 0;
  };
  const Counts& counts() const { return counts_; }

 private:
  class PagePull;
  struct Link {
    std::shared_ptr<Client> client;  // Null: dropped. Shared with who destroys it.
    std::size_t pulls = 0;
    std::int64_t used_nanos = 0;
  };
  using LinkPtr = std::shared_ptr<Link>;                             // Of the table, and of pulls.
  using LinkId = std::tuple<std::string, std::string, std::string>;  // Id, incarnation, address.
  static LinkId IdOf(const Member& member) {
    return {member.id, member.incarnation, member.address};
  }

  absl::StatusOr<LinkPtr> LinkOf(const Member& member);
  // `link`: null when there was none.
  void Ended(CallId call, const LinkPtr& link, const Member& producer,
             const std::shared_ptr<PagePull>& pull);
  void Drop(const LinkId& id);
  void DropIdle();

  Loop& loop_;
  GrpcPeers& peers_;
  StoreTicketCopies& copies_;
  WorkerPool& workers_;
  const Options options_;
  const std::shared_ptr<LoopMail> mail_;
  CallId next_ = 1;                                    // Of pulls, which are odd; GrpcPeers' are
  std::map<CallId, Done<std::vector<Landed>>> pulls_;  //   doubled.
  std::map<LinkId, LinkPtr> links_;
  Loop::TimerId idle_timer_ = 0;  // 0: no links.
  Counts counts_;
  WorkerPool closer_;  // One thread, on which clients are destroyed. Last: it is joined first.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_PULLS_H_
