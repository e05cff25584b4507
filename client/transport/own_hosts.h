// The addresses of this host, as those have to know them who admit it (Transport::Admit). Hosts are
// numeric addresses without port and brackets.
#ifndef KVMILL_CLIENT_TRANSPORT_OWN_HOSTS_H_
#define KVMILL_CLIENT_TRANSPORT_OWN_HOSTS_H_

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvmill {

// More are not named to anybody: a host has a few.
inline constexpr std::size_t kSourcesMax = 8;

// Of "a.b.c.d:port" or "[v6]:port"; empty when it is neither.
std::string HostOf(absl::string_view address);

// A loopback address, or one of an interface here.
bool IsThisHost(absl::string_view host);

// The address that connections to `address` ("a.b.c.d:port", "[v6]:port") come from; empty when
// there is no way.
std::string SourceTowards(absl::string_view address);

// The addresses of these interfaces ("eth0"), of all when there are none, of one family; without
// link-local ones, up to kSourcesMax.
std::vector<std::string> HostsOfInterfaces(const std::set<std::string>& interfaces, bool ipv6);

// Where connections to `addresses` come from: SourceTowards each, then the other addresses of
// the same interfaces and family, since UCX chooses among them. Up to kSourcesMax.
std::vector<std::string> SourcesTowards(const std::vector<std::string>& addresses);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_OWN_HOSTS_H_
