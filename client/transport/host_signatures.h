// Which hosts may reach a TCP socket, without any privilege: from all the others the kernel demands
// signatures (TCP-MD5, RFC 2385) with a key that nobody knows. For kernels that take the filters of
// host_filter.h only from processes with CAP_NET_ADMIN. A key covers a range of addresses, so that
// it takes up to 32 keys for each IPv4 host that is let in, 128 for IPv6. Sockets that are accepted
// demand nothing. Internal to client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_HOST_SIGNATURES_H_
#define KVMILL_CLIENT_TRANSPORT_HOST_SIGNATURES_H_

#include <compare>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "client/transport/host_filter.h"

namespace kvmill {

// The addresses whose first `bits` are those of `words` (IPv4: of the last word).
struct HostRange {
  bool ipv6 = false;
  std::array<std::uint32_t, 4> words{};
  unsigned bits = 0;
  friend auto operator<=>(const HostRange&, const HostRange&) = default;
};

// What is left of the family without `hosts`, as few ranges as possible. Hosts of the other family
// are ignored.
std::set<HostRange> AllBut(const std::vector<HostAddress>& hosts, bool ipv6);

// `had` is what the socket demands signatures of, `wanted` what it shall. At no time less than what
// is in both. Nothing changes on an error: RESOURCE_EXHAUSTED when the kernel has no room,
// UNAVAILABLE with its reason.
absl::Status DemandSignatures(int fd, const std::set<HostRange>& had,
                              const std::set<HostRange>& wanted);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_HOST_SIGNATURES_H_
