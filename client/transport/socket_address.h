// Numeric socket addresses, "a.b.c.d:port" and "[v6]:port". Internal to client/transport/.
#ifndef KVMILL_CLIENT_TRANSPORT_SOCKET_ADDRESS_H_
#define KVMILL_CLIENT_TRANSPORT_SOCKET_ADDRESS_H_

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmill {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  bool is_wildcard() const;
  bool is_loopback() const;
  std::uint16_t port() const;
  SocketAddress WithPort(std::uint16_t port) const;
  std::string host() const;  // Without port and brackets.
  std::string ToString() const;
};

// INVALID_ARGUMENT naming the text. No names: looking one up would block the transport's thread.
absl::StatusOr<SocketAddress> ParseSocketAddress(absl::string_view text);

// The network interface ("eth0") that has this address; empty when none has.
std::string InterfaceOf(const SocketAddress& address);
// The address that connections to `peer` come from. UNAVAILABLE when there is no way.
absl::StatusOr<SocketAddress> SourceTo(const SocketAddress& peer);
// The interface that has it; empty when there is no way.
std::string InterfaceTo(const SocketAddress& peer);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_SOCKET_ADDRESS_H_
