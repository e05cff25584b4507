#include "service/admin_service.h"

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/cache_service.h"
#include "service/callers.h"
#include "service/cluster_node.h"
#include "service/engine_service.h"
#include "service/running_config.h"
#include "service/status_grpc.h"
#include "storage/core/log.h"
#include "storage/core/quoted.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

v1::Registration ToProto(Registrar::State state) {
  switch (state) {
    case Registrar::State::kJoining:
      return v1::REGISTRATION_JOINING;
    case Registrar::State::kRegistered:
      return v1::REGISTRATION_REGISTERED;
    case Registrar::State::kRefused:
      return v1::REGISTRATION_REFUSED;
    case Registrar::State::kLeft:
      return v1::REGISTRATION_LEFT;
  }
  return v1::REGISTRATION_NONE;
}

v1::ConfigSource ToProto(OptionSource source) {
  switch (source) {
    case OptionSource::kDefault:
      return v1::CONFIG_SOURCE_DEFAULT;
    case OptionSource::kFile:
      return v1::CONFIG_SOURCE_FILE;
    case OptionSource::kFlag:
      return v1::CONFIG_SOURCE_FLAG;
  }
  return v1::CONFIG_SOURCE_DEFAULT;
}

void ToProto(const Member& member, v1::ClusterMember* to) {
  to->set_id(member.id);
  to->set_incarnation(member.incarnation);
  to->set_address(member.address);
  to->set_zone(member.zone);
  to->set_capacity_bytes(member.capacity_bytes);
  to->set_draining(member.state == MemberState::kDraining);
  to->set_admin_address(member.admin_address);
}

void ToProto(const ClusterBlocks::Where& where, v1::WhereReply* reply) {
  for (const Member& home : where.homes) ToProto(home, reply->add_homes());
  for (const RemoteLookup::Source& holder : where.holders) {
    v1::BlockHolder* to = reply->add_holders();
    ToProto(holder.member, to->mutable_member());
    to->set_told(holder.told);
  }
}

absl::StatusOr<RunQuery> QueryFromProto(const v1::WhereRequest& request) {
  if (request.place() >= kRunBlocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("place ", request.place(), " in a run: it has ", kRunBlocks, " blocks"));
  }
  RunQuery query;
  KVMILL_ASSIGN_OR_RETURN(query.keys.emplace_back(), BlockKey::FromBytes(request.key()));
  KVMILL_ASSIGN_OR_RETURN(query.anchor, OptionalKeyFromBytes(request.anchor()));
  query.first = static_cast<std::uint8_t>(request.place());
  if (query.anchor.empty() && query.first > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("place ", request.place(), " in a run: want its anchor, too"));
  }
  if (query.anchor.empty()) query.anchor = query.keys[0];
  return query;
}

