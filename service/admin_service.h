// kvmill.v1.Admin: operation of this daemon. One instance per server, each with its own gate.
#ifndef KVMILL_SERVICE_ADMIN_SERVICE_H_
#define KVMILL_SERVICE_ADMIN_SERVICE_H_

#include <functional>
#include <memory>

#include "kvmill/v1/admin.grpc.pb.h"
#include "service/local_peers.h"
#include "service/node_drains.h"
#include "service/request.h"
#include "service/service_context.h"

namespace kvmill {

class AdminService final : public v1::Admin::WithCallbackMethod_Where<v1::Admin::Service> {
 public:
  // `start_drain` marks the daemon as draining everywhere (readiness, health); idempotent.
  AdminService(ServiceContext& context, AdminGate gate, NodeDrains& drains,
               std::function<void()> start_drain)
      : context_(context), gate_(gate), drains_(drains), start_drain_(std::move(start_drain)) {}

  grpc::Status Status(grpc::ServerContext* call, const v1::StatusRequest* request,
                      v1::StatusReply* reply) override;
  grpc::Status Namespaces(grpc::ServerContext* call, const v1::NamespacesRequest* request,
                          v1::NamespacesReply* reply) override;
  grpc::Status Evict(grpc::ServerContext* call, const v1::EvictRequest* request,
                     v1::BlockCount* reply) override;
  grpc::Status Verify(grpc::ServerContext* call, const v1::VerifyRequest* request,
                      v1::VerifyReply* reply) override;
  grpc::Status Quota(grpc::ServerContext* call, const v1::QuotaRequest* request,
                     v1::QuotaReply* reply) override;
  grpc::Status Drain(grpc::ServerContext* call, const v1::DrainRequest* request,
                     v1::BlockCount* reply) override;
  grpc::Status DrainNode(grpc::ServerContext* call, const v1::DrainNodeRequest* request,
                         grpc::ServerWriter<v1::DrainProgress>* progress) override;
  grpc::Status Cluster(grpc::ServerContext* call, const v1::ClusterRequest* request,
                       v1::ClusterReply* reply) override;
  grpc::Status Config(grpc::ServerContext* call, const v1::ConfigRequest* request,
                      v1::ConfigReply* reply) override;
  grpc::ServerUnaryReactor* Where(grpc::CallbackServerContext* call,
                                  const v1::WhereRequest* request, v1::WhereReply* reply) override;

 private:
  // The gate's verdict; one log line for an admin call that is refused, and one for the audit when
  // it is `audited`: it changes something, or says names or keys; then, too, of which tenant, where
  // that is one. What is returned lives as long as the call is worked on.
  absl::StatusOr<std::unique_ptr<ServedRequest>> Enter(grpc::ServerContextBase* call,
                                                       absl::string_view method, bool audited,
                                                       const std::string& of_tenant = "") const;

  ServiceContext& context_;
  const AdminGate gate_;
  NodeDrains& drains_;
  const std::function<void()> start_drain_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ADMIN_SERVICE_H_
