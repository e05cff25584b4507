// namespaces: what a daemon knows by which name, and what its guard has against it.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/human.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kHelp =
    "Namespaces that the daemon knows, of all tenants. An admin command: on the daemon's --admin "
    "address, or\n"
    "on its socket for its own user and root.\n"
    "  lost K, lost V = what samples of its tiles lost on average when that was more than the "
    "limits of\n"
    "                   kvmilld --guard-...; - as long as it was not\n"
    "  guard          = alert: that was all; refused: it takes no more blocks, and what engines "
    "are to use\n"
    "                   instead (OpenNamespaceOrFallback does)\n";

std::string FormatName(const NamespaceSpec& spec) {
  return ToString(FormatOf(spec, spec.groups.front()));  // A valid spec has a group.
}

Json ToJson(const ClientNamespace& ns) {
  const std::optional<NamespaceTrip>& trip = ns.trip;
  const bool names = trip.has_value() && !trip->fallback_name.empty();
  return {{"namespace", ns.name},
          {"tenant", ns.spec.tenant},
          {"fingerprint", ToHex(ns.fingerprint)},
          {"format", FormatName(ns.spec)},
          {"sink_blocks", ns.spec.sink_blocks},
          {"tripped", trip.has_value()},
          {"refuses_stores", trip.has_value() && trip->refuses_stores},
          {"error_k", trip.has_value() ? Json(trip->key_error) : Json()},
          {"error_v", trip.has_value() ? Json(trip->value_error) : Json()},
          {"fallback", names ? Json(trip->fallback_name) : Json()}};
}

std::string GuardText(const NamespaceTrip& trip) {
  if (!trip.refuses_stores) return "alert";
  return trip.fallback_name.empty() ? "refused" : absl::StrCat("refused: ", trip.fallback_name);
}

absl::Status Print(const CommonFlags& common) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const std::vector<ClientNamespace> all, client->Namespaces());
  if (common.json) {
    Json list = Json::array();
    for (const ClientNamespace& ns : all) list.push_back(ToJson(ns));
    PrintJson(list);
    return absl::OkStatus();
  }
  Table table({{"namespace", Table::Align::kLeft},
               {"tenant", Table::Align::kLeft},
               {"format", Table::Align::kLeft},
               {"sink blocks", Table::Align::kRight},
               {"lost K", Table::Align::kRight},
               {"lost V", Table::Align::kRight},
               {"guard", Table::Align::kLeft}});
  for (const ClientNamespace& ns : all) {
    const bool tripped = ns.trip.has_value();
    table.Add({ns.name, ns.spec.tenant, FormatName(ns.spec),
               ns.spec.sink_blocks == kAllBlocksRaw ? "all" : absl::StrCat(ns.spec.sink_blocks),
               tripped ? HumanPercent(ns.trip->key_error) : "-",
               tripped ? HumanPercent(ns.trip->value_error) : "-",
               tripped ? GuardText(*ns.trip) : ""});
  }
  table.Print();
  return absl::OkStatus();
}

}  // namespace

void AddNamespacesCommand(CommandLine& line) {
  line.Add(line.root(), "namespaces", "Namespaces of the daemon, and what its guard says", kHelp,
           [&line] { return Print(line.flags()); });
}

}  // namespace kvmill::cli
