// How every method of a service begins: it says which daemon this is, and learns who asks.
#ifndef KVMILL_SERVICE_ANSWER_H_
#define KVMILL_SERVICE_ANSWER_H_

#include <grpcpp/support/status.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/convert.h"
#include "service/request.h"
#include "service/service_context.h"
#include "service/status_grpc.h"

namespace kvmill {

// `Call` is one of gRPC's server contexts. Errors as Callers::Identify; they are logged.
template <typename Call>
absl::StatusOr<Caller> Enter(const ServiceContext& context, Call& call) {
  call.AddInitialMetadata(kBootIdMetadata, context.boot_id_hex);
  RequestPtr request = BeginRequest(call);
  absl::StatusOr<Caller> caller = context.callers.Identify(call);
  if (caller.ok()) {
    caller->request = std::move(request);
  } else {
    LogRefused(call, *request, caller.status());
  }
  return caller;
}

// Enters, and answers what `handle(caller)` answers, an absl::Status.
template <typename Call, typename Handle>
grpc::Status Answer(const ServiceContext& context, Call& call, const Handle& handle) {
  const absl::StatusOr<Caller> caller = Enter(context, call);
  if (!caller.ok()) return StatusToGrpc(caller.status());
  const ServedRequest request(caller->request);
  return StatusToGrpc(handle(*caller));
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ANSWER_H_
