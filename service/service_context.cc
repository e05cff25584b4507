#include "service/service_context.h"

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/cluster_node.h"
#include "service/heard_names.h"
#include "storage/core/status_macros.h"
#include "storage/namespace_table.h"

namespace kvmill {

absl::StatusOr<TieredStore::NamespaceInfo> ServiceContext::Resolve(
    const Caller& caller, const v1::NamespaceRef& ref) const {
  absl::StatusOr<TieredStore::NamespaceInfo> known = Known(caller, ref);
  if (!absl::IsNotFound(known.status()) || BlocksOfPeers(caller, Elsewhere()) != nullptr) {
    return known;
  }
  if (ref.ref_case() == v1::NamespaceRef::kName) {
    absl::StatusOr<TieredStore::NamespaceInfo> heard = FindHeard(store, caller.tenant, ref.name());
    if (!absl::IsNotFound(heard.status())) return heard;
  }
  if (!has_cluster || draining.load(std::memory_order_relaxed) || registered()) return known;
  return absl::NotFoundError(
      absl::StrCat(known.status().message(),
                   ", and this daemon is not in its cluster yet, so that no "
                   "other node was asked: wait until 'kvmill cluster status' "
                   "says \"registered\""));
}

bool ServiceContext::registered() const {
  const ClusterNode* const node = cluster.load(std::memory_order_acquire);
  return node != nullptr && node->snapshot()->registration == Registrar::State::kRegistered;
}

absl::StatusOr<TieredStore::NamespaceInfo> ServiceContext::Known(
    const Caller& caller, const v1::NamespaceRef& ref) const {
  switch (ref.ref_case()) {
    case v1::NamespaceRef::kFingerprint: {
      KVMILL_ASSIGN_OR_RETURN(const Fingerprint fingerprint,
                              FingerprintFromBytes(ref.fingerprint()));
      return store.FindNamespace(caller.tenant, fingerprint);
    }
    case v1::NamespaceRef::kName:
      return store.FindNamespace(caller.tenant, ref.name());
    case v1::NamespaceRef::REF_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("no namespace: want a fingerprint or a name");
}

absl::StatusOr<TieredStore::NamespaceInfo> ServiceContext::ResolveForNode(
    const Caller& caller, const v1::NamespaceRef& ref) const {
  absl::StatusOr<TieredStore::NamespaceInfo> own = Resolve(caller, ref);
  if (!caller.node || !absl::IsNotFound(own.status()) ||
      ref.ref_case() != v1::NamespaceRef::kFingerprint) {
    return own;
  }
  return shared.Find(store, *FingerprintFromBytes(ref.fingerprint()));  // Resolve read it.
}

ClusterBlocks* ServiceContext::BlocksOfPeers(const Caller& caller,
                                             const Elsewhere& elsewhere) const {
  if (elsewhere.local_only || !shared.Has(caller.tenant)) return nullptr;
  const ClusterNode* const node = cluster.load(std::memory_order_acquire);
  if (node == nullptr || !node->blocks().has_peers()) return nullptr;
  return &node->blocks();
}

bool ServiceContext::Learn(const absl::Status& unknown, const Caller& caller,
                           const v1::NamespaceRef& ref, const Elsewhere& elsewhere,
                           std::chrono::system_clock::time_point deadline,
                           NamespaceDone done) const {
  if (!absl::IsNotFound(unknown)) return false;
  ClusterBlocks* const blocks = BlocksOfPeers(caller, elsewhere);
  if (blocks == nullptr) return false;
  NamespaceQuestion question;
  if (caller.tenant != kDefaultTenant) question.tenant = caller.tenant;
  if (ref.ref_case() == v1::NamespaceRef::kName) {
    if (ref.name().empty() || ref.name().size() > kNamespaceNameBytesMax) return false;
    question.name = ref.name();
  } else {
    question.fingerprint = *FingerprintFromBytes(ref.fingerprint());  // Resolve read it.
  }
  const RequestScope scope(caller.request);
  blocks->Learn(question, elsewhere.hint, deadline,
                [name = question.name,
                 done = std::move(done)](absl::StatusOr<TieredStore::NamespaceInfo> space) {
                  if (space.ok() && !name.empty()) space->name = name;
                  done(std::move(space));
                });
  return true;
}

absl::Status ServiceContext::NoCluster() const {
  if (has_cluster) {
    return absl::UnavailableError("this daemon is not in its cluster yet, or not any more: retry");
  }
  return absl::FailedPreconditionError("this daemon is in no cluster");
}

absl::Status ServiceContext::CheckAcceptsStores() const {
  if (!draining.load(std::memory_order_relaxed)) return absl::OkStatus();
  return absl::UnavailableError("the daemon is draining: it takes no more stores");
}

absl::StatusOr<std::vector<BlockKey>> KeysFromProto(
    const google::protobuf::RepeatedPtrField<std::string>& keys) {
  if (static_cast<std::uint32_t>(keys.size()) > kBatchKeysMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(keys.size(), " keys in one request: at most ", kBatchKeysMax));
  }
  std::vector<BlockKey> result;
  result.reserve(static_cast<std::size_t>(keys.size()));
  for (const std::string& key : keys) {
    KVMILL_ASSIGN_OR_RETURN(result.emplace_back(), BlockKey::FromBytes(key));
  }
  return result;
}

}  // namespace kvmill
