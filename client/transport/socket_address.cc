#include "client/transport/socket_address.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvmill {

bool SocketAddress::is_wildcard() const {
  if (is_ipv6()) {
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    return std::memcmp(&v6->sin6_addr, &in6addr_any, sizeof(in6addr_any)) == 0;
  }
  return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == htonl(INADDR_ANY);
}

bool SocketAddress::is_loopback() const {
  if (is_ipv6()) {
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    return std::memcmp(&v6->sin6_addr, &in6addr_loopback, sizeof(in6addr_loopback)) == 0;
  }
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
}

std::uint16_t SocketAddress::port() const {
  return ntohs(is_ipv6() ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                         : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

SocketAddress SocketAddress::WithPort(std::uint16_t port) const {
  SocketAddress other = *this;
  if (is_ipv6()) {
    reinterpret_cast<sockaddr_in6*>(&other.storage)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(&other.storage)->sin_port = htons(port);
  }
  return other;
}

std::string SocketAddress::host() const {
  std::array<char, NI_MAXHOST> text;
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&storage), bytes, text.data(), text.size(),
                  nullptr, 0, NI_NUMERICHOST) != 0) {
    return "unknown";
  }
  return text.data();
}

std::string SocketAddress::ToString() const {
  return is_ipv6() ? absl::StrCat("[", host(), "]:", port()) : absl::StrCat(host(), ":", port());
}

absl::StatusOr<SocketAddress> ParseSocketAddress(absl::string_view text) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("address \"", text, "\": ", why, "; want a.b.c.d:PORT or [IPV6]:PORT"));
  };
  const bool brackets = !text.empty() && text.front() == '[';
  const std::size_t end = brackets ? text.find(']') : text.find(':');
  if (end == absl::string_view::npos) return bad(brackets ? "no closing bracket" : "no port");
  const std::string host(text.substr(brackets ? 1 : 0, brackets ? end - 1 : end));
  absl::string_view port = text.substr(brackets ? end + 1 : end);
  if (port.empty() || port.front() != ':') return bad("no port");
  port.remove_prefix(1);
  if (!brackets && port.find(':') != absl::string_view::npos) {
    return bad("an IPv6 address needs brackets");
  }
  std::uint32_t number = 0;
  if (port.empty() || port.size() > 5 || !absl::SimpleAtoi(port, &number) || number > 65535) {
    return bad("the port is not a number from 0 to 65535");
  }
  addrinfo hints{};
  hints.ai_family = brackets ? AF_INET6 : AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  if (host.empty() ||
      getaddrinfo(host.c_str(), std::to_string(number).c_str(), &hints, &found) != 0) {
    return bad("the host is not a numeric address");
  }
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.bytes = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

std::string InterfaceOf(const SocketAddress& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string found;
  for (const ifaddrs* i = all; i != nullptr && found.empty(); i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != address.storage.ss_family) continue;
    SocketAddress own;
    own.bytes = address.bytes;
    std::memcpy(&own.storage, i->ifa_addr, own.bytes);
    const bool same =
        address.is_ipv6()
            ? std::memcmp(&reinterpret_cast<const sockaddr_in6*>(&own.storage)->sin6_addr,
                          &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr,
                          sizeof(in6_addr)) == 0
            : reinterpret_cast<const sockaddr_in*>(&own.storage)->sin_addr.s_addr ==
                  reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr;
    // All of 127.0.0.0/8 is on one interface, which has one address of it.
    if (same || (own.is_loopback() && address.is_loopback())) found = i->ifa_name;
  }
  freeifaddrs(all);
  return found;
}

absl::StatusOr<SocketAddress> SourceTo(const SocketAddress& peer) {
  const absl::Status no_way =
      absl::UnavailableError(absl::StrCat("there is no way to ", peer.ToString()));
  // Connecting a datagram socket sends nothing: the kernel looks up the route.
  const int fd = socket(peer.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return no_way;
  SocketAddress own;
  own.bytes = sizeof(own.storage);
  const bool found =
      connect(fd, reinterpret_cast<const sockaddr*>(&peer.storage), peer.bytes) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&own.storage), &own.bytes) == 0;
  close(fd);
  if (!found) return no_way;
  return own;
}

std::string InterfaceTo(const SocketAddress& peer) {
  const absl::StatusOr<SocketAddress> own = SourceTo(peer);
  return own.ok() ? InterfaceOf(*own) : "";
}

}  // namespace kvmill
