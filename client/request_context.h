// What a request is known by across processes: an id, and W3C trace context
// (https://www.w3.org/TR/trace-context/). Calls carry it as gRPC metadata, daemons log it, and pass
// it on when they ask other nodes.
//
//   RequestScope scope({.request_id = "4711", .traceparent = "00-4bf9...-01"});
//   client->Lookup(ns, keys);  // Carries both.
#ifndef KVMILL_CLIENT_REQUEST_CONTEXT_H_
#define KVMILL_CLIENT_REQUEST_CONTEXT_H_

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace kvmill {

inline constexpr const char* kRequestIdMetadata = "x-request-id";
inline constexpr const char* kTraceparentMetadata = "traceparent";
inline constexpr const char* kTracestateMetadata = "tracestate";

inline constexpr std::size_t kRequestIdBytesMax = 64;

// Each part may be empty: it is not sent then.
struct RequestContext {
  std::string request_id;   // 1 to 64 letters, digits, and . _ - : / + = @
  std::string traceparent;  // "00-TRACE_ID-SPAN_ID-FLAGS", in lower-case hex.
  std::string tracestate;   // Only with a traceparent.

  bool empty() const { return request_id.empty() && traceparent.empty(); }
  // Of a traceparent that is right; else empty.
  absl::string_view trace_id() const;
  absl::string_view span_id() const;
};

bool IsRequestId(absl::string_view text);
// As the recommendation has it: version 00 exactly, later versions as far as 00 goes; no zero ids.
bool IsTraceparent(absl::string_view text);
// At most 32 members of key=value with keys that differ, and 512 bytes.
bool IsTracestate(absl::string_view text);

// What of it is right. A tracestate goes with its traceparent, a wrong one alone. Of a later
// version the traceparent becomes one of version 00.
RequestContext RightPartsOf(RequestContext context);

using RequestPtr = std::shared_ptr<const RequestContext>;  // Of all that is done for a request.

// While it lives, calls of every Client that begin on this thread carry the context; what is wrong
// in it is left out. One within another: the inner one's.
class RequestScope {
 public:
  explicit RequestScope(RequestContext context);
  // Of one that is right; null: calls carry nothing.
  explicit RequestScope(RequestPtr context);
  ~RequestScope();
  RequestScope(const RequestScope&) = delete;
  RequestScope& operator=(const RequestScope&) = delete;

 private:
  friend RequestPtr CurrentRequest();
  const RequestPtr context_;
  const RequestScope* const outer_;
};

// Of the innermost scope that this thread is in; null: none.
RequestPtr CurrentRequest();

}  // namespace kvmill

#endif  // KVMILL_CLIENT_REQUEST_CONTEXT_H_
