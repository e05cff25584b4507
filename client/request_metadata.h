// RequestContext in gRPC's metadata. Internal to client/ and service/.
#ifndef KVMILL_CLIENT_REQUEST_METADATA_H_
#define KVMILL_CLIENT_REQUEST_METADATA_H_

#include <grpcpp/client_context.h>

#include "client/request_context.h"

namespace kvmill {

// The call carries `request`, which may be null.
inline void AddRequest(const RequestPtr& request, grpc::ClientContext* call) {
  if (request == nullptr) return;
  if (!request->request_id.empty()) call->AddMetadata(kRequestIdMetadata, request->request_id);
  if (request->traceparent.empty()) return;
  call->AddMetadata(kTraceparentMetadata, request->traceparent);
  if (!request->tracestate.empty()) call->AddMetadata(kTracestateMetadata, request->tracestate);
}

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REQUEST_METADATA_H_
