#include "service/cluster_config.h"

#include <arpa/inet.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/tls/tls_checks.h"
#include "service/data_plane_config.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr absl::string_view kScheme = "etcd://";
constexpr absl::string_view kDefaultPrefix = "/kvmill/";
constexpr std::size_t kServersMax = 16;
static_assert(kLeaseTtlMin == absl::Seconds(Membership::kLeaseSecondsMin) &&
              kLeaseTtlMax == absl::Seconds(Membership::kLeaseSecondsMax));
constexpr std::size_t kFileBytesMax = 1 << 20;
// A node that has just started becomes home of many blocks at once: until then it copies slowly.
constexpr std::chrono::nanoseconds kReplicationRamp = std::chrono::seconds(60);
// Of host memory, for blocks that tickets promise, and for copies that tickets bring.
constexpr double kHeldShareMax = 0.5;
constexpr double kCopiedShareMax = 0.25;

absl::Status Wrong(absl::string_view option, absl::string_view value, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("--", option, " ", value, ": ", what));
}

// Empty for an empty path.
absl::StatusOr<std::string> ReadFile(absl::string_view option, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (file) text << file.rdbuf();
  if (!file)
    return Wrong(option, path, absl::StrCat("cannot be read (", std::strerror(errno), ")"));
  if (text.str().empty() || text.str().size() > kFileBytesMax) {
    return Wrong(option, path, absl::StrCat("want a file with 1 to ", kFileBytesMax, " bytes"));
  }
  return text.str();
}

bool IsWildcard(const std::string& host) {
  in_addr ipv4{};
  in6_addr ipv6{};
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return ipv4.s_addr == INADDR_ANY;
  return inet_pton(AF_INET6, host.c_str(), &ipv6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&ipv6);
}

bool IsLoopback(const std::string& host) {
  in_addr ipv4{};
  in6_addr ipv6{};
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return ntohl(ipv4.s_addr) >> 24 == 127;
  if (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) return IN6_IS_ADDR_LOOPBACK(&ipv6);
  return host == "localhost";
}

// Port 0 means the one that the daemon listens on.
absl::StatusOr<std::string> AddressOf(const Config& config, const std::string& listen) {
  KVMILL_ASSIGN_OR_RETURN(const HostPort bound, ParseHostPort(listen));
  if (config.advertise.empty()) {
    if (IsWildcard(bound.host)) {
      return Wrong("listen", listen,
                   "peers cannot reach a wildcard address: say --advertise HOST:PORT");
    }
    return bound.ToString();
  }
  KVMILL_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(config.advertise));
  if (IsWildcard(address.host)) {
    return Wrong("advertise", config.advertise, "peers cannot reach a wildcard address");
  }
  if (address.port == 0) address.port = bound.port;
  return address.ToString();
}

// Where peers reach --admin, which has no address of its own to advertise: of a wildcard at the
// host where they reach this node. `address` is that of the node. A loopback address means another
// machine to them, so it is said only where all are on one.
absl::StatusOr<std::string> AdminAddressOf(const std::string& admin, const std::string& address) {
  if (admin.empty()) return std::string();
  KVMILL_ASSIGN_OR_RETURN(HostPort bound, ParseHostPort(admin));
  KVMILL_ASSIGN_OR_RETURN(const HostPort node, ParseHostPort(address));
  if (IsWildcard(bound.host)) bound.host = node.host;
  if (IsLoopback(bound.host) && !IsLoopback(node.host)) return std::string();
  return bound.ToString();
}

absl::Status CheckEtcdFiles(const TlsFiles& files) {
  KVMILL_RETURN_IF_ERROR(CheckTlsFiles(files));
  return files.certificate.empty() ? absl::OkStatus() : CheckTlsUses(files, {.client = true});
}

}  // namespace

std::string NodeIdOf(const Config& config) {
  if (!config.node_id.empty()) return config.node_id;
  std::string host(HOST_NAME_MAX + 1, '\0');
  static_cast<void>(gethostname(host.data(), host.size() - 1));
  return host.c_str();
}

