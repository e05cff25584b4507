// kvmill.v1.Ticket: tickets, for engines.
#ifndef KVMILL_SERVICE_TICKET_SERVICE_H_
#define KVMILL_SERVICE_TICKET_SERVICE_H_

#include <memory>

#include "kvmill/v1/ticket.grpc.pb.h"
#include "service/service_context.h"

namespace kvmill {

struct TicketBearer;

// Answers without a thread that waits. cluster_tickets.h says what follows.
class TicketService final : public v1::Ticket::CallbackService {
 public:
  explicit TicketService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Create(grpc::CallbackServerContext* call,
                                   const v1::CreateTicketRequest* request,
                                   v1::CreateTicketReply* reply) override;
  grpc::ServerUnaryReactor* Revoke(grpc::CallbackServerContext* call,
                                   const v1::RevokeTicketRequest* request,
                                   v1::RevokeTicketReply* reply) override;
  grpc::ServerWriteReactor<v1::TicketUpdate>* Redeem(
      grpc::CallbackServerContext* call, const v1::RedeemTicketRequest* request) override;

 private:
  // Who asks, when there are tickets for it. PERMISSION_DENIED: nodes do not share its blocks.
  absl::StatusOr<Caller> Admit(grpc::CallbackServerContext& call) const;
  class CreateCall;
  absl::Status StartCreate(grpc::CallbackServerContext& call,
                           const v1::CreateTicketRequest& request,
                           const std::shared_ptr<CreateCall>& create) const;
  absl::StatusOr<TicketBearer> TicketOf(grpc::CallbackServerContext& call,
                                        const v1::RedeemTicketRequest& request) const;

  const ServiceContext& context_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TICKET_SERVICE_H_
