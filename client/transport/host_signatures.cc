#include "client/transport/host_signatures.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "client/transport/cryptography.h"

namespace kvmill {
namespace {

std::uint32_t* WordOf(HostRange* range, unsigned bit) {
  return &range->words[range->ipv6 ? bit / 32 : 3];
}

bool BitOf(const HostAddress& host, unsigned bit) {
  return (host.words[host.ipv6 ? bit / 32 : 3] >> (31 - bit % 32) & 1) != 0;
}

// `hosts` are in `range`.
void Add(const HostRange& range, const std::vector<HostAddress>& hosts,
         std::set<HostRange>* ranges) {
  if (hosts.empty()) {
    ranges->insert(range);
    return;
  }
  if (range.bits == (range.ipv6 ? 128u : 32u)) return;
  for (const bool upper : {false, true}) {
    HostRange half = range;
    ++half.bits;
    if (upper) *WordOf(&half, range.bits) |= std::uint32_t{1} << (31 - range.bits % 32);
    std::vector<HostAddress> inside;
    std::copy_if(hosts.begin(), hosts.end(), std::back_inserter(inside),
                 [&](const HostAddress& host) { return BitOf(host, range.bits) == upper; });
    Add(half, inside, ranges);
  }
}

bool Set(int fd, const HostRange& range, bool demand) {
  tcp_md5sig option{};
  if (range.ipv6) {
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&option.tcpm_addr);
    v6->sin6_family = AF_INET6;
    for (std::size_t i = 0; i < range.words.size(); ++i) {
      const std::uint32_t word = htonl(range.words[i]);
      std::memcpy(v6->sin6_addr.s6_addr + 4 * i, &word, sizeof(word));
    }
  } else {
    auto* const v4 = reinterpret_cast<sockaddr_in*>(&option.tcpm_addr);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(range.words[3]);
  }
  option.tcpm_flags = TCP_MD5SIG_FLAG_PREFIX;
  option.tcpm_prefixlen = static_cast<std::uint8_t>(range.bits);
  if (demand) {
    option.tcpm_keylen = sizeof(option.tcpm_key);
    RandomBytes({reinterpret_cast<std::byte*>(option.tcpm_key), sizeof(option.tcpm_key)});
  }
  return setsockopt(fd, IPPROTO_TCP, TCP_MD5SIG_EXT, &option, sizeof(option)) == 0;
}

}  // namespace

std::set<HostRange> AllBut(const std::vector<HostAddress>& hosts, bool ipv6) {
  std::vector<HostAddress> of_family;
  std::copy_if(hosts.begin(), hosts.end(), std::back_inserter(of_family),
               [&](const HostAddress& host) { return host.ipv6 == ipv6; });
  std::set<HostRange> ranges;
  Add({.ipv6 = ipv6, .words = {}, .bits = 0}, of_family, &ranges);
  return ranges;
}

absl::Status DemandSignatures(int fd, const std::set<HostRange>& had,
                              const std::set<HostRange>& wanted) {
  std::vector<HostRange> added;
  for (const HostRange& range : wanted) {
    if (had.count(range) > 0) continue;
    if (Set(fd, range, true)) {
      added.push_back(range);
      continue;
    }
    const int error = errno;
    for (const HostRange& back : added) Set(fd, back, false);
    const std::string why =
        absl::StrCat(wanted.size(), " signatures to demand of hosts: ", std::strerror(error));
    if (error != ENOMEM) return absl::UnavailableError(why);
    return absl::ResourceExhaustedError(absl::StrCat(
        why, ": see net.core.optmem_max, or give the process CAP_NET_ADMIN for another way"));
  }
  for (const HostRange& range : had) {
    if (wanted.count(range) == 0) Set(fd, range, false);
  }
  return absl::OkStatus();
}

}  // namespace kvmill
