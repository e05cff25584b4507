// Who makes a gRPC call on the main server: through the local door, or over TCP.
#ifndef KVMILL_SERVICE_CALLERS_H_
#define KVMILL_SERVICE_CALLERS_H_

#include <grpcpp/server_context.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/request_context.h"
#include "service/identities.h"
#include "service/local_door.h"
#include "service/local_peers.h"
#include "service/tenants.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Of a local client: kDefaultTenant, or "uid-N".
std::string TenantOf(uid_t uid, uid_t own_uid);

// The numeric host of a peer as gRPC names it ("ipv4:a.b.c.d:port", "ipv6:%5Bv6%5D:port"); empty
// when it has none, as a unix socket.
std::string HostOfPeer(absl::string_view peer);

struct Caller {
  std::string tenant;
  DoorClientId door_client = 0;  // 0: not local.
  bool node = false;             // Of the cluster.
  bool admin = false;            // On the --admin listener.
  RequestPtr request{};          // For which it calls; null in tests without a call.
  // Runs the daemon, or is trusted with all of it: sees totals over all tenants.
  bool sees_all() const { return tenant == kDefaultTenant; }
};

// Thread-safe.
class Callers {
 public:
  // `identities`: of those who come over TCP.
  Callers(const LocalPeers& peers, const LocalDoor& door, uid_t own_uid,
          Identities identities = Identities())
      : peers_(peers),
        door_(door),
        own_uid_(own_uid),
        identities_(std::make_shared<const Identities>(std::move(identities))) {}

  // UNAUTHENTICATED: a call on the socket without the token of the door, or with one that this
  // daemon does not know (any more). PERMISSION_DENIED: with the token of another user. Over TCP
  // as Identities::Identify.
  absl::StatusOr<Caller> Identify(const grpc::ServerContextBase& call) const;
  // Of a local caller the same with what the call carries: its token ("" without).
  absl::StatusOr<Caller> IdentifyLocal(uid_t uid, absl::string_view token_hex) const;

  // Who comes over TCP, of calls that begin from now on. A call that runs goes on.
  void SetIdentities(Identities identities) {
    auto made = std::make_shared<const Identities>(std::move(identities));
    MutexLock lock(mu_);
    identities_.swap(made);
  }
  std::shared_ptr<const Identities> identities() const {
    MutexLock lock(mu_);
    return identities_;
  }

 private:
  const LocalPeers& peers_;
  const LocalDoor& door_;
  const uid_t own_uid_;
  mutable Mutex mu_;
  // Shared with the calls that are looking somebody up in it.
  std::shared_ptr<const Identities> identities_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CALLERS_H_
