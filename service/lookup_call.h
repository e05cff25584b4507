// One Lookup call: what this node has, and where that ends what its peers say they have.
//
// Begins on gRPC's thread, which must not wait. When the node has all of it, or nobody else can be
// asked, it ends there; else on the cluster's loop, when peers have answered or their time is up.
#ifndef KVMILL_SERVICE_LOOKUP_CALL_H_
#define KVMILL_SERVICE_LOOKUP_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmill/v1/cache.pb.h"
#include "service/service_context.h"
#include "storage/tiered_store.h"

namespace kvmill {

class LookupCall final : public grpc::ServerUnaryReactor {
 public:
  // The reactor for gRPC; it owns itself. `request` and `reply` live as long.
  static LookupCall* Start(const ServiceContext& context, const absl::StatusOr<Caller>& caller,
                           std::chrono::system_clock::time_point deadline,
                           const v1::LookupRequest* request, v1::LookupReply* reply);

  void OnDone() override { delete this; }

 private:
  LookupCall(const ServiceContext& context, v1::LookupReply* reply)
      : context_(context), reply_(*reply) {}
  // False: the peers are asked.
  absl::StatusOr<bool> Begin(const absl::StatusOr<Caller>& caller,
                             std::chrono::system_clock::time_point deadline,
                             const v1::LookupRequest& request);
  absl::StatusOr<bool> Find(const TieredStore::NamespaceInfo& info, const Caller& caller,
                            const Elsewhere& elsewhere,
                            std::chrono::system_clock::time_point deadline,
                            const v1::LookupRequest& request);
  void End(const absl::StatusOr<bool>& complete);
  void Answer(const TieredStore::LookupResult& result);

  const ServiceContext& context_;
  v1::LookupReply& reply_;
  NamespaceId namespace_id_ = 0;
  std::shared_ptr<const std::vector<BlockKey>> keys_;  // Of the peers' lookup, too.
  std::vector<TailCandidate> tails_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOOKUP_CALL_H_
