#include "client/transport/host_filter.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "storage/core/check.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kAccept = 0xFFFFFFFF;  // The whole packet.
constexpr std::uint32_t kDrop = 0;
constexpr std::size_t kLast = 3;  // The word that differs most from host to host.
constexpr std::size_t kLeafHosts = 8;

class Program {
 public:
  void Emit(unsigned code, std::uint32_t value, std::uint8_t if_true = 0,
            std::uint8_t if_false = 0) {
    code_.push_back({static_cast<std::uint16_t>(code), if_true, if_false, value});
  }
  void LoadFromNetworkHeader(unsigned width, std::uint32_t offset) {
    Emit(BPF_LD | width | BPF_ABS, static_cast<std::uint32_t>(SKF_NET_OFF) + offset);
  }
  void Return(std::uint32_t value) { Emit(BPF_RET | BPF_K, value); }
  // Jumps to where Land is called. Conditional jumps only reach 255 instructions, this one all.
  std::size_t Jump() {
    Emit(BPF_JMP | BPF_JA, 0);
    return code_.size() - 1;
  }
  void Land(std::size_t jump) {
    code_[jump].k = static_cast<std::uint32_t>(code_.size() - jump - 1);
  }
  std::vector<sock_filter> Take() { return std::move(code_); }

 private:
  std::vector<sock_filter> code_;
};

// The accumulator has the packet's last word, scratch memory all of IPv6's. `hosts` are of one
// family and sorted by their last word.
void Search(absl::Span<const HostAddress> hosts, Program* program) {
  if (hosts.size() > kLeafHosts) {
    std::size_t middle = hosts.size() / 2;
    while (middle < hosts.size() && hosts[middle].words[kLast] == hosts[middle - 1].words[kLast]) {
      ++middle;
    }
    if (middle < hosts.size()) {
      program->Emit(BPF_JMP | BPF_JGE | BPF_K, hosts[middle].words[kLast], 0, 1);
      const std::size_t jump = program->Jump();
      Search(hosts.first(middle), program);
      program->Land(jump);
      return Search(hosts.subspan(middle), program);
    }
  }
  for (const HostAddress& host : hosts) {
    // On a difference, on to the next host.
    if (host.ipv6) {
      std::uint8_t left = 7;
      for (std::size_t word = kLast + 1; word-- > 0; left = static_cast<std::uint8_t>(left - 2)) {
        program->Emit(BPF_LD | BPF_MEM, static_cast<std::uint32_t>(word));
        program->Emit(BPF_JMP | BPF_JEQ | BPF_K, host.words[word], 0, left);
      }
    } else {
      program->Emit(BPF_JMP | BPF_JEQ | BPF_K, host.words[kLast], 0, 1);
    }
    program->Return(kAccept);
  }
  program->Return(kDrop);
}

}  // namespace

bool HostAddress::is_loopback() const {
  if (!ipv6) return words[kLast] >> 24 == 127;
  return words == std::array<std::uint32_t, 4>{0, 0, 0, 1};
}

absl::StatusOr<HostAddress> ParseHost(absl::string_view text) {
  absl::string_view bare = text;
  if (bare.size() > 2 && bare.front() == '[' && bare.back() == ']') {
    bare = bare.substr(1, bare.size() - 2);
  }
  const std::string host(bare.substr(0, bare.find('%')));
  HostAddress address;
  in_addr ipv4;
  in6_addr ipv6;
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) {
    address.words[kLast] = ntohl(ipv4.s_addr);
  } else if (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) {
    for (std::size_t i = 0; i < address.words.size(); ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, ipv6.s6_addr + 4 * i, sizeof(word));
      address.words[i] = ntohl(word);
    }
    address.ipv6 = !IN6_IS_ADDR_V4MAPPED(&ipv6);
    if (!address.ipv6) address.words = {0, 0, 0, address.words[kLast]};
  } else {
    return absl::InvalidArgumentError(absl::StrCat("host \"", text, "\": not a numeric address"));
  }
  const bool multicast =
      address.ipv6 ? address.words[0] >> 24 == 0xFF : address.words[kLast] >> 28 >= 0xE;
  if (multicast || address.words == std::array<std::uint32_t, 4>{}) {
    return absl::InvalidArgumentError(absl::StrCat("host \"", text, "\": not the address of one"));
  }
  return address;
}

std::vector<sock_filter> HostFilterProgram(std::vector<HostAddress> hosts) {
  std::sort(hosts.begin(), hosts.end(), [](const HostAddress& a, const HostAddress& b) {
    return std::tie(a.ipv6, a.words[kLast], a.words) < std::tie(b.ipv6, b.words[kLast], b.words);
  });
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  const auto ipv6 =
      std::find_if(hosts.begin(), hosts.end(), [](const HostAddress& host) { return host.ipv6; });
  const auto ipv4_count = static_cast<std::size_t>(ipv6 - hosts.begin());
  const absl::Span<const HostAddress> all = hosts;

  Program program;
  program.LoadFromNetworkHeader(BPF_B, 0);  // The version is in the upper half.
  program.Emit(BPF_ALU | BPF_RSH | BPF_K, 4);
  program.Emit(BPF_JMP | BPF_JEQ | BPF_K, 4, 0, 1);
  const std::size_t to_ipv4 = program.Jump();
  program.Emit(BPF_JMP | BPF_JEQ | BPF_K, 6, 1, 0);
  program.Return(kDrop);
  for (std::uint32_t word = 0; word <= kLast; ++word) {  // The source is at 8.
    program.LoadFromNetworkHeader(BPF_W, 8 + 4 * word);
    program.Emit(BPF_ST, word);
  }
  Search(all.subspan(ipv4_count), &program);
  program.Land(to_ipv4);
  program.LoadFromNetworkHeader(BPF_W, 12);
  Search(all.first(ipv4_count), &program);
  return program.Take();
}

absl::Status AttachHostFilter(int fd, const std::vector<sock_filter>& program) {
  KVMILL_CHECK(!program.empty() && program.size() <= BPF_MAXINSNS);
  sock_fprog whole{};
  whole.len = static_cast<unsigned short>(program.size());
  whole.filter = const_cast<sock_filter*>(program.data());  // Only read.
  if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &whole, sizeof(whole)) == 0) {
    return absl::OkStatus();
  }
  const std::string why = absl::StrCat("a filter of ", program.size(),
                                       " instructions for a socket: ", std::strerror(errno));
  if (errno == ENOMEM) {
    return absl::ResourceExhaustedError(absl::StrCat(why, ": see net.core.optmem_max"));
  }
  return errno == EPERM ? absl::PermissionDeniedError(why) : absl::UnavailableError(why);
}

}  // namespace kvmill