// A name that is part of a key, or of what people make paths of.
absl::Status CheckClusterName(absl::string_view what, absl::string_view name) {
  KVMILL_RETURN_IF_ERROR(CheckName(what, name));
  if (name != "." && name != "..") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " \"", name, "\": want a name, which \".\" and \"..\" are not"));
}

absl::StatusOr<ClusterAddress> ParseCluster(absl::string_view text) {
  ClusterAddress address;
  if (text == "none") return address;
  if (!absl::StartsWith(text, kScheme)) {
    return absl::InvalidArgumentError("want none or etcd://HOST:PORT,...");
  }
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text.substr(kScheme.size()), absl::MaxSplits('/', 1));
  if (absl::StrContains(text, '@')) {
    return absl::InvalidArgumentError(
        "users are not part of an address: want --etcd-user, and --etcd-password-file or "
        "KVMILL_ETCD_PASSWORD");
  }
  for (const absl::string_view server : absl::StrSplit(parts.first, ',')) {
    KVMILL_ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(server));
    if (parsed.port == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("server \"", server, "\": want a port from 1 to 65535"));
    }
    const bool again =
        std::any_of(address.servers.begin(), address.servers.end(), [&](const HostPort& other) {
          return other.port == parsed.port && absl::EqualsIgnoreCase(other.host, parsed.host);
        });
    if (again) {
      return absl::InvalidArgumentError(
          absl::StrCat("server \"", server, "\" is named twice: want each once"));
    }
    address.servers.push_back(parsed);
  }
  if (address.servers.size() > kServersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(address.servers.size(), " servers: want at most ", kServersMax));
  }
  address.prefix = std::string(kDefaultPrefix);
  if (!absl::StrContains(text.substr(kScheme.size()), '/')) return address;
  const absl::string_view path = absl::StripSuffix(parts.second, "/");
  for (const absl::string_view name : absl::StrSplit(path, '/')) {
    KVMILL_RETURN_IF_ERROR(CheckClusterName("part of the prefix", name));
  }
  address.prefix = absl::StrCat("/", path, "/");
  const std::size_t prefix_bytes_max =
      Registry::kKeyBytesMax - MemberKey("", std::string(kNameBytesMax, 'n')).size();
  if (address.prefix.size() > prefix_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat("prefix of ", address.prefix.size(),
                                                   " bytes: want at most ", prefix_bytes_max));
  }
  return address;
}

absl::StatusOr<EtcdOptions> MakeEtcdOptions(const Config& config) {
  EtcdOptions options;
  KVMILL_ASSIGN_OR_RETURN(ClusterAddress cluster, ParseCluster(config.cluster));
  options.servers = std::move(cluster.servers);
  options.tls = EtcdTlsOf(config);
  if (config.etcd_cert.empty() != config.etcd_key.empty() ||
      (!config.etcd_cert.empty() && config.etcd_ca.empty())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--etcd-cert ", config.etcd_cert, ": needs --etcd-key and --etcd-ca, and they need it"));
  }
  if (const absl::Status files = CheckEtcdFiles(options.tls); !files.ok()) {
    // The checks know the names of a node's own files.
    return absl::Status(files.code(),
                        absl::StrCat("--etcd-", absl::StripPrefix(files.message(), "tls-")));
  }
  options.user = config.etcd_user;
  options.password = config.etcd_password;
  if (!config.etcd_password_file.empty()) {
    KVMILL_ASSIGN_OR_RETURN(options.password,
                            ReadFile("etcd-password-file", config.etcd_password_file));
    absl::StripTrailingAsciiWhitespace(&options.password);
  }
  if (!options.user.empty() && options.password.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--etcd-user ", options.user,
                     ": needs a password, from --etcd-password-file or KVMILL_ETCD_PASSWORD"));
  }
  return options;
}

TlsFiles EtcdTlsOf(const Config& config) {
  return {config.etcd_ca, config.etcd_cert, config.etcd_key, ""};
}

SharedTenants SharedTenantsOf(const Config& config) {
  const bool nodes_are_known = config.tls.enabled();
  return SharedTenants(
      {.named = nodes_are_known, .local_users = nodes_are_known && config.share_uids});
}

