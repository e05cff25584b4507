// Which hosts may reach a TCP socket, as a program that the kernel runs on every packet that comes
// to it (classic BPF). Attached to a listening socket it drops the first
// packet of a stranger: no connection comes about, and whoever reads the socket learns nothing.
// Sockets that are accepted have the program that their listener had. Internal to
// client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_HOST_FILTER_H_
#define KVMILL_CLIENT_TRANSPORT_HOST_FILTER_H_

#include <linux/filter.h>

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmill {

struct HostAddress {
  bool ipv6 = false;
  // As numbers, the most significant first; IPv4 has the last one only.
  std::array<std::uint32_t, 4> words{};

  bool is_loopback() const;
  friend bool operator==(const HostAddress&, const HostAddress&) = default;
};

// "a.b.c.d", or IPv6 with or without brackets and zone, which is ignored; an IPv4 address that is
// written as IPv6 is IPv4. INVALID_ARGUMENT naming the text: not numeric, a wildcard, or multicast.
absl::StatusOr<HostAddress> ParseHost(absl::string_view text);

// The program for up to kAdmittedHostsMax hosts, in any order: packets of other hosts are dropped,
// and what is neither IPv4 nor IPv6. No hosts: all packets.
std::vector<sock_filter> HostFilterProgram(std::vector<HostAddress> hosts);

// Replaces the socket's program, at once. RESOURCE_EXHAUSTED when the kernel has no room for it,
// PERMISSION_DENIED when it takes programs for TCP from privileged processes only, as newer ones do
// (CAP_NET_ADMIN), UNAVAILABLE with its reason otherwise.
absl::Status AttachHostFilter(int fd, const std::vector<sock_filter>& program);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_HOST_FILTER_H_
