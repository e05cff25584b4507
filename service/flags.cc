#include "service/flags.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/config.h"

namespace kvmill {
namespace {

constexpr const char* kSwitches[][2] = {
    {"check-config", "Check the configuration and exit."},
    {"print-config", "Print the configuration as YAML and exit."},
    {"help", "Print this and exit."},
    {"version", "Print the version and exit."},
};

std::string HelpLine(const std::string& name, const std::string& value_name,
                     const std::string& help) {
  std::string line = absl::StrCat("  --", name, value_name.empty() ? "" : " ", value_name);
  line.resize(std::max<std::size_t>(line.size() + 2, 34), ' ');
  return absl::StrCat(line, help, "\n");
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(absl::Span<const std::string> arguments) {
  Flags flags;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!absl::StartsWith(argument, "--")) {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument \"", argument, "\""));
    }
    const std::size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const auto& options = ConfigOptions();
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const OptionInfo& o) { return o.name == name; });
    const bool known_switch = std::any_of(std::begin(kSwitches), std::end(kSwitches),
                                          [&](const auto& known) { return name == known[0]; }) ||
                              (option != options.end() && option->value_name.empty());
    if (known_switch) {
      if (equals != std::string::npos) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " takes no value"));
      }
      flags.check_config = flags.check_config || name == "check-config";
      flags.print_config = flags.print_config || name == "print-config";
      flags.help = flags.help || name == "help";
      flags.version = flags.version || name == "version";
      if (option != options.end()) flags.options.emplace_back(name, "true");
      continue;
    }
    if (name != "config" && option == options.end()) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag --", name, "; see --help"));
    }
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (++i < arguments.size()) {
      value = arguments[i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
    }
    if (name == "config") {
      flags.config_file = value;
    } else {
      flags.options.emplace_back(name, value);
    }
  }
  return flags;
}

std::string FlagsHelp() {
  std::string help =
      "kvmilld: stores KV-cache blocks of this node's engines as KVarN tiles.\n"
      "Usage: kvmilld [flags]\n\n";
  help += HelpLine("config", "FILE", "YAML file; its keys are the flags with underscores.");
  for (const OptionInfo& option : ConfigOptions()) {
    help += HelpLine(option.name, option.value_name, option.help);
  }
  for (const auto& known : kSwitches) help += HelpLine(known[0], "", known[1]);
  help += "\nSizes take B, KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB (1000).\n";
  return help;
}

}  // namespace kvmill
