// docs/configuration.md, from the table of config.cc.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "service/config.h"
#include "service/config_options.h"

namespace kvmill {
namespace {

constexpr char kIntroduction[] =
    "# Configuration\n"
    "\n"
    "`kvmilld --print-options` prints this page. What the options are for is explained where they "
    "belong: [operations](operations.md), [security](security.md), "
    "[contracts](contracts.md#flags).\n"
    "\n"
    "Every option is a flag (`--host-bytes 16GiB`, `--host-bytes=16GiB`) and a key of the YAML "
    "file "
    "that `--config FILE` names (`host_bytes: 16GiB`), a flat map of scalars in UTF-8, up to 1 "
    "MiB. "
    "Flags win over the file, the file over defaults. The file is read\n"
    "strictly: an unknown or repeated key, a value that is no scalar, has the wrong unit or is out "
    "of range is an error with file and line, and nothing starts or changes.\n"
    "\n"
    "- `SIZE`: a number with `B`, `KiB`, `MiB`, `GiB`, `TiB` (1024) or `KB`, `MB`, `GB`, `TB` "
    "(1000); without a unit bytes. Below 2^63.\n"
    "- `DURATION`: numbers with `ms`, `s`, `m`, `h`: `250ms`, `1m30s`.\n"
    "- `HOST:PORT`: or `[IPv6]:PORT`; port 0 picks a free one.\n"
    "- Switches are flags without a value, and `true` or `false` in the file.\n"
    "- Secrets are never values: they are in files that options name, or in the environment.\n"
    "\n"
    "`kvmilld --config FILE --check-config` says whether a configuration is good, `--print-config` "
    "what comes out of it, `kvmill config` what a running daemon has and where from.\n"
    "\n"
    "## Changes while it runs\n"
    "\n"
    "SIGHUP has the daemon read the file again, and what `--tenants` names, with the flags of its "
    "start over it. With `--watch-config` it does so by itself: it looks every 2 s, and takes "
    "contents over that stayed the same for two looks, through\n"
    "symbolic links too (a ConfigMap of Kubernetes). The whole is checked as at the start. When "
    "anything is wrong nothing changes, the log has one error, and `kvmill_config_refused` is 1 "
    "until a good one was read. Options marked *yes* below hold from then\n"
    "on; others that differ keep their values until another start, and are named in one warning, "
    "in "
    "`kvmill config` (`pending`) and in `kvmill_config_pending_options`. Certificates and keys are "
    "looked at every 5 s in any case.\n"
    "\n"
    "- `tenants`, `tls-peers`: calls that begin; one that runs goes on. Connections of the data "
    "plane of tenants that lost a name or a token are closed. Quotas: at once; what is above a "
    "lower "
    "one leaves in the background.\n"
    "- `peer-timeout`, `replication-rate`, `error-sample-interval`: what begins.\n"
    "- `session-grace`: sessions that are there, too. Their clients were told the old one.\n"
    "- `metrics-namespaces`: a namespace that has a histogram keeps it.\n"
    "- `guard-action`, `guard-key-error`, `guard-value-error`: namespaces that have tripped, too: "
    "one that is within new limits takes blocks again, and is measured again.\n"
    "\n";

constexpr char kExample[] =
    "## Example\n"
    "\n"
    "```yaml\n"
    "# A node of a cluster. What differs from node to node is better a flag: --node-id, "
    "--advertise.\n"
    "listen: \"0.0.0.0:7600\"\n"
    "admin: \"127.0.0.1:7601\"\n"
    "metrics: \"0.0.0.0:7640\"\n"
    "tls_cert: /etc/kvmill/tls/tls.crt\n"
    "tls_key: /etc/kvmill/tls/tls.key\n"
    "tls_ca: /etc/kvmill/tls/ca.crt\n"
    "tls_server_name: kvmill.example\n"
    "tenants: /etc/kvmill/tenants.yaml\n"
    "host_bytes: 64GiB\n"
    "data_dir: /var/lib/kvmill\n"
    "disk_bytes: 1TiB\n"
    "cluster: \"etcd://etcd-0:2379,etcd-1:2379,etcd-2:2379\"\n"
    "copies: 1\n"
    "replication_rate: 128MiB\n"
    "drain_timeout: 5m\n"
    "log_format: json\n"
    "watch_config: true\n"
    "```\n";

std::string Code(absl::string_view text) {
  return absl::StrCat("`", absl::StrReplaceAll(text, {{"|", "\\|"}}), "`");
}

// What is allowed, as SetOption enforces it.
std::string Values(const OptionInfo& info) {
  if (!info.choices.empty()) {
    std::vector<std::string> shown;
    for (const std::string& choice : info.choices) {
      shown.push_back(choice.empty() ? "none" : Code(choice));
    }
    return absl::StrJoin(shown, ", ");
  }
  std::string text = Code(info.value_name);
  if (!info.min.empty() && !info.max.empty()) {
    absl::StrAppend(&text, ", ", Code(info.min), " to ", Code(info.max));
  } else if (!info.min.empty() && info.min != "0") {
    absl::StrAppend(&text, ", ", info.or_zero ? "`0` or " : "", "at least ", Code(info.min));
  }
  return text;
}

}  // namespace

std::string ConfigReference() {
  std::string text = kIntroduction;
  std::string group;
  for (const OptionInfo& info : ConfigOptions()) {
    if (info.group != group) {
      absl::StrAppend(&text, group.empty() ? "" : "\n", "## ", group = info.group, "\n\n",
                      "| flag | key | value | default | while it runs | meaning |\n"
                      "|---|---|---|---|---|---|\n");
    }
    const std::string default_value = info.value_name.empty() ? "false" : info.default_value;
    absl::StrAppend(
        &text, "| `--", info.name, "` | `", KeyOf(info.name), "` | ", Values(info), " | ",
        default_value.empty() ? "none" : Code(default_value), " | ", info.reloadable ? "yes" : "no",
        " | ", absl::StrReplaceAll(info.help, {{"|", "\\|"}}),
        info.environment.empty() ? "" : absl::StrCat(" Environment: `", info.environment, "`."),
        " |\n");
  }
  return absl::StrCat(text, "\n", kExample);
}

}  // namespace kvmill
