// Who is behind a connection of the local socket, and who may call Admin.
#ifndef KVMILL_SERVICE_LOCAL_PEERS_H_
#define KVMILL_SERVICE_LOCAL_PEERS_H_

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Connections of the local socket by file descriptor. gRPC owns the descriptors after the hand-over
// and names the peer of a call "fd:N"; a descriptor is not reused while a call on it lives, so the
// newest entry of N is right. Bounded by the number of descriptors. Thread-safe.
class LocalPeers {
 public:
  void Connected(int fd, uid_t uid);
  // `peer` as grpc::ServerContextBase::peer() gives it; nothing when it is not a local connection.
  std::optional<uid_t> UidOf(absl::string_view peer) const;

 private:
  mutable Mutex mu_;
  std::map<int, uid_t> uids_ ABSL_GUARDED_BY(mu_);
};

// Decides about Admin calls of one server. Thread-safe.
class AdminGate {
 public:
  // The main server: only local connections of `own_uid` and root.
  AdminGate(const LocalPeers& peers, uid_t own_uid) : peers_(&peers), own_uid_(own_uid) {}
  // The --admin listener: whoever is an administrator.
  AdminGate() = default;

  // PERMISSION_DENIED says where admin calls are allowed, and for whom. `admin`: of the caller.
  absl::Status Check(const std::string& peer, bool admin) const;

 private:
  const LocalPeers* peers_ = nullptr;
  uid_t own_uid_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOCAL_PEERS_H_
