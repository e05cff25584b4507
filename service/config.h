// Configuration of kvmilld: one struct, filled once from defaults, then a YAML file, then flags.
//
// One table (config.cc) holds every option: name, help, bounds, how it is read and printed. Flags,
// YAML keys (the same names with underscores), --print-config, docs/configuration.md and what a
// running daemon takes over (service/reload.h) come from it.
#ifndef KVMILL_SERVICE_CONFIG_H_
#define KVMILL_SERVICE_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/server_address.h"
#include "client/tls/tls_files.h"
#include "service/identities.h"
#include "storage/encryption_keys.h"

namespace kvmill {

inline constexpr std::uint64_t kHostBytesMin = std::uint64_t{64} << 20;
inline constexpr std::uint64_t kGpuBytesMin = std::uint64_t{64} << 20;  // Unless it is 0.

inline constexpr std::uint32_t kEncodeThreadsMax = 1024;
inline constexpr std::uint32_t kErrorSampleIntervalMax = 1u << 30;
inline constexpr std::uint32_t kGuardErrorMax = 1000;  // Percent.
inline constexpr std::uint32_t kGuardSamplesMax = 1u << 20;
inline constexpr std::uint32_t kMetricsNamespacesMax = 256;  // 36 lines of /metrics each.
inline constexpr std::uint32_t kEventsBufferStepsMax = 1u << 20;
inline constexpr std::uint32_t kEventsHighWaterMarkMax = 1u << 24;
inline constexpr std::size_t kEventsTopicBytesMax = 255;
inline constexpr std::uint64_t kReplicationRateMin = std::uint64_t{64} << 10;

inline constexpr absl::Duration kDrainTimeoutMax = absl::Hours(1);
inline constexpr absl::Duration kSessionGraceMax = absl::Hours(1);
inline constexpr absl::Duration kLeaseTtlMin = absl::Seconds(2);
inline constexpr absl::Duration kLeaseTtlMax = absl::Minutes(10);
inline constexpr absl::Duration kMemberGraceMax = absl::Hours(1);
inline constexpr absl::Duration kPeerTimeoutMin = absl::Milliseconds(10);
inline constexpr absl::Duration kPeerTimeoutMax = absl::Seconds(10);

struct Config {
  std::string socket;         // Path; never empty after LoadConfig.
  std::string listen;         // HOST:PORT; empty: no TCP listener.
  std::string admin;          // HOST:PORT; empty: Admin only on the socket.
  std::string metrics;        // HOST:PORT; empty: no HTTP.
  std::string ucx;            // HOST or HOST:PORT; empty: no data plane.
  std::string rdma = "auto";  // auto, expected or required.
  bool data_plane_plaintext = false;
  bool insecure = false;
  TlsFiles tls;           // Of --listen and --admin, and of connections to peers.
  std::string tls_peers;  // Names, separated by commas; empty: those of `tls.certificate`.
  std::string tenants;    // A file; empty: none.
  std::string data_dir;   // Empty: no disk tier.
  std::uint64_t host_bytes = std::uint64_t{4} << 30;
  std::string huge_pages = "auto";         // auto, on or off.
  std::uint32_t host_high_watermark = 95;  // Percent; so are the next three.
  std::uint32_t host_low_watermark = 90;
  std::uint64_t gpu_bytes = 0;
  std::uint32_t gpu_high_watermark = 95;
  std::uint32_t gpu_low_watermark = 90;
  std::uint64_t disk_bytes = std::uint64_t{64} << 30;
  std::string disk_key_file;  // Empty: none.
  // From the environment: no option, and nowhere printed. Null: none. Shared by copies of this.
  std::shared_ptr<const EncryptionKeys> disk_keys;
  std::string device = "auto";
  std::string cluster = "none";
  std::string node_id;    // Empty: the host's name.
  std::string zone;       // May be empty.
  std::string advertise;  // HOST:PORT; empty: as `listen`.
  absl::Duration lease_ttl = absl::Seconds(10);
  absl::Duration member_grace = absl::Seconds(30);
  std::uint32_t copies = 0;
  std::uint64_t replication_rate = std::uint64_t{64} << 20;  // Bytes a second.
  bool share_uids = false;
  absl::Duration peer_timeout = absl::Milliseconds(200);
  std::string etcd_ca;  // Files; empty: none.
  std::string etcd_cert;
  std::string etcd_key;
  std::string etcd_user;
  std::string etcd_password_file;
  std::string etcd_password;  // From the environment: no option, and nowhere printed.
  std::string events;         // Address of published events; empty: none are.
  std::string events_replay;
  std::string events_topic;
  std::string events_namespace;  // Only its blocks are published; empty: all.
  std::uint32_t events_buffer_steps = 10000;
  std::uint32_t events_high_water_mark = 100000;
  std::string events_hashes = "int";           // int or bytes.
  std::string events_replay_frames = "topic";  // topic or bare.
  bool watch_config = false;  // The file and `tenants` are read again when they change.
  std::string log_level = "info";
  std::string log_format = "text";
  std::uint32_t encode_threads = 0;                  // 0: one per core.
  std::string eviction_policy;                       // Empty: the default.
  absl::Duration drain_timeout = absl::Seconds(10);  // For calls in flight at shutdown.
  absl::Duration session_grace = absl::Seconds(30);  // For a remote session without a stream.
  std::uint32_t error_sample_interval = 251;         // Tiles; 0: no samples.
  std::uint32_t metrics_namespaces = 16;             // With metrics of their own.
  std::string encode_algorithm = "kvarn";            // kvarn or refined.
  std::string guard_action = "alert";                // alert, fall-back or refuse.
  std::uint32_t guard_key_error = 60;                // Percent; 0: no limit.
  std::uint32_t guard_value_error = 60;              // The same.
  std::uint32_t guard_samples = 64;
};

struct OptionInfo {
  std::string name;        // As in --name; the YAML key has underscores.
  std::string value_name;  // "HOST:PORT"; empty: a switch without value.
  std::string help;
  std::string default_value;  // As SetOption takes it; empty: none.
  // What SetOption enforces. Bounds of sizes, durations and numbers, inclusive, as it takes them;
  // empty: none.
  std::string min, max;
  bool or_zero = false;              // 0 is allowed, too.
  std::vector<std::string> choices;  // All values that are allowed; empty: others.
  std::string group;                 // Heading of docs/configuration.md.
  bool reloadable = false;           // While the daemon runs.
  std::string environment;           // A variable that has it, too: for secrets.
};
const std::vector<OptionInfo>& ConfigOptions();

// docs/configuration.md.
std::string ConfigReference();

// The value of option `name`, as SetOption takes it.
std::string GetOption(absl::string_view name, const Config& config);

// Sets option `name` (flag spelling) from text, which is UTF-8 without control characters.
// INVALID_ARGUMENT names option, value and what is allowed.
absl::Status SetOption(absl::string_view name, absl::string_view value, Config* config);

// Applies a YAML file: a map of option names to scalars. Strict: an unknown or repeated key, a
// value that is no scalar or out of range, a second document, bytes that are not UTF-8 are
// INVALID_ARGUMENT starting with "FILE:LINE: ". Errors of ReadConfigFile. `names`, which may be
// null: the options that the file sets.
absl::Status ApplyYamlFile(const std::string& path, Config* config,
                           std::set<std::string>* names = nullptr);

// The text of a configuration file. NOT_FOUND when it cannot be read, or is no file;
// INVALID_ARGUMENT names the limit when it is larger than kConfigFileBytesMax, and "FILE:LINE: "
// where it is not UTF-8 or has a control character.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path);
inline constexpr std::size_t kConfigFileBytesMax = 1 << 20;

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