// The registry's comes first: without it nobody finds anybody.
std::string ProblemOf(const ClusterNode& cluster, const MembershipSnapshot& snapshot) {
  if (!snapshot.problem.ok()) return std::string(snapshot.problem.message());
  const std::vector<std::string> refusals = cluster.blocks().peer_refusals();
  if (refusals.empty()) return "";
  if (refusals.size() == 1) return refusals.front();
  return absl::StrCat(refusals.front(), " (and ", refusals.size() - 1, " other nodes do)");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServedRequest>> AdminService::Enter(
    grpc::ServerContextBase* call, absl::string_view method, bool audited,
    const std::string& of_tenant) const {
  call->AddInitialMetadata(kBootIdMetadata, context_.boot_id_hex);
  const RequestPtr request = BeginRequest(*call);
  const absl::StatusOr<Caller> caller = context_.callers.Identify(*call);
  absl::Status allowed = caller.status();
  if (allowed.ok()) allowed = gate_.Check(call->peer(), caller->admin);
  auto served = std::make_unique<ServedRequest>(request);
  if (allowed.ok() && !audited) return served;
  const std::string line = absl::StrCat("admin ", method, " by ", call->peer(), ": ",
                                        allowed.ok() ? "accepted" : allowed.message());
  std::vector<LogField> fields = {{"method", std::string(method)}, {"peer", call->peer()}};
  if (caller.ok()) fields.push_back({"tenant", caller->tenant});
  if (!of_tenant.empty()) fields.push_back({"of_tenant", of_tenant});
  if (allowed.ok()) {
    LogAudit(line, fields);
    return served;
  }
  LogInfo(line, fields);  // Anybody can have these made.
  return allowed;
}

grpc::Status AdminService::Status(grpc::ServerContext* call, const v1::StatusRequest*,
                                  v1::StatusReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Status", false));
    FillHello(context_, reply->mutable_hello());
    FillStat(context_, reply->mutable_stat());
    reply->set_draining(context_.draining.load(std::memory_order_relaxed));
    reply->set_device(context_.device);
    reply->set_data_dir(context_.data_dir);
    reply->set_encode_threads(context_.encode_threads);
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Namespaces(grpc::ServerContext* call, const v1::NamespacesRequest*,
                                      v1::NamespacesReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Namespaces", true));
    for (const TieredStore::NamespaceInfo& info : context_.store.Namespaces()) {
      v1::NamespaceInfo* const to = reply->add_namespaces();
      FillNamespace(context_, info, to);
      FillTrip(context_, info, to);
      to->set_tenant(info.spec.tenant);
    }
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Evict(grpc::ServerContext* call, const v1::EvictRequest* request,
                                 v1::BlockCount* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Evict", true));
    KVMILL_ASSIGN_OR_RETURN(const Tier tier, FromProto(request->tier()));
    const std::uint64_t bytes =
        request->bytes() == 0 ? std::numeric_limits<std::uint64_t>::max() : request->bytes();
    KVMILL_ASSIGN_OR_RETURN(const std::uint64_t blocks, context_.store.Evict(tier, bytes));
    reply->set_blocks(blocks);
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Verify(grpc::ServerContext* call, const v1::VerifyRequest*,
                                  v1::VerifyReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Verify", true));
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::VerifyResult result, context_.store.Verify());
    reply->set_records_checked(result.records_checked);
    reply->set_failures(result.failures);
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Quota(grpc::ServerContext* call, const v1::QuotaRequest*,
                                 v1::QuotaReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Quota", true));
    for (const TenantUsage& usage : context_.store.Usage()) {
      v1::TenantUsage* const to = reply->add_tenants();
      to->set_tenant(usage.tenant);
      to->set_used_bytes(usage.used_bytes);
      to->set_charged_bytes(usage.charged_bytes);
      to->set_gpu_bytes(usage.tier_bytes[static_cast<std::size_t>(Tier::kGpu)]);
      to->set_host_bytes(usage.tier_bytes[static_cast<std::size_t>(Tier::kHost)]);
      to->set_disk_bytes(usage.tier_bytes[static_cast<std::size_t>(Tier::kDisk)]);
      if (usage.quota.soft_bytes != kNoQuota) to->set_soft_bytes(usage.quota.soft_bytes);
      if (usage.quota.hard_bytes != kNoQuota) to->set_hard_bytes(usage.quota.hard_bytes);
      to->set_rejections(usage.rejections);
    }
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Drain(grpc::ServerContext* call, const v1::DrainRequest*,
                                 v1::BlockCount* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Drain", true));
    start_drain_();
    if (context_.data_dir.empty()) return absl::OkStatus();  // There is nowhere to save blocks to.
    KVMILL_ASSIGN_OR_RETURN(const std::uint64_t blocks, context_.store.Flush());
    reply->set_blocks(blocks);
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::DrainNode(grpc::ServerContext* call, const v1::DrainNodeRequest* request,
                                     grpc::ServerWriter<v1::DrainProgress>* progress) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "DrainNode", true));
    return drains_.Drain(*call, *request, *progress);
  }());
}

grpc::Status AdminService::Cluster(grpc::ServerContext* call, const v1::ClusterRequest*,
                                   v1::ClusterReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Cluster", false));
    const ClusterNode* cluster = context_.cluster.load(std::memory_order_acquire);
    if (cluster == nullptr) return absl::OkStatus();
    const std::shared_ptr<const MembershipSnapshot> snapshot = cluster->snapshot();
    reply->set_node_id(cluster->node_id());
    reply->set_registration(ToProto(snapshot->registration));
    reply->set_version(snapshot->version);
    reply->set_stale(snapshot->stale);
    reply->set_keeping(snapshot->keeping);
    reply->set_problem(ProblemOf(*cluster, *snapshot));
    for (const Member& member : snapshot->members) {
      ToProto(member, reply->add_members());
    }
    return absl::OkStatus();
  }());
}

