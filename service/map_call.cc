#include "service/map_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/map_codec.h"
#include "service/cluster_blocks.h"
#include "service/status_grpc.h"
#include "storage/core/status_macros.h"

namespace kvmill {

MapCall* MapCall::Start(ServiceContext& context, const absl::StatusOr<Caller>& caller,
                        std::chrono::system_clock::time_point deadline,
                        const v1::MapRequest* request, v1::MapReply* reply) {
  auto* call = new MapCall(context, request, reply);
  call->End(call->Begin(caller, deadline));
  return call;
}

void MapCall::End(const absl::StatusOr<bool>& complete) {
  if (!complete.ok()) {
    Finish(StatusToGrpc(complete.status()));
  } else if (*complete) {
    Finish(StatusToGrpc(Answer()));
  }
}

BlockId MapCall::IdOf(std::size_t entry) const {
  const std::size_t groups = namespace_.spec.groups.size();
  BlockId id;
  id.namespace_id = namespace_.id;
  id.group = static_cast<std::uint8_t>(entry % groups);
  id.key = keys_[entry / groups];
  return id;
}

absl::StatusOr<bool> MapCall::Begin(const absl::StatusOr<Caller>& caller,
                                    std::chrono::system_clock::time_point deadline) {
  KVMILL_RETURN_IF_ERROR(caller.status());
  caller_ = *caller;
  if (caller_.door_client == 0) {
    return absl::FailedPreconditionError(
        "map is for clients on the daemon's node: use its socket, or fetch");
  }
  KVMILL_ASSIGN_OR_RETURN(memory_, FromProto(request_.memory()));
  KVMILL_ASSIGN_OR_RETURN(const Elsewhere elsewhere, FromProto(request_.elsewhere()));
  absl::StatusOr<TieredStore::NamespaceInfo> info =
      context_.Resolve(caller_, request_.namespace_());
  if (info.ok()) {
    namespace_ = *std::move(info);
    return Find(elsewhere, deadline);
  }
  if (context_.Learn(
          info.status(), caller_, request_.namespace_(), elsewhere, deadline,
          [this, elsewhere, deadline](absl::StatusOr<TieredStore::NamespaceInfo> learned) {
            if (!learned.ok()) return End(learned.status());
            namespace_ = *std::move(learned);
            End(Find(elsewhere, deadline));
          })) {
    return false;
  }
  return info.status();
}

absl::StatusOr<bool> MapCall::Find(const Elsewhere& elsewhere,
                                   std::chrono::system_clock::time_point deadline) {
  KVMILL_ASSIGN_OR_RETURN(keys_, KeysFromProto(request_.keys()));
  const std::size_t count = keys_.size() * namespace_.spec.groups.size();
  if (count > kMapBlocksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(keys_.size(), " keys of ", namespace_.spec.groups.size(),
                     " layer groups in one Map: at most ", kMapBlocksMax, " together"));
  }
  std::vector<BlockId> ids(count);
  for (std::size_t entry = 0; entry < count; ++entry) ids[entry] = IdOf(entry);
  context_.store.Prefetch(ids);
  entries_.reserve(count);
  for (std::size_t entry = 0; entry < count; ++entry) {
    entries_.emplace_back(context_.store.FetchFromMemory(ids[entry], FetchPath::kMap, memory_));
    if (!entries_.back()->valid()) missing_.push_back(entry);
  }
  ClusterBlocks* const cluster =
      missing_.empty() ? nullptr : context_.BlocksOfPeers(caller_, elsewhere);
  if (missing_.empty() || (!context_.has_other_tiers && cluster == nullptr)) {
    LoadMissing();  // Finds nothing, and counts that: it does not wait.
    return true;
  }
  if (context_.counters.map_loads.fetch_add(1, std::memory_order_relaxed) >= kMapLoadsMax) {
    context_.counters.map_loads.fetch_sub(1, std::memory_order_relaxed);
    return absl::ResourceExhaustedError(
        absl::StrCat(kMapLoadsMax, " Map calls wait for disk or peers: at most that many at once"));
  }
  const RequestScope scope(caller_.request);
  const auto settled = [this](std::size_t keys) {
    if (keys < keys_.size() && !cancelled_.load(std::memory_order_relaxed)) return true;
    LoadLater();
    return false;
  };
  if (cluster == nullptr || !cluster->Bring(namespace_, keys_, elsewhere, deadline, settled)) {
    LoadLater();
  }
  return false;
}

void MapCall::LoadLater() {
  context_.io_pool.Post([this] {
    LoadMissing();
    const absl::Status status = Answer();
    context_.counters.map_loads.fetch_sub(1, std::memory_order_relaxed);
    Finish(StatusToGrpc(status));  // May delete this.
  });
}

void MapCall::LoadMissing() {
  for (const std::size_t entry : missing_) {
    if (cancelled_.load(std::memory_order_relaxed)) return;
    entries_[entry] = memory_ == PageMemory::kGpu
                          ? context_.store.FetchOnGpu(IdOf(entry), FetchPath::kMap)
                          : context_.store.Fetch(IdOf(entry), FetchPath::kMap);
  }
}

absl::Status MapCall::Answer() {
  if (cancelled_.load(std::memory_order_relaxed)) return absl::CancelledError("the caller gave up");
  MapReplyWriter writer(&reply_);
  std::vector<BlockRef> leased;
  leased.reserve(entries_.size());
  std::vector<TieredStore::PageRun> runs;
  std::vector<MappedRun> named;
  std::vector<std::uint64_t> generations;
  std::uint64_t bytes = 0;
  for (std::size_t entry = 0; entry < entries_.size(); ++entry) {
    if (!entries_[entry].ok()) {
      writer.AddFailure(static_cast<std::uint32_t>(entry), entries_[entry].status());
      continue;
    }
    BlockRef& block = *entries_[entry];
    runs.clear();
    named.clear();
    context_.store.Locate(block, &runs);
    for (const TieredStore::PageRun& run : runs) {
      MappedRun& as = named.emplace_back();
      as.arena_index =
          writer.AddArena({run.tier, run.arena, run.arena_epoch}, context_.store.ArenaOf(run).bytes,
                          run.tier == Tier::kGpu ? context_.store.GenerationsOf(run).bytes : 0);
      as.page_count = run.page_count;
      as.page_bytes = run.page_bytes;
      as.stride_bytes = run.stride_bytes;
      as.offset_bytes = run.offset_bytes;
      as.generation_offset_bytes = run.generation_offset_bytes;
      bytes += std::uint64_t{run.page_count} * run.page_bytes;
    }
    writer.AddBlock(block.tier(), block.token_count(), named);
    if (!request_.loads_generations()) {
      generations.clear();
      context_.store.LoadGenerations(block, &generations);
      writer.AddGenerations(generations);
    }
    leased.push_back(std::move(block));
  }
  KVMILL_ASSIGN_OR_RETURN(
      const LeaseId first,
      context_.sessions.Grant(caller_, request_.session_id(),
                              std::int64_t{request_.lease_ms()} * 1'000'000, std::move(leased)));
  reply_.set_first_lease(first);
  context_.counters.mapped_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace kvmill
