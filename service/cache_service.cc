#include "service/cache_service.h"

#include <map>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/answer.h"
#include "service/fetch_call.h"
#include "service/lookup_call.h"
#include "service/map_call.h"
#include "service/store_call.h"
#include "service/transfers.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr int kListEntriesPerMessage = 512;

template <typename Container>
std::uint64_t Sum(const Container& values) {
  return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
}

absl::Status SetCount(const absl::StatusOr<std::uint64_t>& count, v1::BlockCount* reply) {
  KVMILL_RETURN_IF_ERROR(count.status());
  reply->set_blocks(*count);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<LeaseId>> LeasesFromProto(
    const google::protobuf::RepeatedPtrField<v1::LeaseRange>& ranges, std::uint32_t leases_max) {
  std::vector<LeaseId> leases;
  for (const v1::LeaseRange& range : ranges) {
    if (range.count() > leases_max - leases.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("more than ", leases_max, " leases in one request: at most that many"));
    }
    for (std::uint32_t i = 0; i < range.count(); ++i) leases.push_back(range.first() + i);
  }
  return leases;
}

// What every caller may know.
void FillDaemonStat(const ServiceContext& context, v1::StatReply* reply) {
  reply->set_boot_id(context.boot_id);
  reply->set_uptime_s(static_cast<double>(context.clock.MonotonicNanos() - context.start_nanos) *
                      1e-9);
  reply->set_draining(context.draining.load(std::memory_order_relaxed));
}

}  // namespace

void FillStat(const ServiceContext& context, v1::StatReply* reply) {
  const StoreStats stats = context.store.stats();
  reply->set_blocks(stats.blocks);
  reply->set_pages(stats.pages);
  const SessionTable::Stats sessions = context.sessions.stats();
  reply->set_sessions(sessions.sessions);
  reply->set_leases(sessions.leases);
  reply->set_leased_bytes(sessions.leased_bytes);
  reply->set_lease_expirations(sessions.lease_expirations);
  for (std::size_t i = 0; i < kTierCount; ++i) {
    const TierStats& tier = stats.tiers[i];
    if (tier.capacity_bytes == 0) continue;
    v1::TierStat* t = reply->add_tiers();
    t->set_tier(ToProto(static_cast<Tier>(i)));
    t->set_used_bytes(tier.used_bytes);
    t->set_capacity_bytes(tier.capacity_bytes);
    t->set_blocks(tier.blocks);
    t->set_hit_blocks(stats.hit_blocks[i]);
    t->set_evicted_blocks(
        stats.evicted_blocks[i][static_cast<std::size_t>(EvictReason::kCapacity)] +
        stats.evicted_blocks[i][static_cast<std::size_t>(EvictReason::kAdmin)] +
        stats.evicted_blocks[i][static_cast<std::size_t>(EvictReason::kWatermark)]);
  }
  DataPlane::Stats data;
  if (context.data_plane != nullptr) data = context.data_plane->stats();
  for (const Transfer& transfer : TransfersOf(context, data)) {
    v1::TransferStat* t = reply->add_transfers();
    t->set_path(transfer.path);
    t->set_transport(transfer.transport);
    t->set_bytes_in(transfer.bytes_in.value_or(0));
    t->set_bytes_out(transfer.bytes_out);
  }
  reply->set_raw_bytes_ingested(Sum(stats.raw_bytes_ingested));
  reply->set_encoded_bytes_stored(Sum(stats.encoded_bytes_stored));
  reply->set_lookup_requests(stats.lookup_hit + stats.lookup_partial + stats.lookup_miss);
  reply->set_lookup_blocks(stats.lookup_blocks);
  reply->set_hit_blocks(Sum(stats.hit_blocks));
  reply->set_stored_blocks(stats.stored_blocks);
  reply->set_existing_blocks(stats.existing_blocks);
  reply->set_rejected_blocks(stats.rejected_blocks);
  for (const auto& by_tier : stats.fetched_blocks) {
    reply->set_fetched_blocks(reply->fetched_blocks() + Sum(by_tier));
  }
  reply->set_fetch_misses(Sum(stats.fetch_misses));
  reply->set_checksum_failures(Sum(stats.checksum_failures));
  reply->set_unwritten_blocks(stats.unwritten_blocks);
  reply->set_metadata_bytes(stats.metadata_bytes);
  if (context.disk_keys != nullptr) {
    for (const EncryptionKeyUsage& usage : context.disk_keys()) {
      v1::DiskKeyStat* key = reply->add_disk_keys();
      key->set_key(usage.key);
      key->set_current(usage.is_current);
      key->set_files(usage.files);
      key->set_bytes(usage.bytes);
    }
  }
  FillDaemonStat(context, reply);
}

std::map<NamespaceId, std::string> CacheService::NamesOf(const std::string& tenant) const {
  std::map<NamespaceId, std::string> names;
  for (const TieredStore::NamespaceInfo& info : context_.store.Namespaces()) {
    if (info.spec.tenant == tenant) names[info.id] = info.name;
  }
  return names;
}

