#include "service/peer_service.h"

#include <utility>
#include <vector>

#include "client/convert.h"
#include "service/answer.h"
#include "service/peer_answers.h"
#include "service/peer_codec.h"
#include "service/status_grpc.h"
#include "storage/core/status_macros.h"

namespace kvmill {

template <typename Request>
absl::StatusOr<PeerAnswers*> PeerService::Admit(grpc::CallbackServerContext& call,
                                                const Request& request) const {
  KVMILL_ASSIGN_OR_RETURN(const Caller caller, Enter(context_, call));
  if (caller.door_client != 0) {
    return absl::PermissionDeniedError("this is for nodes of the cluster, which come by --listen");
  }
  KVMILL_RETURN_IF_ERROR(CheckMeantFor(request.incarnation(), context_.boot_id));
  PeerAnswers* const answers = context_.peer_answers.load(std::memory_order_acquire);
  if (answers == nullptr) return absl::FailedPreconditionError("this daemon is in no cluster");
  return answers;
}

grpc::ServerUnaryReactor* PeerService::Locate(grpc::CallbackServerContext* call,
                                              const v1::LocateRequest* request,
                                              v1::LocateReply* reply) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(PeerAnswers* const answers, Admit(*call, *request));
    KVMILL_ASSIGN_OR_RETURN(const Fingerprint fingerprint,
                            FingerprintFromBytes(request->fingerprint()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<RunQuery> queries, FromProto(*request));
    answers->Locate(fingerprint, std::move(queries),
                    [reactor, reply](const std::vector<RunAnswer>& found) {
                      ToProto(found, reply);
                      reactor->Finish(grpc::Status::OK);
                    });
    return absl::OkStatus();
  }();
  if (!status.ok()) reactor->Finish(StatusToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* PeerService::Announce(grpc::CallbackServerContext* call,
                                                const v1::AnnounceRequest* request,
                                                v1::AnnounceReply*) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::Status status = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(PeerAnswers* const answers, Admit(*call, *request));
    KVMILL_ASSIGN_OR_RETURN(const Member holder,
                            HolderOf(request->holder(), request->holder_incarnation()));
    KVMILL_ASSIGN_OR_RETURN(std::vector<Announcement> announcements, FromProto(*request));
    answers->Announced(holder, std::move(announcements), [reactor](const absl::Status& told) {
      reactor->Finish(StatusToGrpc(told));
    });
    return absl::OkStatus();
  }();
  if (!status.ok()) reactor->Finish(StatusToGrpc(status));
  return reactor;
}

}  // namespace kvmill
