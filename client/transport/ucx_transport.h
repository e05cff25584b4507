// The Transport between hosts: UCX (UCP) active messages, with error handling always on.
//
// UCX chooses the networks: RDMA where it finds some, TCP always among them, so that there is a way
// left when the rest fails. Peers are dialed at addresses that this process listens on; UCX may
// open further TCP connections between the same two hosts, on ports that it picks
// (UCX_TCP_PORT_RANGE).
//
// UCX itself trusts everybody who reaches those ports: what it exchanges before our handshake and
// beside our messages is not authenticated, and its TCP transport lets a peer that speaks UCX's
// protocol name memory of this process. The ports must be reachable by the nodes of the cluster
// alone (a network policy or a private network), encrypted or not.
//
// UCX reads its own environment variables (UCX_…) when the transport is made.
#ifndef KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
#define KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/transport/transport.h"

namespace kvmill {

// What is expected of RDMA. A connection that has only TCP although RDMA was expected is logged,
// and marked in its ConnectionInfo.
enum class RdmaUse : std::uint8_t {
  kAuto,      // Expected when this host has a device for it.
  kNever,     // Not expected.
  kExpected,  // Expected, whatever this host has.
  kRequired,  // A connection without it is refused, FAILED_PRECONDITION.
};

enum class AddressFamily : std::uint8_t { kIpv4, kIpv6 };

struct UcxOptions {
  // "a.b.c.d:port" or "[v6]:port", numeric; port 0 lets the system choose. Empty: dials only.
  std::vector<std::string> listen;
  // Addresses, like those of `listen`, that will be dialed.
  std::vector<std::string> dial;
  // UCX 1.13 uses one family per process: what `listen` has and what is dialed must be of it. The
  // IPv6 loopback address is not among what it can use.
  AddressFamily family = AddressFamily::kIpv4;
  // What offers say instead of the listening addresses: hosts without ports, as many as `listen`
  // has. Needed where `listen` has a wildcard.
  std::vector<std::string> advertise;
  RdmaUse rdma = RdmaUse::kAuto;
  // UCX's list of transports (UCX_TLS), for example "tcp" or "rc,ud". tcp is added. Empty: what the
  // environment says, or all.
  std::string tls;
  // Further UCX settings, which win over the defaults of this library: names of UCP as UCX
  // documents them but without "UCX_" ({"NET_DEVICES", "eth0"}), names of its transports also
  // without theirs
  // ({"TX_SEG_SIZE", "64k"} for UCX_TCP_TX_SEG_SIZE). UCX warns of those that it does not know.
  std::vector<std::pair<std::string, std::string>> settings;
};

// UCX listens for data on every interface that it uses, and anybody who reaches such a port can end
// the process and worse (decision 0013). So on a host without RDMA only the interfaces of `listen`
// and those that lead to `dial` are used, unless the settings or the environment name others
// (NET_DEVICES), or `listen` has a wildcard, or both are empty.
//
// INVALID_ARGUMENT for bad options and addresses; FAILED_PRECONDITION when UCX has no TCP here;
// UNAVAILABLE when an address cannot be listened on, naming it.
absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const TransportOptions& options,
                                                            const UcxOptions& ucx);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
