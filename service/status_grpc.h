// The one place where our status codes become gRPC's.
#ifndef KVMILL_SERVICE_STATUS_GRPC_H_
#define KVMILL_SERVICE_STATUS_GRPC_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace kvmill {

// Codes have the same numbers on both sides; the message travels as it is.
inline grpc::Status StatusToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_STATUS_GRPC_H_
