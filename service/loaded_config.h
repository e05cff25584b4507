// The configuration as a whole: read from its sources, compared with another one.
#ifndef KVMILL_SERVICE_LOADED_CONFIG_H_
#define KVMILL_SERVICE_LOADED_CONFIG_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/config.h"

namespace kvmill {

// Where it comes from; what stays the same as long as the process lives.
struct ConfigInputs {
  std::string file;                                        // YAML; empty: none.
  std::vector<std::pair<std::string, std::string>> flags;  // As Flags::options.
  std::string runtime_dir;                                 // XDG_RUNTIME_DIR; may be empty.
  std::string etcd_password;                               // KVMILL_ETCD_PASSWORD; may be empty.
  std::shared_ptr<const EncryptionKeys> disk_keys;         // KVMILL_DISK_KEY; may be null.
};

enum class OptionSource { kDefault, kFile, kFlag };
const char* OptionSourceName(OptionSource source);  // "default", "file", "flag".

struct LoadedConfig {
  Config config;
  std::map<std::string, OptionSource> sources;  // Of every option.
};
// Defaults, the file over them, flags over that; not checked as a whole. Errors as ApplyYamlFile
// and SetOption.
absl::StatusOr<LoadedConfig> LoadConfig(const ConfigInputs& inputs);

// Names of the options that differ, in the order of the table.
std::vector<std::string> ChangedOptions(const Config& from, const Config& to);
// `running` with what of `wanted` can change while the daemon runs.
Config WithReloadable(const Config& running, const Config& wanted);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOADED_CONFIG_H_
