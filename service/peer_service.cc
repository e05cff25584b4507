#include "service/peer_service.h"

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/convert.h"
#include "service/answer.h"
#include "service/certificate_names.h"
#include "service/cluster_tickets.h"
#include "service/heard_names.h"
#include "service/peer_answers.h"
#include "service/peer_codec.h"
#include "service/read_ticket_call.h"
#include "service/status_grpc.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::chrono::seconds kReadTicketMax{60};

}  // namespace

// A certificate that is good, of somebody who is no node: an operator wants to know of it when that
// is one, whose certificate has other names than this node's.
absl::Status PeerService::RefuseStranger(const grpc::ServerContextBase& call,
                                         const std::string& nodes) const {
  // A token goes before a certificate: this is a client, also where both are shown.
  if (call.client_metadata().contains(kTokenMetadata)) {
    return absl::PermissionDeniedError(
        absl::StrCat("this is for nodes of the cluster, which show a certificate of \"", nodes,
                     "\" (--tls-peers) and no token: who shows one is its tenant"));
  }
  // It goes to logs: whoever is signed for may have written it.
  const std::string shown = absl::CEscape(absl::StrJoin(CertificateNames(call), ", "));
  if (refusals_logged_.Allows(shown, context_.clock.MonotonicNanos())) {
    LogWarning(absl::StrCat("cluster: somebody at ", HostOfPeer(call.peer()),
                            " asks as a node does, and is refused: the certificate of \"", shown,
                            "\" is not among the nodes', which are \"", nodes,
                            "\"; if it is one, name it in --tls-peers"));
  }
  return absl::PermissionDeniedError(
      absl::StrCat("this is for nodes of the cluster, which show a certificate of \"", nodes,
                   "\" (--tls-peers), not of \"", shown, "\""));
}

template <typename Request>
absl::StatusOr<PeerAnswers*> PeerService::Admit(grpc::CallbackServerContext& call,
                                                const Request& request) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Enter(context_, call));
  if (caller.door_client != 0) {
    return absl::PermissionDeniedError("this is for nodes of the cluster, which come by --listen");
  }
  if (!caller.node) {
    return RefuseStranger(call, absl::StrJoin(context_.callers.identities()->nodes(), "\", \""));
  }
  KVMILL_RETURN_IF_ERROR(CheckMeantFor(request.incarnation(), context_.boot_id));
  PeerAnswers* const answers = context_.peer_answers.load(std::memory_order_acquire);
  if (answers == nullptr) return context_.NoCluster();
  return answers;
}

