#include "service/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "service/config.h"

namespace kvmill {
namespace {

constexpr char kFooter[] =
    "Sizes take B, KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB (1000); durations ms, s, m, h.\n"
    "Flags win over the file. Example: kvmilld --data-dir /var/lib/kvmill --host-bytes 16GiB";

// The parser; what it finds goes to `flags`, which must outlive it.
std::unique_ptr<CLI::App> MakeParser(Flags* flags) {
  auto app = std::make_unique<CLI::App>(
      "kvmilld: stores KV-cache blocks of this node's engines as KVarN tiles.", "kvmilld");
  app->set_help_flag();  // Ours below: help is not an error here.
  app->footer(kFooter);
  app->get_formatter()->column_width(44);
  app->add_option("--config", flags->config_file,
                  "YAML file; its keys are the flags with underscores")
      ->type_name("FILE");
  for (const OptionInfo& option : ConfigOptions()) {
    const std::string name = option.name;
    if (option.value_name.empty()) {
      app->add_flag_callback(
          "--" + name, [flags, name] { flags->options.emplace_back(name, "true"); }, option.help);
      continue;
    }
    app->add_option_function<std::string>(
           "--" + name,
           [flags, name](const std::string& value) {
             if (value.rfind("--", 0) == 0) {  // The next flag, taken for a forgotten value.
               throw CLI::ValidationError("--" + name, "needs a value, not " + value);
             }
             flags->options.emplace_back(name, value);
           },
           option.default_value.empty()
               ? option.help
               : absl::StrCat(option.help, " (default ", option.default_value, ")"))
        ->type_name(option.value_name)
        ->take_last();
  }
  app->add_flag("--check-config", flags->check_config, "Check the configuration and exit");
  app->add_flag("--print-config", flags->print_config, "Print the configuration as YAML and exit");
  app->add_flag("--print-metrics", flags->print_metrics,
                "Print what /metrics has, as docs/metrics.md, and exit");
  app->add_flag("--print-options", flags->print_options,
                "Print what can be configured, as docs/configuration.md, and exit");
  app->add_flag("--help,-h", flags->help, "Print this and exit");
  app->add_flag("--version", flags->version, "Print the version and exit");
  return app;
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(absl::Span<const std::string> arguments) {
  Flags flags;
  const std::unique_ptr<CLI::App> app = MakeParser(&flags);
  std::vector<std::string> reversed;  // As CLI11 wants them.
  for (auto argument = arguments.rbegin(); argument != arguments.rend(); ++argument) {
    const std::size_t equals = argument->find('=');
    const std::string name = argument->substr(0, equals);
    const CLI::Option* option = app->get_option_no_throw(name);
    if (option == nullptr || equals == std::string::npos) {
      reversed.push_back(*argument);
      continue;
    }
    if (option->get_items_expected_max() == 0) {  // CLI11 would take `--insecure=yes`.
      return absl::InvalidArgumentError(absl::StrCat(name, " takes no value"));
    }
    // Apart, so that `--name=` is the empty value; CLI11 would take the next argument instead.
    reversed.push_back(argument->substr(equals + 1));
    reversed.push_back(name);
  }
  try {  // CLI11 throws; nothing of it leaves this function.
    app->parse(reversed);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(std::string(error.what()) + " (see kvmilld --help)");
  }
  return flags;
}

std::string FlagsHelp() {
  Flags flags;
  return MakeParser(&flags)->help();
}

}  // namespace kvmill
