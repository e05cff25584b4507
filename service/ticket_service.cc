#include "service/ticket_service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/answer.h"
#include "service/cluster_tickets.h"
#include "service/redeem_call.h"
#include "storage/core/check.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<Caller> TicketService::Admit(grpc::CallbackServerContext& call) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Enter(context_, call));
  if (!context_.shared.Has(caller.tenant)) {
    return absl::PermissionDeniedError(absl::StrCat(
        "tickets are for tenants whose blocks nodes share, not for \"", caller.tenant, "\""));
  }
  if (context_.tickets.load(std::memory_order_acquire) == nullptr) {
    return context_.NoCluster();
  }
  return caller;
}

// One Create. Who gave up before the answer was sent has no ticket: it is revoked, or its blocks
// would be held until its time is over.
class TicketService::CreateCall final : public grpc::ServerUnaryReactor {
 public:
  // The reactor for gRPC; it owns itself.
  static std::shared_ptr<CreateCall> Make(v1::CreateTicketReply* reply) {
    auto call = std::make_shared<CreateCall>();
    call->self_ = call;
    call->reply_ = reply;
    return call;
  }

  void Made(ClusterTickets* tickets, const absl::StatusOr<std::string>& made) {
    if (made.ok()) {
      const absl::StatusOr<TicketBearer> ticket = ParseTicket(*made);
      KVMILL_CHECK(ticket.ok());
      MutexLock lock(mu_);
      tickets_ = tickets;
      ticket_ = *ticket;
      if (cancelled_) Revoke();
      reply_->set_ticket(*made);
    }
    Finish(StatusToGrpc(made.status()));
  }
  bool cancelled() const {
    MutexLock lock(mu_);
    return cancelled_;
  }

  // Also of an answer that could not be sent any more.
  void OnCancel() override {
    MutexLock lock(mu_);
    cancelled_ = true;
    Revoke();
  }
  void OnDone() override { self_ = nullptr; }

 private:
  void Revoke() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (tickets_ != nullptr) tickets_->Revoke(ticket_, [](const absl::Status&) {});
  }

  std::shared_ptr<CreateCall> self_;  // Until OnDone; tasks of the loop share it, too.
  v1::CreateTicketReply* reply_ = nullptr;
  mutable Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  ClusterTickets* tickets_ ABSL_GUARDED_BY(mu_) = nullptr;  // Null: there is no ticket yet.
  TicketBearer ticket_ ABSL_GUARDED_BY(mu_);
};

absl::Status TicketService::StartCreate(grpc::CallbackServerContext& call,
                                        const v1::CreateTicketRequest& request,
                                        const std::shared_ptr<CreateCall>& create) const {
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
  ClusterTickets* const tickets = context_.tickets.load(std::memory_order_acquire);
  tickets->Create(
      std::move(ticket),
      [create, &sessions = context_.sessions, caller, session = request.session_id()] {
        return !create->cancelled() && sessions.Check(caller, session).ok();
      },
      [create, tickets](const absl::StatusOr<std::string>& made) { create->Made(tickets, made); });
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* TicketService::Create(grpc::CallbackServerContext* call,
                                                const v1::CreateTicketRequest* request,
                                                v1::CreateTicketReply* reply) {
  const std::shared_ptr<CreateCall> create = CreateCall::Make(reply);
  const absl::Status status = StartCreate(*call, *request, create);
  if (!status.ok()) create->Finish(StatusToGrpc(status));
  return create.get();
}

grpc::ServerUnaryReactor* TicketService::Revoke(grpc::CallbackServerContext* call,
                                                const v1::RevokeTicketRequest* request,
                                                v1::RevokeTicketReply*) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Caller caller, Admit(*call));
    KVMILL_ASSIGN_OR_RETURN(const TicketBearer ticket, ParseTicket(request->ticket()));
    ClusterTickets* const tickets = context_.tickets.load(std::memory_order_acquire);
    KVMILL_RETURN_IF_ERROR(tickets->CheckMadeHere(ticket));
    if (!context_.store.FindNamespace(caller.tenant, ticket.fingerprint).ok()) {
      return NoSuchTicketError();  // It is another tenant's, or could be.
    }
    tickets->Revoke(
        ticket, [reactor](const absl::Status& revoked) { reactor->Finish(StatusToGrpc(revoked)); });
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
  if (ticket.fingerprint == info.fingerprint) return ticket;
  const auto other = context_.store.FindNamespace(caller.tenant, ticket.fingerprint);
  if (!other.ok()) return NoSuchTicketError();  // It is another tenant's, or could be.
  return absl::FailedPreconditionError(absl::StrCat(
      "the ticket is of namespace ",
      other->name.empty() ? ToHex(ticket.fingerprint)
                          : absl::StrCat("\"", other->name, "\" (", ToHex(ticket.fingerprint), ")"),
      ", not of \"", info.name, "\" (", ToHex(info.fingerprint), ")"));
}

grpc::ServerWriteReactor<v1::TicketUpdate>* TicketService::Redeem(
    grpc::CallbackServerContext* call, const v1::RedeemTicketRequest* request) {
  return RedeemCall::Start(context_.tickets.load(std::memory_order_acquire),
                           TicketOf(*call, *request), call->deadline());
}

}  // namespace kvmill
