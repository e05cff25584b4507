#include "service/request.h"

#include <atomic>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

// Empty without, and when it was sent twice: nobody knows which one is meant.
std::string Only(const grpc::ServerContextBase& call, const char* key) {
  const auto [begin, end] = call.client_metadata().equal_range(key);
  if (begin == end || std::next(begin) != end) return "";
  return std::string(begin->second.data(), begin->second.size());
}

// 15 hex digits, which strings hold without memory of their own: a counter whose numbers are spread
// (splitmix64) from where chance put it, so that ids of different processes differ.
std::string MakeRequestId() {
  static std::atomic<std::uint64_t> next{[] {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
  }()};
  std::uint64_t z = next.fetch_add(0x9E3779B97F4A7C15, std::memory_order_relaxed);
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  z = (z ^ z >> 31) >> 4;
  std::string id(15, '0');
  for (auto digit = id.rbegin(); digit != id.rend(); ++digit, z >>= 4) {
    *digit = "0123456789abcdef"[z & 15];
  }
  return id;
}

}  // namespace

RequestPtr BeginRequest(grpc::ServerContextBase& call) {
  RequestContext request;
  request.request_id = Only(call, kRequestIdMetadata);
  request.traceparent = Only(call, kTraceparentMetadata);
  if (!request.traceparent.empty()) request.tracestate = Only(call, kTracestateMetadata);
  request = RightPartsOf(std::move(request));
  if (request.request_id.empty()) request.request_id = MakeRequestId();
  call.AddTrailingMetadata(kRequestIdMetadata, request.request_id);
  return std::make_shared<const RequestContext>(std::move(request));
}

std::vector<LogField> FieldsOf(const RequestContext* of) {
  std::vector<LogField> fields;
  if (of == nullptr) return fields;
  if (!of->request_id.empty()) fields.push_back({"request_id", of->request_id});
  if (!of->traceparent.empty()) {
    fields.push_back({"trace_id", std::string(of->trace_id())});
    fields.push_back({"span_id", std::string(of->span_id())});
  }
  return fields;
}

void LogRefused(const grpc::ServerContextBase& call, const RequestContext& request,
                const absl::Status& why) {
  std::vector<LogField> fields = FieldsOf(&request);
  fields.push_back({"peer", call.peer()});
  LogInfo(absl::StrCat("a caller is refused: ", why.message()), fields);
}

}  // namespace kvmill
