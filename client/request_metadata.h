// RequestContext in gRPC's metadata, and in the headers of calls on the data plane. Internal to
// client/ and service/.
#ifndef KVMILL_CLIENT_REQUEST_METADATA_H_
#define KVMILL_CLIENT_REQUEST_METADATA_H_

#include <grpcpp/client_context.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "client/request_context.h"
#include "client/transport/transport.h"
#include "kvmill/v1/data.pb.h"

namespace kvmill {

// The call carries `request`, which may be null.
inline void AddRequest(const RequestPtr& request, grpc::ClientContext* call) {
  if (request == nullptr) return;
  if (!request->request_id.empty()) call->AddMetadata(kRequestIdMetadata, request->request_id);
  if (request->traceparent.empty()) return;
  call->AddMetadata(kTraceparentMetadata, request->traceparent);
  if (!request->tracestate.empty()) call->AddMetadata(kTracestateMetadata, request->tracestate);
}

// The same for a call whose header is `header`: all of it, or what there is room for, the trace's
// state last.
inline void AddRequest(const RequestPtr& request, v1::DataRequest* header) {
  if (request == nullptr || request->empty()) return;
  v1::RequestTrace* const trace = header->mutable_trace();
  trace->set_request_id(request->request_id);
  trace->set_traceparent(request->traceparent);
  trace->set_tracestate(request->tracestate);
  if (header->ByteSizeLong() > kCallHeaderBytesMax) trace->clear_tracestate();
  if (header->ByteSizeLong() > kCallHeaderBytesMax) header->clear_trace();
}

// What it adds to a header, at most.
inline std::size_t RequestBytes(const RequestPtr& request) {
  constexpr std::size_t kFieldsBytes = 16;  // Tags and lengths.
  if (request == nullptr || request->empty()) return 0;
  return request->request_id.size() + request->traceparent.size() + request->tracestate.size() +
         kFieldsBytes;
}

// What is right of what came. Null: nothing.
inline RequestPtr RequestOf(const v1::DataRequest& header) {
  if (!header.has_trace()) return nullptr;
  RequestContext request = RightPartsOf({.request_id = header.trace().request_id(),
                                         .traceparent = header.trace().traceparent(),
                                         .tracestate = header.trace().tracestate()});
  if (request.empty()) return nullptr;
  return std::make_shared<const RequestContext>(std::move(request));
}

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REQUEST_METADATA_H_
