#include "service/engine_service.h"

#include "client/convert.h"
#include "service/status_grpc.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {

void FillHello(const ServiceContext& context, v1::HelloReply* reply) {
  reply->mutable_server()->set_protocol_version(kProtocolVersion);
  reply->mutable_server()->set_software_version(kSoftwareVersion);
  reply->set_boot_id(context.boot_id);
  reply->mutable_limits()->set_message_bytes_max(kMessageBytesMax);
  reply->mutable_limits()->set_batch_keys_max(kBatchKeysMax);
  reply->add_tiers(v1::TIER_HOST);
  if (!context.data_dir.empty()) reply->add_tiers(v1::TIER_DISK);
}

void FillNamespace(const TieredStore::NamespaceInfo& info, v1::NamespaceInfo* out) {
  out->set_name(info.name);
  out->set_fingerprint(std::string(AsBytes(info.fingerprint)));
  ToProto(info.spec, out->mutable_spec());
}

grpc::Status EngineService::Hello(grpc::ServerContext* call, const v1::HelloRequest* request,
                                  v1::HelloReply* reply) {
  call->AddInitialMetadata(kBootIdMetadata, context_.boot_id_hex);
  const absl::StatusOr<Caller> caller = context_.callers.Identify(*call);
  if (!caller.ok()) return StatusToGrpc(caller.status());
  FillHello(context_, reply);
  return StatusToGrpc(CheckProtocolVersion(request->client().protocol_version()));
}

grpc::Status EngineService::Register(grpc::ServerContext* call, const v1::RegisterRequest* request,
                                     v1::RegisterReply* reply) {
  call->AddInitialMetadata(kBootIdMetadata, context_.boot_id_hex);
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Caller caller, context_.callers.Identify(*call));
    KVMILL_RETURN_IF_ERROR(CheckProtocolVersion(request->client().protocol_version()));
    KVMILL_ASSIGN_OR_RETURN(NamespaceSpec spec, FromProto(request->spec()));
    spec.tenant = caller.tenant;
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.store.OpenNamespace(request->name(), spec));
    FillNamespace(info, reply->mutable_namespace_());
    FillHello(context_, reply->mutable_hello());
    return absl::OkStatus();
  }());
}

grpc::Status EngineService::Describe(grpc::ServerContext* call, const v1::DescribeRequest* request,
                                     v1::NamespaceInfo* reply) {
  call->AddInitialMetadata(kBootIdMetadata, context_.boot_id_hex);
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const Caller caller, context_.callers.Identify(*call));
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.Resolve(caller, request->namespace_()));
    FillNamespace(info, reply);
    return absl::OkStatus();
  }());
}

}  // namespace kvmill
