// kvmill.v1.Peer: what other nodes of the cluster ask.
#ifndef KVMILL_SERVICE_PEER_SERVICE_H_
#define KVMILL_SERVICE_PEER_SERVICE_H_

#include <string>

#include "kvmill/v1/peer.grpc.pb.h"
#include "service/log_limit.h"
#include "service/service_context.h"

namespace kvmill {

// Answers without a thread that waits. FAILED_PRECONDITION while this daemon is in no cluster;
// PERMISSION_DENIED to local clients, who are no nodes.
class PeerService final : public v1::Peer::CallbackService {
 public:
  explicit PeerService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Locate(grpc::CallbackServerContext* call,
                                   const v1::LocateRequest* request,
                                   v1::LocateReply* reply) override;
  grpc::ServerUnaryReactor* DescribeNamespace(grpc::CallbackServerContext* call,
                                              const v1::DescribeNamespaceRequest* request,
                                              v1::DescribeNamespaceReply* reply) override;
  grpc::ServerUnaryReactor* Announce(grpc::CallbackServerContext* call,
                                     const v1::AnnounceRequest* request,
                                     v1::AnnounceReply* reply) override;
  // On the I/O pool: it looks at many blocks.
  grpc::ServerUnaryReactor* ListRuns(grpc::CallbackServerContext* call,
                                     const v1::ListRunsRequest* request,
                                     v1::ListRunsReply* reply) override;
  grpc::ServerUnaryReactor* HandOver(grpc::CallbackServerContext* call,
                                     const v1::AnnounceRequest* request,
                                     v1::HandOverReply* reply) override;
  grpc::ServerUnaryReactor* Compare(grpc::CallbackServerContext* call,
                                    const v1::CompareRequest* request,
                                    v1::CompareReply* reply) override;
  grpc::ServerUnaryReactor* AskTicket(grpc::CallbackServerContext* call,
                                      const v1::AskTicketRequest* request,
                                      v1::AskTicketReply* reply) override;
  grpc::ServerWriteReactor<v1::TicketPages>* ReadTicket(
      grpc::CallbackServerContext* call, const v1::ReadTicketRequest* request) override;
  grpc::ServerUnaryReactor* AcknowledgeTicket(grpc::CallbackServerContext* call,
                                              const v1::AcknowledgeTicketRequest* request,
                                              v1::AcknowledgeTicketReply* reply) override;

 private:
  // Who may go on, and with whose answers.
  template <typename Request>
  absl::StatusOr<PeerAnswers*> Admit(grpc::CallbackServerContext& call,
                                     const Request& request) const;
  absl::Status RefuseStranger(const grpc::ServerContextBase& call, const std::string& nodes) const;
  // Calls `handle(answers, reactor)`. It returns OK when it sees to it that the reactor is
  // finished; its error is the answer.
  template <typename Request, typename Handle>
  grpc::ServerUnaryReactor* Begin(grpc::CallbackServerContext* call, const Request& request,
                                  const Handle& handle) const;

  // The tickets of a daemon in a cluster.
  absl::StatusOr<ClusterTickets*> Tickets() const;

  const ServiceContext& context_;
  mutable LogLimit refusals_logged_;  // By the names that were shown.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_SERVICE_H_
