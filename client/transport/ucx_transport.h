// The Transport between hosts: UCX (UCP) active messages, with error handling always on.
//
// UCX chooses the networks: RDMA where it finds some, TCP always among them, so that there is a way
// left when the rest fails. Peers are dialed at addresses that this process listens on; UCX
// opens further TCP connections between the same two hosts, to a data port that each process has.
//
// UCX itself trusts everybody who reaches those ports: what it exchanges before our handshake and
// beside our messages is not authenticated, and its TCP transport lets a peer that speaks UCX's
// protocol name memory of this process, or end it. So only_admitted.
//
// UCX reads its own environment variables (UCX_…) when the transport is made.
#ifndef KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
#define KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/transport/rdma_use.h"
#include "client/transport/transport.h"

namespace kvmill {

enum class AddressFamily : std::uint8_t { kIpv4, kIpv6 };

// Several, since after a crash the system keeps a port that had connections for a minute.
inline constexpr std::uint16_t kDataPortsMax = 15;

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
  // The kernel drops what comes to UCX's TCP ports from hosts that Transport::Admit did not name;
  // at first that is all of them. Whoever else is on an admitted host is admitted, too, and RDMA is
  // not covered. What listens is the port of `listen`, which then has one address at most, and for
  // data the first free one of the kDataPortsMax that follow; without `listen`, and with port 0,
  // ports that the system chose. UCX_TCP_PORT_RANGE, where it is set, says where to look for the
  // data port instead. UCX_TCP_CM_REUSEADDR=y lets a port be listened on again soon after a crash.
  bool only_admitted = false;
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

// UCX listens for data on every interface that it uses. So on a host without RDMA only the
// interfaces of `listen` and those that lead to `dial` are used, unless the settings or the
// environment name others (NET_DEVICES), or `listen` has a wildcard, or both are empty.
//
// INVALID_ARGUMENT for bad options and addresses; FAILED_PRECONDITION when UCX has no TCP here, or
// no RDMA and it is required, naming what it has; UNAVAILABLE when an address cannot be listened
// on, naming it, or not be shut to strangers.
absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const TransportOptions& options,
                                                            const UcxOptions& ucx);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
