// config: what a daemon is configured to, and where from.
#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

constexpr const char* kHelp =
    "The configuration that is in force in the daemon, without secrets. An admin command: on the "
    "daemon's\n"
    "--admin address, or on its socket for its own user and root. Without --all only what is not "
    "the default.\n"
    "  source  = default, file or flag\n"
    "  pending = what the file has since it was read again (SIGHUP), and only another start takes "
    "over\n"
    "Exit code 1 when what was last read again is refused: then `problem` says why, and what was "
    "before is in\n"
    "force.\n";

Json OptionJson(const DaemonConfig::Option& option) {
  return {{"value", option.value},
          {"source", option.source},
          {"default", option.default_value},
          {"reloadable", option.reloadable},
          {"pending", option.pending.has_value() ? Json(*option.pending) : Json()}};
}

std::string Shown(const std::string& value) { return value.empty() ? "none" : value; }

absl::Status Print(const CommonFlags& common, bool all) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(common));
  KVMILL_ASSIGN_OR_RETURN(const DaemonConfig config, client->Configuration());
  const std::string loaded =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", config.loaded, absl::UTCTimeZone());
  if (common.json) {
    Json options = Json::object();
    for (const DaemonConfig::Option& option : config.options) {
      options[option.name] = OptionJson(option);
    }
    PrintJson({{"file", config.file.empty() ? Json() : Json(config.file)},
               {"loaded", loaded},
               {"reloads_applied", config.reloads_applied},
               {"reloads_refused", config.reloads_refused},
               {"problem", config.problem},
               {"options", std::move(options)}});
  } else {
    std::cout << "file " << Shown(config.file) << ", read " << loaded << ", again "
              << config.reloads_applied << " times, refused " << config.reloads_refused
              << " times\n";
    Table table({{"option", Table::Align::kLeft},
                 {"value", Table::Align::kLeft},
                 {"source", Table::Align::kLeft},
                 {"pending", Table::Align::kLeft}});
    for (const DaemonConfig::Option& option : config.options) {
      const bool is_default = option.value == option.default_value && !option.pending.has_value();
      if (is_default && !all) continue;
      table.Add({option.name, Shown(option.value), option.source,
                 option.pending.has_value() ? Shown(*option.pending) : ""});
    }
    table.Print();
  }
  if (config.problem.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("refused: ", config.problem));
}

}  // namespace

void AddConfigCommand(CommandLine& line) {
  const auto all = std::make_shared<bool>(false);  // Of the command's closure.
  CLI::App* app = line.Add(line.root(), "config", "What the daemon is configured to", kHelp,
                           [&line, all] { return Print(line.flags(), *all); });
  app->add_flag("--all", *all, "Defaults, too");
}

}  // namespace kvmill::cli
