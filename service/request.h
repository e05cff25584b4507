// The request that a gRPC call is: its id, its trace, and its lines in the log.
#ifndef KVMILL_SERVICE_REQUEST_H_
#define KVMILL_SERVICE_REQUEST_H_

#include <grpcpp/server_context.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/request_context.h"
#include "storage/core/log.h"

namespace kvmill {

// What the caller sent, as far as it is right, with an id in any case: one is made when there was
// none. The id goes back in the trailing metadata. Once, before the call is answered.
RequestPtr BeginRequest(grpc::ServerContextBase& call);

// request_id, trace_id and span_id, those that there are; `of` may be null.
std::vector<LogField> FieldsOf(const RequestContext* of);

// Of a caller that was not let in.
void LogRefused(const grpc::ServerContextBase& call, const RequestContext& request,
                const absl::Status& why);

// While it lives this thread works for the request: lines of the log have its fields, and calls to
// other nodes carry it.
class ServedRequest {
 public:
  explicit ServedRequest(RequestPtr request)
      : request_(std::move(request)), scope_(request_), fields_(&Fields, request_.get()) {}

 private:
  static std::vector<LogField> Fields(const void* of) {
    return FieldsOf(static_cast<const RequestContext*>(of));
  }
  const RequestPtr request_;
  const RequestScope scope_;
  const LogScope fields_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_REQUEST_H_
