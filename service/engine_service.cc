#include "service/engine_service.h"

#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/answer.h"
#include "service/session_call.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/error_guard.h"

namespace kvmill {

void FillHello(const ServiceContext& context, v1::HelloReply* reply) {
  reply->mutable_server()->set_protocol_version(kProtocolVersion);
  reply->mutable_server()->set_software_version(kSoftwareVersion);
  reply->set_boot_id(context.boot_id);
  reply->mutable_limits()->set_message_bytes_max(kMessageBytesMax);
  reply->mutable_limits()->set_batch_keys_max(kBatchKeysMax);
  const StoreStats stats = context.store.stats();
  for (std::size_t i = 0; i < kTierCount; ++i) {
    if (stats.tiers[i].capacity_bytes != 0) reply->add_tiers(ToProto(static_cast<Tier>(i)));
  }
}

void FillNamespace(const ServiceContext& context, const TieredStore::NamespaceInfo& info,
                   v1::NamespaceInfo* out) {
  out->set_name(info.name);
  out->set_fingerprint(std::string(AsBytes(info.fingerprint)));
  ToProto(info.spec, out->mutable_spec());
  out->set_algorithm(context.store.algorithm() == Algorithm::kRefined ? v1::ENCODE_ALGORITHM_REFINED
                                                                      : v1::ENCODE_ALGORITHM_KVARN);
}

void FillTrip(const ServiceContext& context, const TieredStore::NamespaceInfo& info,
              v1::NamespaceInfo* out) {
  if (context.guard == nullptr) return;
  const std::optional<ErrorGuard::Trip> trip = context.guard->TripOf(info.id);
  if (!trip.has_value()) return;
  v1::NamespaceTrip* const to = out->mutable_trip();
  to->set_key_error(trip->key_error);
  to->set_value_error(trip->value_error);
  const GuardAction action = context.guard->action();
  to->set_refuses_stores(action != GuardAction::kAlert);
  if (action == GuardAction::kRefuse) return;
  const std::optional<FallbackNamespace> fallback =
      FallbackOf(info.name, info.spec, trip->key_above, trip->value_above);
  if (!fallback.has_value()) return;
  to->set_fallback_name(fallback->name);
  to->set_fallback_key_bits(fallback->spec.key_bits);
  to->set_fallback_value_bits(fallback->spec.value_bits);
  to->set_fallback_sink_blocks(fallback->spec.sink_blocks);
}

grpc::Status EngineService::Hello(grpc::ServerContext* call, const v1::HelloRequest* request,
                                  v1::HelloReply* reply) {
  return Answer(context_, *call, [&](const Caller&) {
    FillHello(context_, reply);
    return CheckProtocolVersion(request->client().protocol_version());
  });
}

grpc::Status EngineService::Register(grpc::ServerContext* call, const v1::RegisterRequest* request,
                                     v1::RegisterReply* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_RETURN_IF_ERROR(CheckProtocolVersion(request->client().protocol_version()));
    KVMILL_ASSIGN_OR_RETURN(NamespaceSpec spec, FromProto(request->spec()));
    spec.tenant = caller.tenant;
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.store.OpenNamespace(request->name(), spec));
    FillNamespace(context_, info, reply->mutable_namespace_());
    FillTrip(context_, info, reply->mutable_namespace_());
    FillHello(context_, reply->mutable_hello());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* EngineService::Describe(grpc::CallbackServerContext* call,
                                                  const v1::DescribeRequest* request,
                                                  v1::NamespaceInfo* reply) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  const absl::StatusOr<Caller> caller = Enter(context_, *call);
  const auto answer = [&context = context_, reactor, reply,
                       tenant = caller.ok() ? caller->tenant : std::string()](
                          const absl::StatusOr<TieredStore::NamespaceInfo>& info) {
    if (info.ok()) {
      FillNamespace(context, *info, reply);
      if (info->spec.tenant == tenant) {
        FillTrip(context, *info, reply);
      } else {
        reply->set_tenant(info->spec.tenant);
      }
    }
    reactor->Finish(StatusToGrpc(info.status()));
  };
  const absl::StatusOr<TieredStore::NamespaceInfo> info =
      caller.ok() ? context_.ResolveForNode(*caller, request->namespace_()) : caller.status();
  if (!caller.ok() || info.ok() ||
      !context_.Learn(info.status(), *caller, request->namespace_(), Elsewhere(), call->deadline(),
                      answer)) {
    answer(info);
  }
  return reactor;
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* EngineService::Session(
    grpc::CallbackServerContext* call) {
  return SessionCall::Start(context_, Enter(context_, *call));
}

grpc::Status EngineService::RegisterMemory(grpc::ServerContext* call,
                                           const v1::RegisterMemoryRequest* request,
                                           v1::RegisterMemoryReply* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.Resolve(caller, request->namespace_()));
    KVMILL_ASSIGN_OR_RETURN(const EngineGeometry geometry, FromProto(request->geometry()));
    KVMILL_RETURN_IF_ERROR(CheckGeometry(info.spec, geometry));
    for (std::size_t i = 0; i < geometry.regions.size() && !context_.reads_gpu_memory; ++i) {
      if (geometry.regions[i].kind != EngineRegionKind::kDeviceIpc) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("regions[", i, "] is memory of a GPU, and this daemon (device ",
                       context_.device, ") has none"));
    }
    if (!geometry.assembling_boot_id.empty() &&
        geometry.assembling_boot_id != context_.boot_id_hex) {
      return absl::FailedPreconditionError(absl::StrCat(
          "assembling_boot_id ", geometry.assembling_boot_id, ": this daemon is ",
          context_.boot_id_hex, ", and all ranks must name the one that assembles their blocks"));
    }
    KVMILL_ASSIGN_OR_RETURN(
        const std::uint64_t registration,
        context_.sessions.Register(caller, request->session_id(), info.id, geometry));
    reply->set_registration(registration);
    return absl::OkStatus();
  });
}

grpc::Status EngineService::UnregisterMemory(grpc::ServerContext* call,
                                             const v1::UnregisterMemoryRequest* request,
                                             v1::UnregisterMemoryReply*) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    // No longer than a few chunks take that are being encoded; nothing new begins.
    struct Rest {
      Mutex mu;
      CondVar changed;
      bool here ABSL_GUARDED_BY(mu) = false;
    };
    const auto rest = std::make_shared<Rest>();  // The answer may come after the last statement.
    KVMILL_ASSIGN_OR_RETURN(
        const bool was_there,
        context_.sessions.Unregister(caller, request->session_id(), request->registration(),
                                     [rest](std::uint64_t) {
                                       MutexLock lock(rest->mu);
                                       rest->here = true;
                                       rest->changed.NotifyAll();
                                     }));
    if (!was_there) {
      return absl::NotFoundError(
          absl::StrCat("registration ", request->registration(), " is not one of this session"));
    }
    MutexLock lock(rest->mu);
    while (!rest->here) rest->changed.Wait(rest->mu);
    return absl::OkStatus();
  });
}

}  // namespace kvmill
