#include "client/transport/port_guard.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/transport/socket_address.h"
#include "client/transport/transport.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

int IntOption(int fd, int option) {
  int value = -1;
  socklen_t bytes = sizeof(value);
  return getsockopt(fd, SOL_SOCKET, option, &value, &bytes) == 0 ? value : -1;
}

struct FoundSocket {
  int fd = -1;  // The caller's only if it says so by taking it.
  ino_t inode = 0;
  bool listens = false;
};

// Every TCP socket of this process whose own port is `port`. `visit` is given a duplicate, which
// stays the same socket whatever other threads do, and returns whether it keeps that.
void VisitSockets(std::uint16_t port, const std::function<bool(const FoundSocket&)>& visit) {
  std::error_code error;
  std::vector<int> descriptors;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    if (absl::SimpleAtoi(entry.path().filename().string(), &fd)) descriptors.push_back(fd);
  }
  for (const int fd : descriptors) {
    FoundSocket found;
    found.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (found.fd < 0) continue;
    SocketAddress own;
    own.bytes = sizeof(own.storage);
    struct stat status {};
    bool kept = false;
    if (IntOption(found.fd, SO_PROTOCOL) == IPPROTO_TCP &&
        getsockname(found.fd, reinterpret_cast<sockaddr*>(&own.storage), &own.bytes) == 0 &&
        own.port() == port && fstat(found.fd, &status) == 0) {
      found.inode = status.st_ino;
      found.listens = IntOption(found.fd, SO_ACCEPTCONN) == 1;
      kept = visit(found);
    }
    if (!kept) close(found.fd);
  }
}

// Connections that nobody has accepted yet.
std::uint32_t WaitingConnections(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 ? info.tcpi_unacked : 0;
}

// Whether UCX could bind it, which does so without SO_REUSEADDR. The port itself, or 0.
std::uint16_t TryPort(bool ipv6, std::uint16_t port) {
  const int fd = socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return 0;
  SocketAddress address;
  if (ipv6) {
    const int on = 1;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.bytes = sizeof(*v6);
  } else {
    auto* const v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.bytes = sizeof(*v4);
  }
  auto* const plain = reinterpret_cast<sockaddr*>(&address.storage);
  const bool bound =
      bind(fd, plain, address.bytes) == 0 && getsockname(fd, plain, &address.bytes) == 0;
  close(fd);
  return bound ? address.port() : 0;
}

}  // namespace

std::set<ino_t> ListenersOn(std::uint16_t port) {
  std::set<ino_t> inodes;
  VisitSockets(port, [&](const FoundSocket& found) {
    if (found.listens) inodes.insert(found.inode);
    return false;
  });
  return inodes;
}

absl::StatusOr<std::uint16_t> FreePort(bool ipv6, std::uint16_t first, std::uint16_t last) {
  for (std::uint32_t port = first; port <= last; ++port) {
    const std::uint16_t free = TryPort(ipv6, static_cast<std::uint16_t>(port));
    if (free != 0) return free;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("no free TCP port from ", first, " to ", last, ": ", std::strerror(errno)));
}

PortGuard::~PortGuard() {
  MutexLock lock(mu_);
  for (const Socket& socket : sockets_) close(socket.fd);
}

absl::Status PortGuard::LetIn(const std::vector<HostAddress>& hosts, Socket* socket) {
  if (socket->filters) {
    const absl::Status status = AttachHostFilter(socket->fd, HostFilterProgram(hosts));
    if (!absl::IsPermissionDenied(status)) return status;
    socket->filters = false;
  }
  std::set<HostRange> ranges = AllBut(hosts, socket->ipv6);
  // IPv4 comes to a socket of IPv6 as well, unless it is bound to an address of that.
  if (socket->ipv6) ranges.insert(HostRange{});
  KVMILL_RETURN_IF_ERROR(DemandSignatures(socket->fd, socket->ranges, ranges));
  socket->ranges = std::move(ranges);
  return absl::OkStatus();
}

absl::Status PortGuard::Shut(std::uint16_t port, const std::set<ino_t>& others) {
  MutexLock lock(mu_);
  std::set<ino_t> shut = others;  // Also descriptors of a socket that was seen already.
  absl::Status status = absl::NotFoundError(
      absl::StrCat("no socket of this process listens on port ", port, ", where UCX should"));
  bool early = false;
  std::vector<Socket> sockets;
  VisitSockets(port, [&](const FoundSocket& found) {
    if (!found.listens || !shut.insert(found.inode).second) return false;
    if (absl::IsNotFound(status)) status = absl::OkStatus();
    sockets.push_back({.fd = found.fd, .ipv6 = IntOption(found.fd, SO_DOMAIN) == AF_INET6});
    return true;
  });
  for (Socket& socket : sockets) {
    status.Update(LetIn(hosts_, &socket));
    early |= WaitingConnections(socket.fd) > 0;
    sockets_.push_back(std::move(socket));
  }
  KVMILL_RETURN_IF_ERROR(status);
  VisitSockets(port, [&](const FoundSocket& found) {
    early |= !found.listens;
    return false;
  });
  if (!early) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("somebody connected to port ", port, " before it was shut to strangers"));
}

absl::Status PortGuard::Admit(const std::vector<std::string>& hosts) {
  std::vector<HostAddress> addresses;
  for (const std::string& host : hosts) {
    KVMILL_ASSIGN_OR_RETURN(const HostAddress address, ParseHost(host));
    if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) {
      addresses.push_back(address);
    }
  }
  if (addresses.size() > kAdmittedHostsMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        addresses.size(), " hosts to admit to the data plane, at most ", kAdmittedHostsMax));
  }
  MutexLock lock(mu_);
  for (std::size_t i = 0; i < sockets_.size(); ++i) {
    const absl::Status status = LetIn(addresses, &sockets_[i]);
    if (status.ok()) continue;
    // Nothing changes: what was replaced goes back, which found room before.
    while (i-- > 0) LetIn(hosts_, &sockets_[i]).IgnoreError();
    return status;
  }
  hosts_ = std::move(addresses);
  return absl::OkStatus();
}

}  // namespace kvmill
