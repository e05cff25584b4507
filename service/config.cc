#include "service/config.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/door_protocol.h"
#include "client/server_address.h"
#include "client/tls/tls_checks.h"
#include "client/transport/ucx_transport.h"
#include "client/units.h"
#include "service/cluster/placement.h"
#include "service/cluster_config.h"
#include "service/config_options.h"
#include "service/disk_config.h"
#include "service/events_config.h"
#include "service/tenant_quotas.h"
#include "storage/core/status_macros.h"
#include "storage/eviction/policy.h"

namespace kvmill {
namespace {

Option Text(const char* name, const char* value_name, const char* help,
            std::string Config::*member) {
  return {{name, value_name, help},
          [member](absl::string_view value, Config* c) {
            c->*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.*member; }};
}

Option TlsFile(const char* name, const char* help, std::string TlsFiles::*member) {
  return {{name, "FILE", help},
          [member](absl::string_view value, Config* c) {
            c->tls.*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.tls.*member; }};
}

Option Address(const char* name, const char* help, std::string Config::*member) {
  return {{name, "HOST:PORT", help},
          [member](absl::string_view value, Config* c) -> absl::Status {
            if (!value.empty()) KVMILL_RETURN_IF_ERROR(ParseHostPort(value).status());
            c->*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.*member; }};
}

Option EventsAddress(const char* name, const char* help, std::string Config::*member) {
  return {{name, "ADDRESS", help},
          [member](absl::string_view value, Config* c) -> absl::Status {
            if (!value.empty()) KVMILL_RETURN_IF_ERROR(ParseEventsAddress(value).status());
            c->*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.*member; }};
}

// What membership entries hold as `what`; may be empty.
Option NodeName(const char* name, const char* value_name, const char* help, const char* what,
                std::string Config::*member) {
  return {{name, value_name, help},
          [member, what](absl::string_view value, Config* c) -> absl::Status {
            if (!value.empty()) KVMILL_RETURN_IF_ERROR(CheckClusterName(what, value));
            c->*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.*member; }};
}

// At least `min`, or 0 where that means none.
absl::Status CheckBytes(std::uint64_t bytes, std::uint64_t min, bool or_none) {
  if (bytes >= min || (or_none && bytes == 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("want ", or_none ? "0 or " : "", "at least ", FormatBytes(min)));
}

Option Bytes(const char* name, const char* help, std::uint64_t Config::*member,
             std::uint64_t min = 0, bool or_none = false) {
  OptionInfo info{name, "SIZE", help};
  info.min = FormatBytes(min);
  info.or_zero = or_none;
  return {std::move(info),
          [member, min, or_none](absl::string_view value, Config* c) -> absl::Status {
            KVMILL_ASSIGN_OR_RETURN(const std::uint64_t bytes, ParseBytes(value));
            KVMILL_RETURN_IF_ERROR(CheckBytes(bytes, min, or_none));
            c->*member = bytes;
            return absl::OkStatus();
          },
          [member](const Config& c) { return FormatBytes(c.*member); }};
}

Option Switch(const char* name, const char* help, bool Config::*member) {
  OptionInfo info{name, "", help};
  info.choices = {"true", "false"};
  return {std::move(info),
          [member](absl::string_view value, Config* c) -> absl::Status {
            if (value != "true" && value != "false") {
              return absl::InvalidArgumentError("want true or false");
            }
            c->*member = value == "true";
            return absl::OkStatus();
          },
          [member](const Config& c) -> std::string { return c.*member ? "true" : "false"; }};
}

Option OneOf(const char* name, const char* help, std::vector<std::string> allowed,
             std::string Config::*member) {
  std::string value_name;
  for (const std::string& a : allowed)
    absl::StrAppend(&value_name, value_name.empty() ? "" : "|", a);
  OptionInfo info{name, value_name, help};
  info.choices = allowed;
  return {std::move(info),
          [member, allowed, value_name](absl::string_view value, Config* c) -> absl::Status {
            if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
              return absl::InvalidArgumentError(absl::StrCat("want ", value_name));
            }
            c->*member = std::string(value);
            return absl::OkStatus();
          },
          [member](const Config& c) { return c.*member; }};
}

Option Time(const char* name, const char* help, absl::Duration min, absl::Duration max,
            absl::Duration Config::*member) {
  OptionInfo info{name, "DURATION", help};
  info.min = absl::FormatDuration(min);
  info.max = absl::FormatDuration(max);
  return {std::move(info),
          [member, min, max](absl::string_view value, Config* c) -> absl::Status {
            KVMILL_ASSIGN_OR_RETURN(const absl::Duration time, ParseDuration(value));
            if (time < min || time > max) {
              return absl::InvalidArgumentError(absl::StrCat("want ", absl::FormatDuration(min),
                                                             " to ", absl::FormatDuration(max)));
            }
            c->*member = time;
            return absl::OkStatus();
          },
          [member](const Config& c) { return absl::FormatDuration(c.*member); }};
}

Option Number(const char* name, const char* value_name, const char* help, std::uint32_t max,
              std::uint32_t Config::*member, std::uint32_t min = 0) {
  OptionInfo info{name, value_name, help};
  info.min = absl::StrCat(min);
  info.max = absl::StrCat(max);
  return {
      std::move(info),
      [member, min, max](absl::string_view value, Config* c) -> absl::Status {
        std::uint32_t number = 0;
        if (!absl::SimpleAtoi(value, &number) || number < min || number > max) {
          return absl::InvalidArgumentError(absl::StrCat("want a number from ", min, " to ", max));
        }
        c->*member = number;
        return absl::OkStatus();
      },
      [member](const Config& c) { return absl::StrCat(c.*member); }};
}

// The row begins a group.
Option Begins(const char* group, Option option) {
  option.info.group = group;
  return option;
}

// A running daemon takes it over: Node::Reload has what it does.
Option Reloadable(Option option) {
  option.info.reloadable = true;
  return option;
}

Option OrVariable(const char* environment, Option option) {
  option.info.environment = environment;
  return option;
}

std::vector<std::string> PolicyNames() {
  std::vector<std::string> names = {""};
  for (const std::string_view name : EvictionPolicyNames()) names.emplace_back(name);
  return names;
}

absl::Status SetDevice(absl::string_view value, Config* c) {
  std::uint32_t ordinal = 0;
  if (value != "auto" && value != "host" &&
      !(value.substr(0, 5) == "cuda:" && absl::SimpleAtoi(value.substr(5), &ordinal))) {
    return absl::InvalidArgumentError("want auto, host or cuda:N");
  }
  c->device = std::string(value);
  return absl::OkStatus();
}

}  // namespace

const std::vector<Option>& Options() {
  static const auto* options = new std::vector<Option>{
      Begins("Listeners",
             Text("socket", "PATH",
                  "Unix socket of the gRPC services; default $XDG_RUNTIME_DIR/kvmill.sock, else "
                  "/run/kvmill/kvmill.sock.",
                  &Config::socket)),
      Address("listen", "TCP address of the gRPC services (not Admin); port 0 picks a free one.",
              &Config::listen),
      Address("admin", "TCP address of the Admin service.", &Config::admin),
      Address("metrics", "Address of /metrics, /healthz, /readyz and a status page (plain HTTP).",
              &Config::metrics),
      {{"ucx", "HOST", "Address of the UCX data plane: HOST, HOST:PORT or [IPv6]:PORT, numeric."},
       [](absl::string_view value, Config* c) -> absl::Status {
         if (!value.empty()) KVMILL_RETURN_IF_ERROR(ParseUcxAddress(value).status());
         c->ucx = std::string(value);
         return absl::OkStatus();
       },
       [](const Config& c) { return c.ucx; }},
      OneOf("rdma",
            "RDMA of the data plane. expected: a start or a connection without it is a warning; "
            "required: no start, and no such connection; auto: expected where this host has some.",
            {"auto", "expected", "required"}, &Config::rdma),
      Begins(
          "Security",
          Switch("data-plane-plaintext",
                 "Do not encrypt the data plane: the network is trusted. Clients must say so too.",
                 &Config::data_plane_plaintext)),
      Switch("insecure", "TCP listeners without TLS: whoever reaches them may do everything.",
             &Config::insecure),
      TlsFile("tls-cert",
              "PEM certificate of this node, for its clients and for its peers: of server and of "
              "client authentication.",
              &TlsFiles::certificate),
      TlsFile("tls-key", "PEM key of that certificate.", &TlsFiles::key),
      TlsFile("tls-ca", "PEM authorities of the certificates of clients and peers.", &TlsFiles::ca),
      {{"tls-server-name", "NAME",
        "Name in the certificates of peers; none: the host of each one's address."},
       [](absl::string_view value, Config* c) {
         c->tls.server_name = std::string(value);
         return absl::OkStatus();
       },
       [](const Config& c) { return c.tls.server_name; }},
      Reloadable(Text("tls-peers", "NAME,...",
                      "Names of certificates that are nodes'; none: the names of --tls-cert.",
                      &Config::tls_peers)),
      Reloadable(Text(
          "tenants", "FILE",
          "Which certificates and tokens stand for which tenant, and quotas (docs/security.md); "
          "none: every certificate of --tls-ca for the daemon's own, and no quotas.",
          &Config::tenants)),
      Begins("Memory and disk",
             Text("data-dir", "DIR", "Directory of the disk tier; none: no disk tier.",
                  &Config::data_dir)),
      Bytes("host-bytes", "Host memory for blocks.", &Config::host_bytes, kHostBytesMin),
      OneOf("huge-pages",
            "Huge pages under host memory; auto: as many as the kernel gives, on: all or no start.",
            {"auto", "on", "off"}, &Config::huge_pages),
      Reloadable(Number("host-high-watermark", "PERCENT",
                        "Used part of host memory above which blocks that are on disk leave it in "
                        "the background; 100: none do.",
                        100, &Config::host_high_watermark, /*min=*/1)),
      Reloadable(Number("host-low-watermark", "PERCENT",
                        "Used part of host memory at which that ends; less than the high one.", 99,
                        &Config::host_low_watermark)),
      Bytes("gpu-bytes", "GPU memory for blocks; 0: no GPU tier.", &Config::gpu_bytes, kGpuBytesMin,
            /*or_none=*/true),
      Reloadable(Number("gpu-high-watermark", "PERCENT",
                        "Used part of the GPU's memory for blocks above which some leave it in the "
                        "background, to free host memory or because they are on disk; 100: none.",
                        100, &Config::gpu_high_watermark, /*min=*/1)),
      Reloadable(Number("gpu-low-watermark", "PERCENT",
                        "Used part of it at which that ends; less than the high one.", 99,
                        &Config::gpu_low_watermark)),
      Bytes("disk-bytes", "Cap of the disk tier.", &Config::disk_bytes),
      OrVariable("KVMILL_DISK_KEY",
                 Text("disk-key-file", "FILE",
                      "Encrypt the disk tier: the key for new files in the first line, older ones "
                      "below it, 64 hexadecimal digits each; else KVMILL_DISK_KEY has them.",
                      &Config::disk_key_file)),
      {{"device", "auto|host|cuda:N",
        "Device of the GPU tier; auto: the first GPU that answers, else the host."},
       SetDevice,
       [](const Config& c) { return c.device; }},
      Begins(
          "Cluster",
          {{"cluster", "none|etcd://HOST:PORT,...",
            "Servers of the etcd in which the nodes find each other; /PREFIX after them: not below "
            "/kvmill/. Needs --listen."},
           [](absl::string_view value, Config* c) -> absl::Status {
             KVMILL_RETURN_IF_ERROR(ParseCluster(value).status());
             c->cluster = std::string(value);
             return absl::OkStatus();
           },
           [](const Config& c) { return c.cluster; }}),
      NodeName(
          "node-id", "ID",
          "Name of this node; none: the host name, for the data plane of host name and socket.",
          "node id", &Config::node_id),
      NodeName("zone", "NAME", "What fails together with this node: copies go to different zones.",
               "zone", &Config::zone),
      Address("advertise", "Where peers reach --listen; none: as --listen says. Port 0: its port.",
              &Config::advertise),
      Time("lease-ttl", "Time after which a node that died is gone from the cluster.", kLeaseTtlMin,
           kLeaseTtlMax, &Config::lease_ttl),
      Time("member-grace",
           "Time that members are kept when more than a third vanish within one --lease-ttl.",
           absl::ZeroDuration(), kMemberGraceMax, &Config::member_grace),
      Reloadable(Time("peer-timeout", "Time that a lookup waits for other nodes.", kPeerTimeoutMin,
                      kPeerTimeoutMax, &Config::peer_timeout)),
      Number("copies", "R", "Nodes that have each block besides the one that stored it.",
             kRanks - 2, &Config::copies),
      Reloadable(Bytes("replication-rate",
                       "Bytes a second at which this node copies blocks of others to keep.",
                       &Config::replication_rate, kReplicationRateMin)),
      Switch("share-uids",
             "Blocks of users of the hosts (tenants uid-N) are shared between nodes, too: a number "
             "is one user on all of them. Needs TLS.",
             &Config::share_uids),
      Begins("etcd", Text("etcd-ca", "FILE", "PEM authority of etcd's servers; none: no TLS.",
                          &Config::etcd_ca)),
      Text("etcd-cert", "FILE", "PEM certificate that etcd gets.", &Config::etcd_cert),
      Text("etcd-key", "FILE", "PEM key of that certificate.", &Config::etcd_key),
      Text("etcd-user", "NAME", "User of etcd.", &Config::etcd_user),
      OrVariable("KVMILL_ETCD_PASSWORD",
                 Text("etcd-password-file", "FILE",
                      "File with the user's password; else KVMILL_ETCD_PASSWORD has it.",
                      &Config::etcd_password_file)),
      Begins("Events",
             EventsAddress(
                 "events",
                 "ZeroMQ address at which the blocks' coming and going is published as vLLM's "
                 "KV events (docs/events.md): HOST:PORT or tcp://HOST:PORT, numeric.",
                 &Config::events)),
      EventsAddress("events-replay",
                    "ZeroMQ address at which published events are asked for again.",
                    &Config::events_replay),
      {{"events-topic", "TEXT", "First part of every published message; llm-d wants kv@ID@MODEL."},
       [](absl::string_view value, Config* c) -> absl::Status {
         if (value.size() > kEventsTopicBytesMax) {
           return absl::InvalidArgumentError(
               absl::StrCat(value.size(), " bytes: want at most ", kEventsTopicBytesMax));
         }
         c->events_topic = std::string(value);
         return absl::OkStatus();
       },
       [](const Config& c) { return c.events_topic; }},
      Text("events-namespace", "NAME",
           "Only what happens in this namespace is published; none: in all, of any model.",
           &Config::events_namespace),
      Number("events-buffer-steps", "N", "Published messages that are kept for --events-replay.",
             kEventsBufferStepsMax, &Config::events_buffer_steps, /*min=*/1),
      Number("events-high-water-mark", "N",
             "Messages that wait for a slow subscriber; what comes then, it does not get.",
             kEventsHighWaterMarkMax, &Config::events_high_water_mark, /*min=*/1),
      OneOf("events-hashes", "Block hashes in published events: the keys' last 8 bytes, or keys.",
            {"int", "bytes"}, &Config::events_hashes),
      OneOf("events-replay-frames",
            "Parts of the answers of --events-replay: with the topic, as vLLM since 0.26, or bare.",
            {"topic", "bare"}, &Config::events_replay_frames),
      Begins("Logs",
             Reloadable(OneOf("log-format",
                              "Form of what is logged: lines of text, or an object of JSON a line.",
                              {"text", "json"}, &Config::log_format))),
      Reloadable(OneOf("log-level", "Least severe messages that are logged, to standard error.",
                       {"trace", "debug", "info", "warn", "error", "off"}, &Config::log_level)),
      Begins("Serving", Number("encode-threads", "N", "Threads that encode; 0: one per core.",
                               kEncodeThreadsMax, &Config::encode_threads)),
      {{"eviction-policy", "NAME",
        "Which block leaves a full tier next; without one the policy named returns.", "", "", "",
        false, PolicyNames()},
       [](absl::string_view value, Config* c) -> absl::Status {
         const std::vector<std::string> known = PolicyNames();
         if (std::find(known.begin(), known.end(), value) == known.end()) {
           return absl::InvalidArgumentError(
               absl::StrCat("want one of ", absl::StrJoin(known.begin() + 1, known.end(), ", ")));
         }
         c->eviction_policy = std::string(value);
         return absl::OkStatus();
       },
       [](const Config& c) { return c.eviction_policy; }},
      Reloadable(Time("drain-timeout", "Time that calls in flight get at shutdown.",
                      absl::ZeroDuration(), kDrainTimeoutMax, &Config::drain_timeout)),
      Reloadable(Time("session-grace",
                      "Time to resume a remote session whose stream broke, before it ends.",
                      absl::ZeroDuration(), kSessionGraceMax, &Config::session_grace)),
      OneOf("encode-algorithm",
            "What encodes tiles, here and in clients that encode themselves. refined: the same "
            "format with less error, for a fifth more time; not with a GPU.",
            {"kvarn", "refined"}, &Config::encode_algorithm),
      Begins("Metrics",
             Reloadable(Number("error-sample-interval", "N",
                               "One of so many tiles is decoded again as it is stored, to see what "
                               "was lost; 0: none.",
                               kErrorSampleIntervalMax, &Config::error_sample_interval))),
      Reloadable(
          Number("metrics-namespaces", "N",
                 "Namespaces that /metrics names: those that stored most, of errors the first "
                 "ones; the others are shown together.",
                 kMetricsNamespacesMax, &Config::metrics_namespaces)),
      Begins("Guard",
             Reloadable(OneOf("guard-action",
                              "What becomes of a namespace whose samples lose more than the limits "
                              "below. alert: a warning and a metric; fall-back: it also takes no "
                              "more blocks, and says which namespace to use instead; refuse: it "
                              "takes no more blocks.",
                              {"alert", "fall-back", "refuse"}, &Config::guard_action))),
      Reloadable(Number("guard-key-error", "PERCENT",
                        "Limit of what samples of K lose on average; 0: none.", kGuardErrorMax,
                        &Config::guard_key_error)),
      Reloadable(Number("guard-value-error", "PERCENT",
                        "Limit of what samples of V lose on average; 0: none.", kGuardErrorMax,
                        &Config::guard_value_error)),
      Reloadable(Number("guard-samples", "N",
                        "Samples of one namespace over which that is, one after the other.",
                        kGuardSamplesMax, &Config::guard_samples, /*min=*/1)),
      Begins("Reading it again",
             Switch("watch-config",
                    "Read --config and --tenants again when they change, as SIGHUP does.",
                    &Config::watch_config)),
  };
  return *options;
}

namespace {

// Messages end up in logs: what somebody put before the @ of an address is not repeated.
std::string WithoutPassword(absl::string_view value) {
  const std::size_t begin = value.find("://");
  const std::size_t end = value.rfind('@');
  if (begin == value.npos || end == value.npos || end < begin) return std::string(value);
  return absl::StrCat(value.substr(0, begin + 3), "...", value.substr(end));
}

// What would not come back from --print-config as it was, or end a path early.
absl::Status CheckText(absl::string_view value) {
  for (const char c : value) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      return absl::InvalidArgumentError("has a control character");
    }
  }
  return IsUtf8(value) ? absl::OkStatus() : absl::InvalidArgumentError("is not UTF-8");
}

