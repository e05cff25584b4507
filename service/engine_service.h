// kvmill.v1.Engine: the handshake, namespaces, sessions and the memory of engines.
#ifndef KVMILL_SERVICE_ENGINE_SERVICE_H_
#define KVMILL_SERVICE_ENGINE_SERVICE_H_

#include "kvmill/v1/engine.grpc.pb.h"
#include "service/service_context.h"

namespace kvmill {

class EngineService final : public v1::Engine::WithCallbackMethod_Session<
                                v1::Engine::WithCallbackMethod_Describe<v1::Engine::Service>> {
 public:
  explicit EngineService(ServiceContext& context) : context_(context) {}

  grpc::Status Hello(grpc::ServerContext* call, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override;
  grpc::Status Register(grpc::ServerContext* call, const v1::RegisterRequest* request,
                        v1::RegisterReply* reply) override;
  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* call,
                                     const v1::DescribeRequest* request,
                                     v1::NamespaceInfo* reply) override;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* Session(
      grpc::CallbackServerContext* call) override;
  grpc::Status RegisterMemory(grpc::ServerContext* call, const v1::RegisterMemoryRequest* request,
                              v1::RegisterMemoryReply* reply) override;
  grpc::Status UnregisterMemory(grpc::ServerContext* call,
                                const v1::UnregisterMemoryRequest* request,
                                v1::UnregisterMemoryReply* reply) override;

 private:
  ServiceContext& context_;
};

void FillHello(const ServiceContext& context, v1::HelloReply* reply);
void FillNamespace(const ServiceContext& context, const TieredStore::NamespaceInfo& info,
                   v1::NamespaceInfo* out);
// What the guard says of it.
void FillTrip(const ServiceContext& context, const TieredStore::NamespaceInfo& info,
              v1::NamespaceInfo* out);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ENGINE_SERVICE_H_
