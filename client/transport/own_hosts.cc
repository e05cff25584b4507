#include "client/transport/own_hosts.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "client/transport/host_filter.h"
#include "client/transport/socket_address.h"

namespace kvmill {
namespace {

void VisitInterfaces(const std::function<void(const ifaddrs&, const std::string& host)>& visit) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t bytes = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    std::array<char, NI_MAXHOST> host;
    if (getnameinfo(i->ifa_addr, bytes, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) ==
        0) {
      visit(*i, host.data());
    }
  }
  freeifaddrs(all);
}

void AddOnce(std::string host, std::vector<std::string>* hosts) {
  if (host.empty() || hosts->size() >= kSourcesMax) return;
  if (std::find(hosts->begin(), hosts->end(), host) == hosts->end()) {
    hosts->push_back(std::move(host));
  }
}

}  // namespace

std::string HostOf(absl::string_view address) {
  const absl::StatusOr<SocketAddress> parsed = ParseSocketAddress(address);
  return parsed.ok() ? parsed->host() : "";
}

bool IsThisHost(absl::string_view host) {
  const absl::StatusOr<HostAddress> wanted = ParseHost(host);
  if (!wanted.ok()) return false;
  if (wanted->is_loopback()) return true;
  bool found = false;
  VisitInterfaces([&](const ifaddrs&, const std::string& own) {
    const absl::StatusOr<HostAddress> address = ParseHost(own);
    found |= address.ok() && *address == *wanted;
  });
  return found;
}

std::string SourceTowards(absl::string_view address) {
  const absl::StatusOr<SocketAddress> peer = ParseSocketAddress(address);
  if (!peer.ok()) return "";
  const absl::StatusOr<SocketAddress> own = SourceTo(*peer);
  return own.ok() ? own->host() : "";
}

std::vector<std::string> HostsOfInterfaces(const std::set<std::string>& interfaces, bool ipv6) {
  std::vector<std::string> hosts;
  VisitInterfaces([&](const ifaddrs& interface, const std::string& host) {
    if ((interface.ifa_addr->sa_family == AF_INET6) != ipv6) return;
    if (!interfaces.empty() && interfaces.count(interface.ifa_name) == 0) return;
    if (host.find('%') == std::string::npos) AddOnce(host, &hosts);
  });
  return hosts;
}

std::vector<std::string> SourcesTowards(const std::vector<std::string>& addresses) {
  std::vector<std::string> hosts;
  std::set<std::pair<std::string, bool>> interfaces;
  for (const std::string& address : addresses) {
    AddOnce(SourceTowards(address), &hosts);
    const absl::StatusOr<SocketAddress> peer = ParseSocketAddress(address);
    if (peer.ok()) interfaces.emplace(InterfaceTo(*peer), peer->is_ipv6());
  }
  for (const auto& [interface, ipv6] : interfaces) {
    if (interface.empty()) continue;
    for (std::string& host : HostsOfInterfaces({interface}, ipv6)) AddOnce(std::move(host), &hosts);
  }
  return hosts;
}

}  // namespace kvmill