absl::Status CheckTls(const Config& config) {
  const bool any = config.tls.enabled() || !config.tls.certificate.empty() ||
                   !config.tls.key.empty() || !config.tls.server_name.empty();
  if (!any) {
    if (!config.tls_peers.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--tls-peers ", config.tls_peers,
                                                     ": needs --tls-cert, --tls-key and --tls-ca"));
    }
    return MakeIdentities(config).status();
  }
  if (config.insecure) {
    return absl::InvalidArgumentError("--insecure with --tls-...: want one of them");
  }
  if (!config.tls.enabled() || config.tls.certificate.empty() || config.tls.key.empty()) {
    return absl::InvalidArgumentError(
        "TLS wants --tls-cert, --tls-key and --tls-ca, all three of them");
  }
  KVMILL_RETURN_IF_ERROR(CheckTlsFiles(config.tls));
  KVMILL_RETURN_IF_ERROR(CheckTlsUses(config.tls, {.server = true}));
  return MakeIdentities(config).status();
}

}  // namespace

const std::vector<OptionInfo>& ConfigOptions() {
  static const auto* infos = [] {
    auto* made = new std::vector<OptionInfo>;
    const Config defaults;
    for (const Option& option : Options()) {
      made->push_back(option.info);
      if (made->back().group.empty() && made->size() > 1) {
        made->back().group = (*made)[made->size() - 2].group;
      }
      if (!option.info.value_name.empty()) made->back().default_value = option.get(defaults);
    }
    return made;
  }();
  return *infos;
}

