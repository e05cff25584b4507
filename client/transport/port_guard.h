// Shuts the TCP ports that UCX listens on to all hosts but those that are admitted. UCX does not
// give its sockets away: they are found among the descriptors of this process by their port, which
// therefore has to be known. By a filter where the kernel takes one, else by signatures. Internal
// to client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_PORT_GUARD_H_
#define KVMILL_CLIENT_TRANSPORT_PORT_GUARD_H_

#include <sys/types.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport/host_filter.h"
#include "client/transport/host_signatures.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Sockets of this process that listen for TCP on `port`, by inode.
std::set<ino_t> ListenersOn(std::uint16_t port);

// A port that nobody in the host uses, on any address of the family: the first one from `first` to
// `last`, or of the system's choice where both are 0. Somebody may take it meanwhile.
// RESOURCE_EXHAUSTED naming the range.
absl::StatusOr<std::uint16_t> FreePort(bool ipv6, std::uint16_t first, std::uint16_t last);

// Thread-safe.
class PortGuard {
 public:
  PortGuard() = default;
  PortGuard(const PortGuard&) = delete;
  PortGuard& operator=(const PortGuard&) = delete;
  // The ports close with the sockets, and these are held here, too: destroy it before UCX.
  ~PortGuard();

  // The sockets that listen on `port`, except those of `others`, take packets of admitted hosts
  // only: none so far. NOT_FOUND: there is none. ABORTED: somebody connected before, so that it
  // must be opened anew. Otherwise as AttachHostFilter and DemandSignatures.
  absl::Status Shut(std::uint16_t port, const std::set<ino_t>& others);

  // From now on these hosts and no others; what is connected stays so. As Transport::Admit.
  absl::Status Admit(const std::vector<std::string>& hosts);

 private:
  struct Socket {
    int fd = -1;  // A duplicate.
    bool ipv6 = false;
    bool filters = true;  // Else signatures, of these.
    std::set<HostRange> ranges = {};
  };
  static absl::Status LetIn(const std::vector<HostAddress>& hosts, Socket* socket);

  Mutex mu_;
  std::vector<Socket> sockets_ ABSL_GUARDED_BY(mu_);
  std::vector<HostAddress> hosts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_PORT_GUARD_H_
