#include "service/lookup_call.h"

#include <string>
#include <utility>

#include "client/convert.h"
#include "service/cluster_blocks.h"
#include "service/status_grpc.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::StatusOr<std::vector<TailCandidate>> TailsFromProto(
    const google::protobuf::RepeatedPtrField<v1::TailCandidate>& from, std::uint32_t block_tokens) {
  std::vector<TailCandidate> tails;
  for (const v1::TailCandidate& tail : from) {
    TailCandidate& to = tails.emplace_back();
    KVMILL_ASSIGN_OR_RETURN(to.key, OptionalKeyFromBytes(tail.key()));
    to.token_count = tail.token_count();
    to.block_index = tail.block_index();
  }
  KVMILL_RETURN_IF_ERROR(CheckTailCandidates(tails, block_tokens));
  return tails;
}

}  // namespace

LookupCall* LookupCall::Start(const ServiceContext& context, const absl::StatusOr<Caller>& caller,
                              std::chrono::system_clock::time_point deadline,
                              const v1::LookupRequest* request, v1::LookupReply* reply) {
  auto* call = new LookupCall(context, reply);
  call->End(call->Begin(caller, deadline, *request));
  return call;
}

void LookupCall::End(const absl::StatusOr<bool>& complete) {
  if (!complete.ok() || *complete) Finish(StatusToGrpc(complete.status()));
}

absl::StatusOr<bool> LookupCall::Begin(const absl::StatusOr<Caller>& caller,
                                       std::chrono::system_clock::time_point deadline,
                                       const v1::LookupRequest& request) {
  KVMILL_RETURN_IF_ERROR(caller.status());
  KVMILL_ASSIGN_OR_RETURN(const Elsewhere elsewhere, FromProto(request.elsewhere()));
  const absl::StatusOr<TieredStore::NamespaceInfo> info =
      context_.Resolve(*caller, request.namespace_());
  if (info.ok()) return Find(*info, *caller, elsewhere, deadline, request);
  // gRPC keeps the request until Finish.
  if (context_.Learn(info.status(), *caller, request.namespace_(), elsewhere, deadline,
                     [this, caller = *caller, elsewhere, deadline,
                      &request](const absl::StatusOr<TieredStore::NamespaceInfo>& learned) {
                       if (!learned.ok()) return End(learned.status());
                       End(Find(*learned, caller, elsewhere, deadline, request));
                     })) {
    return false;
  }
  return info.status();
}

absl::StatusOr<bool> LookupCall::Find(const TieredStore::NamespaceInfo& info, const Caller& caller,
                                      const Elsewhere& elsewhere,
                                      std::chrono::system_clock::time_point deadline,
                                      const v1::LookupRequest& request) {
  KVMILL_ASSIGN_OR_RETURN(std::vector<BlockKey> keys, KeysFromProto(request.keys()));
  KVMILL_ASSIGN_OR_RETURN(tails_, TailsFromProto(request.tails(), info.spec.block_tokens));
  ClusterBlocks* const cluster = context_.BlocksOfPeers(caller, elsewhere);
  TieredStore::LookupOptions options;
  options.is_last_word = cluster == nullptr;
  const TieredStore::LookupResult result = context_.store.Lookup(info.id, keys, tails_, options);
  if (cluster == nullptr || result.hit_blocks == keys.size()) {
    Answer(result);
    return true;
  }
  namespace_id_ = info.id;
  keys_ = std::make_shared<const std::vector<BlockKey>>(std::move(keys));
  const RequestScope scope(caller.request);
  cluster->Lookup(info.fingerprint, keys_, result.hit_blocks, elsewhere.hint, deadline,
                  [this](const std::vector<bool>& has) {
                    TieredStore::LookupOptions last;
                    last.elsewhere = &has;
                    Answer(context_.store.Lookup(namespace_id_, *keys_, tails_, last));
                    Finish(grpc::Status::OK);
                  });
  return false;
}

void LookupCall::Answer(const TieredStore::LookupResult& result) {
  reply_.set_hit_blocks(result.hit_blocks);
  reply_.set_hit_tokens(result.hit_tokens);
  for (const Tier tier : result.tiers) reply_.add_tiers(ToProto(tier));
  reply_.set_tail_tokens(result.tail_tokens);
  if (result.tail_tokens > 0) reply_.set_tail_key(std::string(result.tail_key.view()));
}

}  // namespace kvmill