std::string GetOption(absl::string_view name, const Config& config) {
  for (const Option& option : Options()) {
    if (option.info.name == name) return option.get(config);
  }
  return "";
}

absl::Status SetOption(absl::string_view name, absl::string_view value, Config* config) {
  for (const Option& option : Options()) {
    if (option.info.name != name) continue;
    absl::Status status = CheckText(value);
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat(name, " \"", absl::Utf8SafeCEscape(value),
                                                      "\": ", status.message()));
    }
    status = option.set(value, config);
    if (status.ok()) return status;
    return absl::Status(
        status.code(), absl::StrCat(name, " \"", WithoutPassword(value), "\": ", status.message()));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown option \"", name, "\""));
}

absl::Status CheckConfig(const Config& config) {
  const std::size_t door_bytes = DoorPath(config.socket).size();
  const std::size_t socket_bytes_max =
      sizeof(sockaddr_un{}.sun_path) - 1 - (door_bytes - config.socket.size());
  if (config.socket.empty() || config.socket.size() > socket_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--socket ", config.socket, ": path of ", config.socket.size(), " bytes, want 1 to ",
        socket_bytes_max, " (its local door has a longer name)"));
  }
  for (const auto& [name, value] :
       {std::pair<const char*, const std::string&>("listen", config.listen),
        {"admin", config.admin}}) {
    if (!value.empty() && !config.insecure && !config.tls.enabled()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--", name, " ", value,
                       ": a TCP listener wants --tls-cert, --tls-key and --tls-ca, or, where "
                       "whoever reaches it may do everything, --insecure"));
    }
  }
  if (config.rdma == "required" && config.ucx.empty()) {
    return absl::InvalidArgumentError("--rdma required: is of the data plane, wants --ucx");
  }
  if (const absl::Status status = CheckTls(config); !status.ok()) return status;
  KVMILL_RETURN_IF_ERROR(ReadTenantQuotas(config.tenants).status());
  // Again, of a Config that nobody parsed.
  const struct {
    const char* name;
    std::uint64_t bytes, min;
    bool or_none;
  } sizes[] = {{"host-bytes", config.host_bytes, kHostBytesMin, false},
               {"gpu-bytes", config.gpu_bytes, kGpuBytesMin, true},
               {"replication-rate", config.replication_rate, kReplicationRateMin, false}};
  for (const auto& size : sizes) {
    if (const absl::Status s = CheckBytes(size.bytes, size.min, size.or_none); !s.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", size.name, " ", FormatBytes(size.bytes), ": ", s.message()));
    }
  }
  const struct {
    const char* tier;
    std::uint32_t high, low;
  } marks[] = {{"host", config.host_high_watermark, config.host_low_watermark},
               {"gpu", config.gpu_high_watermark, config.gpu_low_watermark}};
  for (const auto& mark : marks) {
    if (mark.low < mark.high) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", mark.tier, "-low-watermark ", mark.low,
                                                   ": want less than --", mark.tier,
                                                   "-high-watermark, ", mark.high));
  }
  if (config.guard_action != "alert" && config.error_sample_interval == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--guard-action ", config.guard_action,
                     ": looks at samples, and --error-sample-interval 0 takes none"));
  }
  // Of a GPU that is there CheckEncodes (service/node_devices.h) says so.
  if (config.encode_algorithm == "refined" && config.gpu_bytes > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--encode-algorithm refined: no kernel of a GPU does it; want kvarn, or none "
                     "of --gpu-bytes ",
                     FormatBytes(config.gpu_bytes)));
  }
  KVMILL_RETURN_IF_ERROR(DiskKeysOf(config).status());
  KVMILL_RETURN_IF_ERROR(CheckEvents(config));
  return CheckCluster(config);
}