grpc::Status AdminService::Config(grpc::ServerContext* call, const v1::ConfigRequest*,
                                  v1::ConfigReply* reply) {
  return StatusToGrpc([&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto served, Enter(call, "Config", true));
    const RunningConfig& running = *context_.running_config;
    reply->set_file(running.file());
    for (const RunningConfig::Option& option : running.Options()) {
      v1::ConfigOption* const to = reply->add_options();
      to->set_name(option.name);
      to->set_value(option.value);
      to->set_source(ToProto(option.source));
      to->set_default_value(option.default_value);
      to->set_reloadable(option.reloadable);
      if (option.pending.has_value()) to->set_pending(*option.pending);
    }
    const RunningConfig::Stats stats = running.stats();
    reply->set_loaded_unix_ms(stats.loaded_unix_millis);
    reply->set_reloads_applied(stats.applied);
    reply->set_reloads_refused(stats.refused);
    reply->set_problem(stats.problem);
    return absl::OkStatus();
  }());
}

grpc::ServerUnaryReactor* AdminService::Where(grpc::CallbackServerContext* call,
                                              const v1::WhereRequest* request,
                                              v1::WhereReply* reply) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  // True: the peers are asked, and answer later.
  const absl::StatusOr<bool> asks = [&]() -> absl::StatusOr<bool> {
    const std::string& tenant = request->tenant();
    const bool shared = context_.shared.Has(tenant);
    KVMILL_ASSIGN_OR_RETURN(const auto served,
                            Enter(call, "Where", true, shared ? tenant : std::string()));
    KVMILL_ASSIGN_OR_RETURN(Caller caller, context_.callers.Identify(*call));
    // Whose namespace is asked for, and no more of a right than that.
    caller = Caller{tenant.empty() ? caller.tenant : tenant, 0};
    if (!context_.shared.Has(caller.tenant)) {
      return absl::FailedPreconditionError(
          absl::StrCat("nodes do not share blocks of tenant ", Quoted(caller.tenant),
                       tenant.empty() ? ", which is the caller's (--tenant names another one)" : "",
                       ": each has its own alone"));
    }
    KVMILL_ASSIGN_OR_RETURN(const RunQuery query, QueryFromProto(*request));
    const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
    const auto find = [reactor, reply, query, cluster,
                       deadline = call->deadline()](const Fingerprint& fingerprint) {
      cluster->blocks().Find(fingerprint, query, deadline,
                             [reactor, reply](const ClusterBlocks::Where& where) {
                               ToProto(where, reply);
                               reactor->Finish(grpc::Status::OK);
                             });
    };
    const absl::StatusOr<TieredStore::NamespaceInfo> info =
        context_.Resolve(caller, request->namespace_());
    if (info.ok() && cluster != nullptr) find(info->fingerprint);
    if (info.ok()) return cluster != nullptr;
    if (context_.Learn(info.status(), caller, request->namespace_(), Elsewhere(), call->deadline(),
                       [reactor, find](const absl::StatusOr<TieredStore::NamespaceInfo>& learned) {
                         if (learned.ok()) return find(learned->fingerprint);
                         reactor->Finish(StatusToGrpc(learned.status()));
                       })) {
      return true;
    }
    return info.status();
  }();
  if (!asks.ok() || !*asks) reactor->Finish(StatusToGrpc(asks.status()));
  return reactor;
}

}  // namespace kvmill
