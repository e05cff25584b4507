#include "service/ticket_service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/answer.h"
#include "service/cluster_tickets.h"
#include "service/redeem_call.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<Caller> TicketService::Admit(grpc::CallbackServerContext& call) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Enter(context_, call));
  // Peers take each other for their daemons' own tenant.
  if (caller.tenant != kDefaultTenant) {
    return absl::PermissionDeniedError(
        absl::StrCat("tickets are for the daemon's own tenant, not for \"", caller.tenant, "\""));
  }
  if (context_.tickets.load(std::memory_order_acquire) == nullptr) {
    return absl::FailedPreconditionError("this daemon is in no cluster: it has no tickets");
  }
  return caller;
}

absl::Status TicketService::StartCreate(grpc::CallbackServerContext& call,
                                        const v1::CreateTicketRequest& request,
                                        v1::CreateTicketReply* reply,
                                        grpc::ServerUnaryReactor* reactor) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Admit(call));
  KVMILL_RETURN_IF_ERROR(context_.CheckAcceptsStores());
  KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                          context_.Resolve(caller, request.namespace_()));
  KVMILL_RETURN_IF_ERROR(context_.sessions.Check(caller, request.session_id()));
  TicketTable::Request ticket;
  ticket.fingerprint = info.fingerprint;
  KVMILL_ASSIGN_OR_RETURN(ticket.blocks, BlocksFromProto(request, info.spec));
  ticket.consumer = request.consumer();
  ticket.owner = request.session_id();
  if (request.ttl_ms() != 0) ticket.ttl_nanos = std::int64_t{request.ttl_ms()} * 1'000'000;
  if (request.life_ms() != 0) ticket.life_nanos = std::int64_t{request.life_ms()} * 1'000'000;
  context_.tickets.load(std::memory_order_acquire)
      ->Create(
          std::move(ticket),
          [&sessions = context_.sessions, caller, session = request.session_id()] {
            return sessions.Check(caller, session).ok();
          },
          [reactor, reply](const absl::StatusOr<std::string>& made) {
            if (made.ok()) reply->set_ticket(*made);
            reactor->Finish(StatusToGrpc(made.status()));
          });
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* TicketService::Create(grpc::CallbackServerContext* call,
                                                const v1::CreateTicketRequest* request,
                                                v1::CreateTicketReply* reply) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::Status status = StartCreate(*call, *request, reply, reactor);
  if (!status.ok()) reactor->Finish(StatusToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* TicketService::Revoke(grpc::CallbackServerContext* call,
                                                const v1::RevokeTicketRequest* request,
                                                v1::RevokeTicketReply*) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_RETURN_IF_ERROR(Admit(*call).status());
    KVMILL_ASSIGN_OR_RETURN(const TicketBearer ticket, ParseTicket(request->ticket()));
    context_.tickets.load(std::memory_order_acquire)
        ->Revoke(ticket, [reactor](const absl::Status& revoked) {
          reactor->Finish(StatusToGrpc(revoked));
        });
    return absl::OkStatus();
  }();
  if (!status.ok()) reactor->Finish(StatusToGrpc(status));
  return reactor;
}

absl::StatusOr<TicketBearer> TicketService::TicketOf(grpc::CallbackServerContext& call,
                                                     const v1::RedeemTicketRequest& request) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Admit(call));
  KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                          context_.Resolve(caller, request.namespace_()));
  KVMILL_ASSIGN_OR_RETURN(TicketBearer ticket, ParseTicket(request.ticket()));
  if (ticket.fingerprint != info.fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat("the ticket is of namespace ",
                                                      ToHex(ticket.fingerprint), ", not of ",
                                                      ToHex(info.fingerprint)));
  }
  return ticket;
}

grpc::ServerWriteReactor<v1::TicketUpdate>* TicketService::Redeem(
    grpc::CallbackServerContext* call, const v1::RedeemTicketRequest* request) {
  return RedeemCall::Start(context_.tickets.load(std::memory_order_acquire),
                           TicketOf(*call, *request), call->deadline());
}

}  // namespace kvmill
