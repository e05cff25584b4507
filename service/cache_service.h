// kvmill.v1.Cache: translates between the wire and the tiered store.
#ifndef KVMILL_SERVICE_CACHE_SERVICE_H_
#define KVMILL_SERVICE_CACHE_SERVICE_H_

#include <map>
#include <string>

#include "kvmill/v1/cache.grpc.pb.h"
#include "service/service_context.h"

namespace kvmill {

// Store and Fetch work on raw byte buffers (StoreCall, FetchCall), Lookup and Map on messages
// (LookupCall, MapCall); the others are plain calls on gRPC's own bounded threads.
class CacheService final
    : public v1::Cache::WithRawCallbackMethod_Store<
          v1::Cache::WithRawCallbackMethod_Fetch<v1::Cache::WithCallbackMethod_Lookup<
              v1::Cache::WithCallbackMethod_Map<v1::Cache::Service>>>> {
 public:
  explicit CacheService(ServiceContext& context) : context_(context) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Store(
      grpc::CallbackServerContext* call) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Fetch(grpc::CallbackServerContext* call,
                                                    const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* call,
                                   const v1::LookupRequest* request,
                                   v1::LookupReply* reply) override;
  grpc::ServerUnaryReactor* Map(grpc::CallbackServerContext* call, const v1::MapRequest* request,
                                v1::MapReply* reply) override;
  grpc::Status Renew(grpc::ServerContext* call, const v1::RenewRequest* request,
                     v1::RenewReply* reply) override;
  grpc::Status Release(grpc::ServerContext* call, const v1::ReleaseRequest* request,
                       v1::BlockCount* reply) override;
  grpc::Status Touch(grpc::ServerContext* call, const v1::TouchRequest* request,
                     v1::BlockCount* reply) override;
  grpc::Status Remove(grpc::ServerContext* call, const v1::RemoveRequest* request,
                      v1::BlockCount* reply) override;
  grpc::Status Clear(grpc::ServerContext* call, const v1::ClearRequest* request,
                     v1::BlockCount* reply) override;
  grpc::Status Flush(grpc::ServerContext* call, const v1::FlushRequest* request,
                     v1::BlockCount* reply) override;
  grpc::Status Stat(grpc::ServerContext* call, const v1::StatRequest* request,
                    v1::StatReply* reply) override;
  grpc::Status List(grpc::ServerContext* call, const v1::ListRequest* request,
                    grpc::ServerWriter<v1::ListReply>* writer) override;

 private:
  std::map<NamespaceId, std::string> NamesOf(const std::string& tenant) const;
  // What a tenant may know: of its own blocks, and nothing of the others, totals included.
  void FillTenantStat(const std::string& tenant, v1::StatReply* reply) const;

  ServiceContext& context_;
};

// What Stat, for the default tenant, and Admin.Status answer.
void FillStat(const ServiceContext& context, v1::StatReply* reply);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CACHE_SERVICE_H_
