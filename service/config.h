// Configuration of kvmilld: one struct, filled once from defaults, then a YAML file, then flags.
//
// One table (config.cc) holds every option: name, help, how it is read and printed. Flags, YAML
// keys (the same names with underscores), --print-config and the documentation come from it.
#ifndef KVMILL_SERVICE_CONFIG_H_
#define KVMILL_SERVICE_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/server_address.h"
#include "client/tls/tls_files.h"
#include "service/identities.h"

namespace kvmill {

inline constexpr std::uint64_t kHostBytesMin = std::uint64_t{64} << 20;
inline constexpr std::uint64_t kGpuBytesMin = std::uint64_t{64} << 20;  // Unless it is 0.

inline constexpr std::uint32_t kErrorSampleIntervalMax = 1u << 30;
inline constexpr std::uint32_t kMetricsNamespacesMax = 256;  // 36 lines of /metrics each.
inline constexpr std::uint64_t kReplicationRateMin = std::uint64_t{64} << 10;

inline constexpr absl::Duration kDrainTimeoutMax = absl::Hours(1);
inline constexpr absl::Duration kSessionGraceMax = absl::Hours(1);
inline constexpr absl::Duration kLeaseTtlMin = absl::Seconds(2);
inline constexpr absl::Duration kLeaseTtlMax = absl::Minutes(10);
inline constexpr absl::Duration kMemberGraceMax = absl::Hours(1);
inline constexpr absl::Duration kPeerTimeoutMin = absl::Milliseconds(10);
inline constexpr absl::Duration kPeerTimeoutMax = absl::Seconds(10);

struct Config {
  std::string socket;   // Path; never empty after LoadConfig.
  std::string listen;   // HOST:PORT; empty: no TCP listener.
  std::string admin;    // HOST:PORT; empty: Admin only on the socket.
  std::string metrics;  // HOST:PORT; empty: no HTTP.
  std::string ucx;      // HOST or HOST:PORT; empty: no data plane.
  bool data_plane_plaintext = false;
  bool insecure = false;
  TlsFiles tls;           // Of --listen and --admin, and of connections to peers.
  std::string tls_peers;  // Names, separated by commas; empty: those of `tls.certificate`.
  std::string tenants;    // A file; empty: none.
  std::string data_dir;   // Empty: no disk tier.
  std::uint64_t host_bytes = std::uint64_t{4} << 30;
  std::string huge_pages = "auto";  // auto, on or off.
  std::uint64_t gpu_bytes = 0;
  std::uint64_t disk_bytes = std::uint64_t{64} << 30;
  std::string device = "auto";
  std::string cluster = "none";
  std::string node_id;    // Empty: the host's name.
  std::string zone;       // May be empty.
  std::string advertise;  // HOST:PORT; empty: as `listen`.
  absl::Duration lease_ttl = absl::Seconds(10);
  absl::Duration member_grace = absl::Seconds(30);
  std::uint32_t copies = 0;
  std::uint64_t replication_rate = std::uint64_t{64} << 20;  // Bytes a second.
  absl::Duration peer_timeout = absl::Milliseconds(200);
  std::string etcd_ca;  // Files; empty: none.
  std::string etcd_cert;
  std::string etcd_key;
  std::string etcd_user;
  std::string etcd_password_file;
  std::string etcd_password;  // From the environment: no option, and nowhere printed.
  std::string log_level = "info";
  std::uint32_t encode_threads = 0;                  // 0: one per core.
  std::string eviction_policy;                       // Empty: the default.
  absl::Duration drain_timeout = absl::Seconds(10);  // For calls in flight at shutdown.
  absl::Duration session_grace = absl::Seconds(30);  // For a remote session without a stream.
  std::uint32_t error_sample_interval = 251;         // Tiles; 0: no samples.
  std::uint32_t metrics_namespaces = 16;             // With metrics of their own.
};

struct OptionInfo {
  std::string name;        // As in --name; the YAML key has underscores.
  std::string value_name;  // "HOST:PORT"; empty: a switch without value.
  std::string help;
  std::string default_value;  // As SetOption takes it; empty: none.
};
const std::vector<OptionInfo>& ConfigOptions();

// Sets option `name` (flag spelling) from text. INVALID_ARGUMENT names option, value and what is
// allowed.
absl::Status SetOption(absl::string_view name, absl::string_view value, Config* config);

// Applies a YAML file: a map of option names to scalars. Strict: an unknown or repeated key, a
// value that is no scalar or out of range is INVALID_ARGUMENT starting with "FILE:LINE: ".
// NOT_FOUND when the file cannot be read.
absl::Status ApplyYamlFile(const std::string& path, Config* config);

// The whole configuration as YAML that ApplyYamlFile reads back to the same.
std::string ToYaml(const Config& config);

// What needs several options, files, or this build, to decide: a TCP listener without TLS, a
// cluster. FAILED_PRECONDITION or INVALID_ARGUMENT with value and remedy.
absl::Status CheckConfig(const Config& config);

// Who may come over TCP, as config.tls, tls_peers and tenants say. Reads the files.
// INVALID_ARGUMENT.
absl::StatusOr<Identities> MakeIdentities(const Config& config);

// Config::ucx as an address: port 0 where it has none. INVALID_ARGUMENT.
absl::StatusOr<HostPort> ParseUcxAddress(absl::string_view text);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CONFIG_H_