template <typename Request, typename Handle>
grpc::ServerUnaryReactor* PeerService::Begin(grpc::CallbackServerContext* call,
                                             const Request& request, const Handle& handle) const {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::StatusOr<PeerAnswers*> answers = Admit(*call, request);
  const absl::Status status = answers.ok() ? handle(**answers, reactor) : answers.status();
  if (!status.ok()) reactor->Finish(StatusToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* PeerService::Locate(grpc::CallbackServerContext* call,
                                              const v1::LocateRequest* request,
                                              v1::LocateReply* reply) {
  return Begin(call, *request, [&](PeerAnswers& answers, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Fingerprint fingerprint,
                            FingerprintFromBytes(request->fingerprint()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<RunQuery> queries, FromProto(*request));
    answers.Locate(request->asker(), fingerprint, std::move(queries),
                   [reactor, reply, reads = request->sketches()](std::vector<RunAnswer> found) {
                     // An earlier version would take an answer with them for a lie.
                     for (RunAnswer& answer : found) {
                       if (!reads) answer.pointers.clear();
                     }
                     ToProto(found, reply);
                     reactor->Finish(grpc::Status::OK);
                   });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PeerService::DescribeNamespace(
    grpc::CallbackServerContext* call, const v1::DescribeNamespaceRequest* request,
    v1::DescribeNamespaceReply* reply) {
  return Begin(call, *request, [&](PeerAnswers&, auto* reactor) -> absl::Status {
    const std::string tenant = request->tenant().empty() ? kDefaultTenant : request->tenant();
    const v1::NamespaceRef& ref = request->namespace_();
    absl::StatusOr<TieredStore::NamespaceInfo> info = context_.Known(Caller{tenant, 0}, ref);
    if (!info.ok() && !absl::IsNotFound(info.status())) return info.status();
    if (!info.ok() && ref.ref_case() == v1::NamespaceRef::kName) {
      // That it heard the name of two is no meaning of it.
      info = FindHeard(context_.store, tenant, ref.name());
      reply->set_heard(info.ok());
    }
    reply->set_tenant(request->tenant());
    if (info.ok() && context_.shared.Has(tenant)) {
      ToProto(info->spec, reply->mutable_spec());
      reply->set_name(std::string(EngineName(info->name)));
    }
    reactor->Finish(grpc::Status::OK);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PeerService::Announce(grpc::CallbackServerContext* call,
                                                const v1::AnnounceRequest* request,
                                                v1::AnnounceReply*) {
  return Begin(call, *request, [&](PeerAnswers& answers, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Member holder,
                            HolderOf(request->holder(), request->holder_incarnation()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<Announcement> announcements, FromProto(*request));
    answers.Announced(holder, std::move(announcements),
                      [reactor](const absl::Status& told) { reactor->Finish(StatusToGrpc(told)); });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PeerService::ListRuns(grpc::CallbackServerContext* call,
                                                const v1::ListRunsRequest* request,
                                                v1::ListRunsReply* reply) {
  return Begin(call, *request, [&](PeerAnswers& answers, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const std::vector<RunList> lists, FromProto(*request));
    context_.io_pool.Post([reactor, reply, &answers, lists] {
      ToProto(answers.ListRuns(lists), reply);
      reactor->Finish(grpc::Status::OK);
    });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PeerService::HandOver(grpc::CallbackServerContext* call,
                                                const v1::AnnounceRequest* request,
                                                v1::HandOverReply* reply) {
  return Begin(call, *request, [&](PeerAnswers& answers, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Member holder,
                            HolderOf(request->holder(), request->holder_incarnation()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<Announcement> announcements, FromProto(*request));
    answers.HandedOver(holder, std::move(announcements),
                       [reactor, reply](const absl::StatusOr<std::vector<std::uint8_t>>& counts) {
                         if (counts.ok()) {
                           for (const std::uint8_t count : *counts) reply->add_counts(count);
                         }
                         reactor->Finish(StatusToGrpc(counts.status()));
                       });
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PeerService::Compare(grpc::CallbackServerContext* call,
                                               const v1::CompareRequest* request,
                                               v1::CompareReply* reply) {
  return Begin(call, *request, [&](PeerAnswers& answers, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Member holder,
                            HolderOf(request->holder(), request->holder_incarnation()));
    KVMILL_ASSIGN_OR_RETURN(const Digests digests, FromProto(*request));
    if (!request->sketches()) {
      reactor->Finish(grpc::Status::OK);
      return absl::OkStatus();
    }
    answers.Compare(holder, digests, [reactor, reply](const absl::StatusOr<std::uint64_t>& differ) {
      if (differ.ok()) reply->set_different(*differ);
      reactor->Finish(StatusToGrpc(differ.status()));
    });
    return absl::OkStatus();
  });
}

absl::StatusOr<ClusterTickets*> PeerService::Tickets() const {
  ClusterTickets* const tickets = context_.tickets.load(std::memory_order_acquire);
  if (tickets == nullptr) return context_.NoCluster();
  return tickets;
}

grpc::ServerUnaryReactor* PeerService::AskTicket(grpc::CallbackServerContext* call,
                                                 const v1::AskTicketRequest* request,
                                                 v1::AskTicketReply* reply) {
  return Begin(call, *request, [&](PeerAnswers&, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(ClusterTickets* const tickets, Tickets());
    KVMILL_ASSIGN_OR_RETURN(const TicketHolder holder, FromProto(request->holder()));
    tickets->Ask(holder, request->seen(), std::int64_t{request->wait_ms()} * 1'000'000,
                 [reactor, reply](const absl::StatusOr<TicketNews>& news) {
                   ToProto(news, reply);
                   reactor->Finish(grpc::Status::OK);
                 });
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::TicketPages>* PeerService::ReadTicket(
    grpc::CallbackServerContext* call, const v1::ReadTicketRequest* request) {
  absl::Status admitted = Admit(*call, *request).status();
  // What is read is held until it was read, or the deadline.
  if (admitted.ok() && call->deadline() > std::chrono::system_clock::now() + kReadTicketMax) {
    admitted = absl::InvalidArgumentError(absl::StrCat(
        "a read of a ticket's pages needs a deadline within ", kReadTicketMax.count(), " s"));
  }
  if (!admitted.ok()) return ReadTicketCall::Start(admitted, *request);
  return ReadTicketCall::Start(Tickets(), *request);
}

grpc::ServerUnaryReactor* PeerService::AcknowledgeTicket(
    grpc::CallbackServerContext* call, const v1::AcknowledgeTicketRequest* request,
    v1::AcknowledgeTicketReply*) {
  return Begin(call, *request, [&](PeerAnswers&, auto* reactor) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(ClusterTickets* const tickets, Tickets());
    KVMILL_ASSIGN_OR_RETURN(const TicketHolder holder, FromProto(request->holder()));
    tickets->Acknowledge(
        holder, [reactor](const absl::Status& taken) { reactor->Finish(StatusToGrpc(taken)); });
    return absl::OkStatus();
  });
}

}  // namespace kvmill
