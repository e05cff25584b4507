// How every method of a service begins: it says which daemon this is, and learns who asks.
#ifndef KVMILL_SERVICE_ANSWER_H_
#define KVMILL_SERVICE_ANSWER_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/convert.h"
#include "service/service_context.h"
#include "service/status_grpc.h"

namespace kvmill {

// `Call` is one of gRPC's server contexts. Errors as Callers::Identify.
template <typename Call>
absl::StatusOr<Caller> Enter(const ServiceContext& context, Call& call) {
  call.AddInitialMetadata(kBootIdMetadata, context.boot_id_hex);
  return context.callers.Identify(call);
}

// Enters, and answers what `handle(caller)` answers, an absl::Status.
template <typename Call, typename Handle>
grpc::Status Answer(const ServiceContext& context, Call& call, const Handle& handle) {
  const absl::StatusOr<Caller> caller = Enter(context, call);
  return StatusToGrpc(caller.ok() ? handle(*caller) : caller.status());
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ANSWER_H_
