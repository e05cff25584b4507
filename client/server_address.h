// Where a daemon listens: unix:PATH, HOST:PORT, [v6]:PORT. Pure functions.
#ifndef KVMILL_CLIENT_SERVER_ADDRESS_H_
#define KVMILL_CLIENT_SERVER_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmill {

struct HostPort {
  std::string host;  // Without brackets; never empty.
  std::uint16_t port = 0;

  bool is_ipv6() const { return host.find(':') != std::string::npos; }
  // "host:port", with brackets around an IPv6 address.
  std::string ToString() const;
};

// INVALID_ARGUMENT naming the text: an IPv6 address without brackets, no port, a port above 65535.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

struct ServerAddress {
  std::string unix_path;  // Empty for TCP.
  HostPort tcp;

  bool is_unix() const { return !unix_path.empty(); }
  std::string ToString() const;
};

// INVALID_ARGUMENT as above, for an empty path, and for one longer than a socket address holds.
absl::StatusOr<ServerAddress> ParseServerAddress(absl::string_view text);

// $XDG_RUNTIME_DIR/kvmill.sock when the variable's value is not empty, else
// /run/kvmill/kvmill.sock. `main` reads the variable.
std::string DefaultSocketPath(absl::string_view xdg_runtime_dir);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_SERVER_ADDRESS_H_
