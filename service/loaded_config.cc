#include "service/loaded_config.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "client/server_address.h"
#include "service/config_options.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

const char* OptionSourceName(OptionSource source) {
  switch (source) {
    case OptionSource::kDefault:
      return "default";
    case OptionSource::kFile:
      return "file";
    case OptionSource::kFlag:
      return "flag";
  }
  return "";
}

absl::StatusOr<LoadedConfig> LoadConfig(const ConfigInputs& inputs) {
  LoadedConfig loaded;
  for (const Option& option : Options()) loaded.sources[option.info.name] = OptionSource::kDefault;
  if (!inputs.file.empty()) {
    std::set<std::string> names;
    KVMILL_RETURN_IF_ERROR(ApplyYamlFile(inputs.file, &loaded.config, &names));
    for (const std::string& name : names) loaded.sources[name] = OptionSource::kFile;
  }
  for (const auto& [name, value] : inputs.flags) {
    if (const absl::Status status = SetOption(name, value, &loaded.config); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("--", status.message()));
    }
    loaded.sources[name] = OptionSource::kFlag;
  }
  if (loaded.config.socket.empty()) {
    loaded.config.socket = DefaultSocketPath(inputs.runtime_dir);
  }
  loaded.config.etcd_password = inputs.etcd_password;
  loaded.config.disk_keys = inputs.disk_keys;
  return loaded;
}

std::vector<std::string> ChangedOptions(const Config& from, const Config& to) {
  std::vector<std::string> names;
  for (const Option& option : Options()) {
    if (option.get(from) != option.get(to)) names.push_back(option.info.name);
  }
  return names;
}

Config WithReloadable(const Config& running, const Config& wanted) {
  Config config = running;
  for (const Option& option : Options()) {
    // A value that came out of `set` goes in again.
    if (option.info.reloadable) KVMILL_CHECK(option.set(option.get(wanted), &config).ok());
  }
  return config;
}

}  // namespace kvmill