absl::StatusOr<Identities> MakeIdentities(const Config& config) {
  if (!config.tls.enabled()) {
    Identities named(std::vector<std::string>{});
    if (!config.tenants.empty()) KVMILL_RETURN_IF_ERROR(named.Read(config.tenants));
    if (!named.names_somebody()) return Identities();
    return absl::InvalidArgumentError(absl::StrCat("--tenants ", config.tenants,
                                                   ": names certificates or tokens: needs "
                                                   "--tls-cert, --tls-key and --tls-ca"));
  }
  std::vector<std::string> nodes = absl::StrSplit(config.tls_peers, ',', absl::SkipWhitespace());
  if (nodes.empty()) {
    KVMILL_ASSIGN_OR_RETURN(nodes, NamesOfCertificate(config.tls.certificate));
    std::erase(nodes, "localhost");  // Everybody's.
    if (nodes.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tls-cert ", config.tls.certificate,
                       ": names localhost alone: want --tls-peers NAME, what nodes' certificates "
                       "are known by"));
    }
  }
  Identities identities(std::move(nodes));
  if (!config.tenants.empty()) KVMILL_RETURN_IF_ERROR(identities.Read(config.tenants));
  return identities;
}

absl::StatusOr<HostPort> ParseUcxAddress(absl::string_view text) {
  HostPort address;
  const bool bare_ipv6 = text.find(':') != text.rfind(':') && text.substr(0, 1) != "[";
  if (bare_ipv6 || text.find(':') == text.npos) {
    address.host = std::string(text);
  } else if (text.substr(0, 1) == "[" && text.substr(text.size() - 1) == "]") {
    address.host = std::string(text.substr(1, text.size() - 2));
  } else {
    KVMILL_ASSIGN_OR_RETURN(address, ParseHostPort(text));
  }
  in6_addr ipv6{};
  in_addr ipv4{};
  if (address.host.empty() || (inet_pton(AF_INET, address.host.c_str(), &ipv4) != 1 &&
                               inet_pton(AF_INET6, address.host.c_str(), &ipv6) != 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("want a numeric address with or without a port, not \"", text, "\""));
  }
  if (address.host == "0.0.0.0" || (address.is_ipv6() && IN6_IS_ADDR_UNSPECIFIED(&ipv6))) {
    return absl::InvalidArgumentError(
        "want one address of this host, which others are told: \"all of them\" is none");
  }
  constexpr std::uint16_t kPortMax = 65535 - kDataPortsMax;
  if (address.port > kPortMax) {
    return absl::InvalidArgumentError(absl::StrCat("port ", address.port, ": want at most ",
                                                   kPortMax, ", the data port is one ", "of the ",
                                                   kDataPortsMax, " that follow"));
  }
  return address;
}

}  // namespace kvmill
