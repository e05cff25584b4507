#include "service/local_peers.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvmill {

void LocalPeers::Connected(int fd, uid_t uid) {
  MutexLock lock(mu_);
  uids_[fd] = uid;
}

std::optional<uid_t> LocalPeers::UidOf(absl::string_view peer) const {
  int fd = -1;
  if (!absl::StartsWith(peer, "fd:") || !absl::SimpleAtoi(peer.substr(3), &fd)) return std::nullopt;
  MutexLock lock(mu_);
  const auto it = uids_.find(fd);
  if (it == uids_.end()) return std::nullopt;
  return it->second;
}

absl::Status AdminGate::Check(const std::string& peer, bool admin) const {
  if (peers_ == nullptr) {
    if (admin) return absl::OkStatus();
    return absl::PermissionDeniedError(
        "admin calls are for nodes, and for tenants with admin: true in --tenants");
  }
  const std::optional<uid_t> uid = peers_->UidOf(peer);
  if (!uid.has_value()) {
    return absl::PermissionDeniedError(
        "admin calls are not served on --listen: use --admin or the daemon's socket");
  }
  if (*uid != own_uid_ && *uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat("admin calls on the socket are for uid ",
                                                    own_uid_, " and root, not for uid ", *uid));
  }
  return absl::OkStatus();
}

}  // namespace kvmill
