// kvmill.v1.Data: permission to connect to the data plane.
#ifndef KVMILL_SERVICE_DATA_SERVICE_H_
#define KVMILL_SERVICE_DATA_SERVICE_H_

#include "kvmill/v1/data.grpc.pb.h"
#include "service/data_plane.h"
#include "service/service_context.h"

namespace kvmill {

class DataService final : public v1::Data::Service {
 public:
  // `plane` may be null: there is none. Both outlive it.
  DataService(ServiceContext& context, DataPlane* plane) : context_(context), plane_(plane) {}

  grpc::Status Connect(grpc::ServerContext* call, const v1::ConnectRequest* request,
                       v1::ConnectReply* reply) override;

 private:
  ServiceContext& context_;
  DataPlane* const plane_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DATA_SERVICE_H_
