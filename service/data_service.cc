#include "service/data_service.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/answer.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

template <std::size_t kBytes>
std::string ToString(const std::array<std::byte, kBytes>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// A local client is one caller, and so is a host that comes over TCP, whatever its ports.
std::string WhoIs(const Caller& caller, const std::string& peer) {
  if (caller.door_client != 0) return absl::StrCat("local ", caller.door_client);
  return peer.substr(0, peer.rfind(':'));
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
    KVMILL_ASSIGN_OR_RETURN(const Offer offer,
                            plane_->MakeOffer(caller, WhoIs(caller, call->peer()), only_for));
    for (const std::string& address : offer.addresses) reply->add_addresses(address);
    reply->set_node_id(ToString(offer.node.id));
    reply->set_incarnation(offer.node.incarnation);
    reply->set_key_id(ToString(offer.key_id));
    reply->set_key(ToString(offer.key));
    reply->set_plaintext(plane_->plaintext());
    return absl::OkStatus();
  });
}

}  // namespace kvmill
