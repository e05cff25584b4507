// kvmilld's command line, from the option table of config.h.
#ifndef KVMILL_SERVICE_FLAGS_H_
#define KVMILL_SERVICE_FLAGS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmill {

struct Flags {
  std::string config_file;  // --config; empty: none.
  bool check_config = false;
  bool print_config = false;
  bool print_metrics = false;
  bool print_options = false;
  bool help = false;
  bool version = false;
  // (option name, value) of the others, for SetOption, after the file. Of a repeated one the last.
  std::vector<std::pair<std::string, std::string>> options;
};

// `--name value`, `--name=value`, and `--name` for switches. INVALID_ARGUMENT naming the argument:
// an unknown one, a value that is missing.
absl::StatusOr<Flags> ParseFlags(absl::Span<const std::string> arguments);

// The text of --help.
std::string FlagsHelp();

}  // namespace kvmill

#endif  // KVMILL_SERVICE_FLAGS_H_
