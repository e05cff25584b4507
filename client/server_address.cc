#include "client/server_address.h"

#include <sys/un.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kHostBytesMax = 253;  // Of a name in DNS.

bool IsHostCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_' ||
         c == ':' || c == '%';
}

}  // namespace

std::string HostPort::ToString() const {
  return is_ipv6() ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("address \"", absl::CEscape(text), "\": ", why,
                                                   "; want HOST:PORT or [IPV6]:PORT"));
  };
  absl::string_view host;
  absl::string_view port;
  if (const std::size_t scheme = text.find("://"); scheme != absl::string_view::npos) {
    return bad(absl::StrCat("leave out \"", absl::CEscape(text.substr(0, scheme + 3)), "\""));
  }
  if (absl::StartsWith(text, "[")) {
    const std::size_t end = text.find(']');
    if (end == absl::string_view::npos) return bad("no closing bracket");
    host = text.substr(1, end - 1);
    if (host.find(':') == absl::string_view::npos) return bad("no IPv6 address in the brackets");
    port = text.substr(end + 1);
    if (!absl::StartsWith(port, ":")) return bad("no port");
    port.remove_prefix(1);
  } else {
    const std::size_t colon = text.find(':');
    if (colon == absl::string_view::npos) return bad("no port");
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.find(':') != absl::string_view::npos) return bad("an IPv6 address needs brackets");
  }
  if (host.empty()) return bad("no host");
  if (host.size() > kHostBytesMax) {
    return bad(absl::StrCat("host of ", host.size(), " bytes, want at most ", kHostBytesMax));
  }
  for (const absl::string_view scheme : {"unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock"}) {
    // gRPC would take what follows for an address of that kind.
    if (host == scheme) return bad(absl::StrCat("\"", scheme, "\" is no host name"));
  }
  const auto odd = std::find_if_not(host.begin(), host.end(), IsHostCharacter);
  if (odd != host.end()) {
    return bad(absl::StrCat("\"", absl::CEscape(absl::string_view(&*odd, 1)),
                            "\" in the host: want letters, digits, '-', '.', '_', and ':' and '%' "
                            "in brackets"));
  }
  std::uint32_t number = 0;
  // Digits alone: SimpleAtoi would take a sign and spaces as well.
  if (port.empty() || port.size() > 5 ||
      !std::all_of(port.begin(), port.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(port, &number) || number > 65535) {
    return bad(absl::StrCat("port \"", absl::CEscape(port), "\" is not a number from 0 to 65535"));
  }
  HostPort result;
  result.host = std::string(host);
  result.port = static_cast<std::uint16_t>(number);
  return result;
}

std::string ServerAddress::ToString() const {
  return is_unix() ? absl::StrCat("unix:", unix_path) : tcp.ToString();
}

absl::StatusOr<ServerAddress> ParseServerAddress(absl::string_view text) {
  ServerAddress address;
  if (absl::StartsWith(text, "unix:")) {
    const absl::string_view path = text.substr(5);
    constexpr std::size_t kPathBytesMax = sizeof(sockaddr_un{}.sun_path) - 1;
    if (path.empty() || path.size() > kPathBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("address \"", text, "\": socket path of ",
                                                     path.size(), " bytes, want 1 to ",
                                                     kPathBytesMax));
    }
    address.unix_path = std::string(path);
    return address;
  }
  if (absl::StartsWith(text, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("address \"", text, "\": a unix socket is unix:", text));
  }
  KVMILL_ASSIGN_OR_RETURN(address.tcp, ParseHostPort(text));
  return address;
}

std::string DefaultSocketPath(absl::string_view xdg_runtime_dir) {
  if (xdg_runtime_dir.empty()) return "/run/kvmill/kvmill.sock";
  return absl::StrCat(xdg_runtime_dir, "/kvmill.sock");
}

}  // namespace kvmill
