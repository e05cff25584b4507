#include "service/events_service.h"

#include "absl/strings/str_cat.h"
#include "service/answer.h"
#include "service/watch_call.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::StatusOr<EventJournal::From> FromProto(const ServiceContext& context, const Caller& caller,
                                             const v1::WatchRequest& request) {
  EventJournal::From from;
  if (!request.epoch().empty() && request.epoch().size() != context.boot_id.size()) {
    return absl::InvalidArgumentError(absl::StrCat("epoch of ", request.epoch().size(),
                                                   " bytes: want 0 or ", context.boot_id.size()));
  }
  if (request.has_namespace_()) {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context.Resolve(caller, request.namespace_()));
    from.only = info.id;
  }
  from.snapshot = request.snapshot();
  if (request.epoch() == context.boot_id) {
    from.sequence = request.sequence();
  } else if (!request.epoch().empty()) {
    from.snapshot = true;
  }
  return from;
}

}  // namespace

grpc::ServerWriteReactor<v1::WatchReply>* EventsService::Watch(grpc::CallbackServerContext* call,
                                                               const v1::WatchRequest* request) {
  const std::uint64_t revocations = journal_.revocations();  // Before it is known who this is.
  const absl::StatusOr<Caller> caller = Enter(context_, *call);
  if (!caller.ok()) return WatchCall::Start(context_, *call, journal_, "", caller.status());
  absl::StatusOr<EventJournal::From> from = FromProto(context_, *caller, *request);
  // As DataPlane::Revoke: those on the socket are who their users are.
  if (from.ok() && caller->door_client == 0) from->revocations = revocations;
  return WatchCall::Start(context_, *call, journal_, caller->tenant, from);
}

}  // namespace kvmill