absl::StatusOr<Membership::Options> MakeMembershipOptions(const Config& config,
                                                          const std::string& listen,
                                                          const std::string& admin,
                                                          const std::string& incarnation,
                                                          const std::string& holder) {
  Membership::Options options;
  KVMILL_ASSIGN_OR_RETURN(ClusterAddress cluster, ParseCluster(config.cluster));
  options.prefix = std::move(cluster.prefix);
  Member& self = options.self.member;
  self.id = NodeIdOf(config);
  self.incarnation = incarnation;
  KVMILL_ASSIGN_OR_RETURN(self.address, AddressOf(config, listen));
  KVMILL_ASSIGN_OR_RETURN(self.admin_address, AdminAddressOf(admin, self.address));
  self.zone = config.zone;
  self.capacity_bytes = config.host_bytes + (config.data_dir.empty() ? 0 : config.disk_bytes);
  options.self.holder = holder;
  options.lease_seconds = absl::ToInt64Seconds(config.lease_ttl);
  options.grace_seconds = absl::ToInt64Seconds(config.member_grace);
  std::memcpy(&options.seed, incarnation.data(),
              std::min(incarnation.size(), sizeof(options.seed)));
  return options;
}

ClusterNode::Options MakeClusterNodeOptions(const Config& config) {
  const auto of_host_memory = [&config](double share) {
    return static_cast<std::uint64_t>(share * static_cast<double>(config.host_bytes));
  };
  ClusterNode::Options options;
  options.clients.data_plane_plaintext = config.data_plane_plaintext;
  options.clients.rdma = RdmaUseOf(config);
  options.clients.tls = config.tls;
  options.blocks.peer_nanos = absl::ToInt64Nanoseconds(config.peer_timeout);
  options.blocks.copies = config.copies;
  options.blocks.replication.bytes_per_second = config.replication_rate;
  options.blocks.replication.ramp_nanos = kReplicationRamp.count();
  options.blocks.shared = SharedTenantsOf(config);
  options.tickets.shared = options.blocks.shared;
  options.tickets.held_bytes_max = of_host_memory(kHeldShareMax);
  options.tickets.copied_bytes_max = of_host_memory(kCopiedShareMax);
  return options;
}

absl::Status CheckCluster(const Config& config) {
  // What a cluster would refuse is no name of a node that is in none, either.
  if (!config.node_id.empty() || config.cluster != "none") {
    if (const absl::Status id = CheckClusterName("node id", NodeIdOf(config)); !id.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--node-id: ", id.message()));
    }
  }
  if (config.cluster == "none") return absl::OkStatus();
  if (config.listen.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--cluster ", config.cluster, ": needs --listen HOST:PORT, where peers reach this node"));
  }
  if (config.share_uids && !config.tls.enabled()) {
    return absl::FailedPreconditionError(
        "--share-uids: needs --tls-cert, --tls-key and --tls-ca: without them whoever reaches "
        "--listen is a node, and would have the blocks of every user");
  }
  for (const auto& [name, value] :
       {std::pair<const char*, absl::Duration>("lease-ttl", config.lease_ttl),
        {"member-grace", config.member_grace}}) {
    if (value != absl::Seconds(absl::ToInt64Seconds(value))) {
      return Wrong(name, absl::FormatDuration(value), "want whole seconds");
    }
  }
  if (!config.zone.empty()) KVMILL_RETURN_IF_ERROR(CheckClusterName("zone", config.zone));
  KVMILL_RETURN_IF_ERROR(CheckTlsUses(config.tls, {.server = true, .client = true}));
  KVMILL_RETURN_IF_ERROR(MakeEtcdOptions(config).status());
  // The rest is as it will be, but for what only a running daemon has.
  KVMILL_ASSIGN_OR_RETURN(const Membership::Options options,
                          MakeMembershipOptions(config, config.listen, config.admin,
                                                std::string(kHolderBytes, '\0'), ""));
  return Membership::Check(options);
}

}  // namespace kvmill
