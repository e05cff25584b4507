#include "service/callers.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/convert.h"
#include "client/door_protocol.h"
#include "service/certificate_names.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

absl::string_view MetadataOf(const grpc::ServerContextBase& call, const char* key) {
  const auto it = call.client_metadata().find(key);
  if (it == call.client_metadata().end()) return "";
  return absl::string_view(it->second.data(), it->second.size());
}

Credentials ShownBy(const grpc::ServerContextBase& call) {
  Credentials shown;
  shown.authorization = std::string(MetadataOf(call, kTokenMetadata));
  shown.names = CertificateNames(call);
  return shown;
}

}  // namespace

std::string TenantOf(uid_t uid, uid_t own_uid) {
  if (uid == own_uid || uid == 0) return kDefaultTenant;
  return absl::StrCat(kLocalTenantPrefix, uid);
}

std::string HostOfPeer(absl::string_view peer) {
  std::string text(peer);
  for (const auto& [written, meant] : {std::pair("%5B", "["), {"%5D", "]"}, {"%25", "%"}}) {
    text = absl::StrReplaceAll(text, {{written, meant}});
  }
  const std::size_t begin = text.find(':');
  const std::size_t end = text.rfind(':');
  if (begin == text.npos || begin == end) return "";
  const std::string scheme = text.substr(0, begin);
  if (scheme != "ipv4" && scheme != "ipv6") return "";
  std::string host = text.substr(begin + 1, end - begin - 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return host;
}

absl::StatusOr<Caller> Callers::Identify(const grpc::ServerContextBase& call) const {
  if (const std::optional<uid_t> uid = peers_.UidOf(call.peer()); uid.has_value()) {
    return IdentifyLocal(*uid, MetadataOf(call, kDoorTokenMetadata));
  }
  KVMILL_ASSIGN_OR_RETURN(const Identities::Identity identity,
                          identities()->Identify(ShownBy(call)));
  return Caller{identity.tenant, 0, identity.node, identity.admin, nullptr};
}

absl::StatusOr<Caller> Callers::IdentifyLocal(uid_t uid, absl::string_view token_hex) const {
  if (token_hex.empty()) {
    return absl::UnauthenticatedError(
        absl::StrCat("a call on the daemon's socket needs the token of its local door: connect to "
                     "the socket with .door behind its path and send the token as metadata ",
                     kDoorTokenMetadata, " (kvmill's client library does)"));
  }
  const std::optional<LocalDoor::Guest> guest = door_.FindToken(token_hex);
  if (!guest.has_value()) {
    return absl::UnauthenticatedError(
        "the token is not one of this daemon's local door: the connection to the door ended, or "
        "the daemon was restarted; connect to the door again");
  }
  if (guest->uid != uid) {
    return absl::PermissionDeniedError(absl::StrCat("the token of the local door belongs to uid ",
                                                    guest->uid, ", the call comes from uid ", uid));
  }
  return Caller{TenantOf(guest->uid, own_uid_), guest->client};
}

}  // namespace kvmill
