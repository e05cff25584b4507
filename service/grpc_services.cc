#include "service/grpc_services.h"

namespace kvmill {

GrpcServices::GrpcServices(ServiceContext& context, EventJournal& journal, DataPlane* data_plane,
                           NodeDrains& drains, const LocalPeers& peers, uid_t own_uid,
                           const std::function<void()>& start_drain)
    : cache_(context),
      events_(context, journal),
      engine_(context),
      data_(context, data_plane),
      peer_(context),
      ticket_(context),
      local_admin_(context, AdminGate(peers, own_uid), drains, start_drain),
      remote_admin_(context, AdminGate(), drains, start_drain) {}

std::vector<grpc::Service*> GrpcServices::main() {
  return {&cache_, &events_, &engine_, &data_, &peer_, &ticket_, &local_admin_};
}

std::vector<grpc::Service*> GrpcServices::admin() { return {&remote_admin_}; }

}  // namespace kvmill
