// kvmill.v1.Peer: what other nodes of the cluster ask.
#ifndef KVMILL_SERVICE_PEER_SERVICE_H_
#define KVMILL_SERVICE_PEER_SERVICE_H_

#include "kvmill/v1/peer.grpc.pb.h"
#include "service/service_context.h"

namespace kvmill {

// Answers without a thread that waits. FAILED_PRECONDITION while this daemon is in no cluster;
// PERMISSION_DENIED to local clients, who are no nodes.
class PeerService final : public v1::Peer::WithCallbackMethod_Locate<
                              v1::Peer::WithCallbackMethod_Announce<v1::Peer::Service>> {
 public:
  explicit PeerService(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Locate(grpc::CallbackServerContext* call,
                                   const v1::LocateRequest* request,
                                   v1::LocateReply* reply) override;
  grpc::ServerUnaryReactor* Announce(grpc::CallbackServerContext* call,
                                     const v1::AnnounceRequest* request,
                                     v1::AnnounceReply* reply) override;

 private:
  // Who may go on, and with whose answers.
  template <typename Request>
  absl::StatusOr<PeerAnswers*> Admit(grpc::CallbackServerContext& call,
                                     const Request& request) const;

  const ServiceContext& context_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_PEER_SERVICE_H_