void CacheService::FillTenantStat(const std::string& tenant, v1::StatReply* reply) const {
  const TenantHolding holding = context_.store.Holding(tenant);
  reply->set_blocks(holding.blocks);
  for (std::size_t i = 0; i < kTierCount; ++i) {
    if (holding.tier_blocks[i] == 0) continue;
    v1::TierStat* t = reply->add_tiers();
    t->set_tier(ToProto(static_cast<Tier>(i)));
    t->set_blocks(holding.tier_blocks[i]);
    t->set_used_bytes(holding.tier_bytes[i]);
  }
  const SessionTable::Stats sessions = context_.sessions.StatsOf(tenant);
  reply->set_sessions(sessions.sessions);
  reply->set_leases(sessions.leases);
  FillDaemonStat(context_, reply);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Store(
    grpc::CallbackServerContext* call) {
  return StoreCall::Start(context_, Enter(context_, *call));
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Fetch(grpc::CallbackServerContext* call,
                                                                const grpc::ByteBuffer* request) {
  return FetchCall::Start(context_, Enter(context_, *call), call->deadline(), *request);
}

grpc::ServerUnaryReactor* CacheService::Lookup(grpc::CallbackServerContext* call,
                                               const v1::LookupRequest* request,
                                               v1::LookupReply* reply) {
  return LookupCall::Start(context_, Enter(context_, *call), call->deadline(), request, reply);
}

grpc::ServerUnaryReactor* CacheService::Map(grpc::CallbackServerContext* call,
                                            const v1::MapRequest* request, v1::MapReply* reply) {
  return MapCall::Start(context_, Enter(context_, *call), call->deadline(), request, reply);
}

grpc::Status CacheService::Renew(grpc::ServerContext* call, const v1::RenewRequest* request,
                                 v1::RenewReply* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(
        const std::vector<LeaseId> leases,
        LeasesFromProto(request->leases(), context_.sessions.options().leases_max));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<bool> renewed,
                            context_.sessions.Renew(caller, request->session_id(), leases,
                                                    std::int64_t{request->lease_ms()} * 1'000'000));
    for (std::size_t i = 0; i < leases.size(); ++i) {
      if (!renewed[i]) reply->add_ended(leases[i]);
    }
    return absl::OkStatus();
  });
}

grpc::Status CacheService::Release(grpc::ServerContext* call, const v1::ReleaseRequest* request,
                                   v1::BlockCount* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(
        const std::vector<LeaseId> leases,
        LeasesFromProto(request->leases(), context_.sessions.options().leases_max));
    return SetCount(context_.sessions.Release(caller, request->session_id(), leases), reply);
  });
}

grpc::Status CacheService::Touch(grpc::ServerContext* call, const v1::TouchRequest* request,
                                 v1::BlockCount* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.Resolve(caller, request->namespace_()));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys, KeysFromProto(request->keys()));
    std::vector<BlockId> ids;
    for (const BlockKey& key : keys) {
      for (std::size_t g = 0; g < info.spec.groups.size(); ++g) {
        ids.push_back({info.id, static_cast<std::uint8_t>(g), key});
      }
    }
    reply->set_blocks(context_.store.Touch(ids));
    return absl::OkStatus();
  });
}

grpc::Status CacheService::Remove(grpc::ServerContext* call, const v1::RemoveRequest* request,
                                  v1::BlockCount* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.Resolve(caller, request->namespace_()));
    KVMILL_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys, KeysFromProto(request->keys()));
    return SetCount(context_.store.Remove(info.id, keys), reply);
  });
}

grpc::Status CacheService::Clear(grpc::ServerContext* call, const v1::ClearRequest* request,
                                 v1::BlockCount* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                            context_.Resolve(caller, request->namespace_()));
    return SetCount(context_.store.Clear(info.id), reply);
  });
}

grpc::Status CacheService::Flush(grpc::ServerContext* call, const v1::FlushRequest*,
                                 v1::BlockCount* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    return SetCount(
        caller.sees_all() ? context_.store.Flush() : context_.store.Flush(caller.tenant), reply);
  });
}

grpc::Status CacheService::Stat(grpc::ServerContext* call, const v1::StatRequest*,
                                v1::StatReply* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    if (caller.sees_all()) {
      FillStat(context_, reply);
    } else {
      FillTenantStat(caller.tenant, reply);
    }
    return absl::OkStatus();
  });
}

grpc::Status CacheService::List(grpc::ServerContext* call, const v1::ListRequest* request,
                                grpc::ServerWriter<v1::ListReply>* writer) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    std::optional<NamespaceId> only;
    if (request->has_namespace_()) {
      KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo info,
                              context_.Resolve(caller, request->namespace_()));
      only = info.id;
    }
    const std::map<NamespaceId, std::string> names = NamesOf(caller.tenant);
    v1::ListReply reply;
    bool open = true;
    context_.store.List([&](const TieredStore::BlockInfo& block) {
      const auto name = names.find(block.namespace_id);
      if (name == names.end() || (only.has_value() && *only != block.namespace_id)) return true;
      v1::ListEntry* entry = reply.add_entries();
      entry->set_namespace_(name->second);
      entry->set_key(std::string(block.key.view()));
      entry->set_group(block.group);
      entry->set_tier(ToProto(block.tier));
      entry->set_bytes(block.bytes);
      entry->set_age_s(block.age_s);
      entry->set_leases(block.leases);
      if (reply.entries_size() < kListEntriesPerMessage) return true;
      open = writer->Write(reply) && !call->IsCancelled();
      reply.Clear();
      return open;
    });
    if (open && reply.entries_size() > 0) writer->Write(reply);
    return absl::OkStatus();
  });
}

}  // namespace kvmill
