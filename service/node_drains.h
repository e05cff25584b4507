// Admin.DrainNode: has this daemon leave, or passes the request on to the node that is meant.
//
// A call is a thread that waits: of drains of this daemon there is one, of those that are passed on
// there are up to kPassedOnMax at a time.
#ifndef KVMILL_SERVICE_NODE_DRAINS_H_
#define KVMILL_SERVICE_NODE_DRAINS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tls/tls_files.h"
#include "kvmill/v1/admin.pb.h"
#include "service/cluster/member.h"
#include "service/leaving.h"
#include "service/service_context.h"

namespace kvmill {

// Thread-safe.
class NodeDrains {
 public:
  using Writer = grpc::ServerWriter<v1::DrainProgress>;
  static constexpr std::uint32_t kPassedOnMax = 4;

  // `own_id`: by which this daemon is called when it is in no cluster. `tls`: of connections to
  // other nodes. The first two outlive this.
  NodeDrains(const ServiceContext& context, Leaving& leaving, std::string own_id,
             const TlsFiles& tls = {})
      : context_(context), leaving_(leaving), own_id_(std::move(own_id)), tls_(tls) {}

  // Returns when the call is over; errors as admin.proto has them. Whoever called may drain.
  absl::Status Drain(grpc::ServerContext& call, const v1::DrainNodeRequest& request,
                     Writer& progress);

 private:
  std::string own_id() const;
  absl::Status DrainSelf(grpc::ServerContext& call, Writer& progress);
  // The node that is called so, which is not this one.
  absl::StatusOr<Member> Find(const std::string& id) const;
  absl::Status PassOn(grpc::ServerContext& call, const Member& member, Writer& progress) const;
  absl::Status LeavesItself(const Member& member) const;
  // Until the member is none any more.
  absl::Status Watch(grpc::ServerContext& call, const Member& member, v1::DrainProgress last,
                     Writer& progress) const;

  const ServiceContext& context_;
  Leaving& leaving_;
  const std::string own_id_;
  const TlsFiles tls_;
  std::atomic<std::uint32_t> passed_on_{0};
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_NODE_DRAINS_H_
