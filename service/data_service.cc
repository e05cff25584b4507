#include "service/data_service.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "client/transport/own_hosts.h"
#include "service/answer.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

template <std::size_t kBytes>
std::string ToString(const std::array<std::byte, kBytes>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// A local client is one caller, and so is a tenant, or a node, of a host that comes over TCP,
// whatever its ports.
std::string WhoIs(const Caller& caller, const std::string& peer) {
  if (caller.door_client != 0) return absl::StrCat("local ", caller.door_client);
  return absl::StrCat(caller.node ? "node" : caller.tenant, " ", peer.substr(0, peer.rfind(':')));
}

// Where the connection of a caller may come from.
absl::StatusOr<std::vector<std::string>> HostsOf(const std::string& peer_host,
                                                 const v1::ConnectRequest& request,
                                                 const DataPlane& plane) {
  if (static_cast<std::size_t>(request.sources_size()) > kSourcesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.sources_size(), " sources, at most ", kSourcesMax));
  }
  std::vector<std::string> hosts;
  const bool is_here = peer_host.empty() || IsThisHost(peer_host);
  if (is_here) {
    // Connections within a host come from the address that they go to.
    hosts = plane.sources();
    for (const std::string& address : plane.addresses()) hosts.push_back(HostOf(address));
  }
  if (!peer_host.empty()) hosts.push_back(peer_host);
  for (const std::string& source : request.sources()) {
    if (!is_here && IsThisHost(source)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "source ", source, " is the daemon's host, and the caller's is ", peer_host));
    }
    hosts.push_back(source);
  }
  return hosts;
}

}  // namespace

grpc::Status DataService::Connect(grpc::ServerContext* call, const v1::ConnectRequest* request,
                                  v1::ConnectReply* reply) {
  return Answer(context_, *call, [&](const Caller& caller) -> absl::Status {
    if (plane_ == nullptr) {
      return absl::FailedPreconditionError(
          "this daemon has no data plane (it was started without --ucx)");
    }
    NodeIdentity::Id only_for{};
    if (request->node_id().size() != only_for.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("node_id of ", request->node_id().size(), " bytes, want ", only_for.size()));
    }
    std::copy_n(reinterpret_cast<const std::byte*>(request->node_id().data()), only_for.size(),
                only_for.begin());
    KVMILL_ASSIGN_OR_RETURN(const std::vector<std::string> hosts,
                            HostsOf(HostOfPeer(call->peer()), *request, *plane_));
    KVMILL_ASSIGN_OR_RETURN(
        const Offer offer, plane_->MakeOffer(caller, WhoIs(caller, call->peer()), only_for, hosts));
    for (const std::string& address : offer.addresses) reply->add_addresses(address);
    reply->set_node_id(ToString(offer.node.id));
    reply->set_incarnation(offer.node.incarnation);
    reply->set_key_id(ToString(offer.key_id));
    reply->set_key(ToString(offer.key));
    reply->set_plaintext(plane_->plaintext());
    for (const std::string& host : hosts) reply->add_admitted(host);
    for (const std::string& host : plane_->sources()) reply->add_sources(host);
    return absl::OkStatus();
  });
}

}  // namespace kvmill
