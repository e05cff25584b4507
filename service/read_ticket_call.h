// One Peer.ReadTicket call: pages of a ticket in gRPC messages, for peers without a data plane.
#ifndef KVMILL_SERVICE_READ_TICKET_CALL_H_
#define KVMILL_SERVICE_READ_TICKET_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <memory>

#include "absl/status/statusor.h"
#include "kvmill/v1/ticket.pb.h"
#include "service/cluster_tickets.h"

namespace kvmill {

// The cluster's loop finds the pages, gRPC's threads write them. The pages are held as long as the
// object.
class ReadTicketCall final : public grpc::ServerWriteReactor<v1::TicketPages> {
 public:
  // The reactor for gRPC; it owns itself. With an error instead of `tickets` it ends with that.
  static ReadTicketCall* Start(const absl::StatusOr<ClusterTickets*>& tickets,
                               const v1::ReadTicketRequest& request);

  void OnWriteDone(bool ok) override;
  void OnDone() override { self_ = nullptr; }

 private:
  void Found(absl::StatusOr<ClusterTickets::Pages> pages);
  void WriteNext();

  // Gone with OnDone; until they ran, tasks of the loop share the object.
  std::shared_ptr<ReadTicketCall> self_;
  ClusterTickets::Pages pages_;
  std::size_t page_ = 0, offset_ = 0;  // Of the next byte.
  v1::TicketPages message_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_READ_TICKET_CALL_H_
