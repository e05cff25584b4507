#include "service/running_config.h"

#include <algorithm>
#include <utility>

namespace kvmill {

RunningConfig::RunningConfig(LoadedConfig started, std::string file, const Clock& clock)
    : file_(std::move(file)),
      clock_(clock),
      effective_(started.config),
      wanted_(std::move(started)) {
  stats_.loaded_unix_millis = clock_.UnixMillis();
}

Config RunningConfig::config() const {
  MutexLock lock(mu_);
  return effective_;
}

std::vector<RunningConfig::Option> RunningConfig::Options() const {
  MutexLock lock(mu_);
  std::vector<Option> options;
  for (const OptionInfo& info : ConfigOptions()) {
    Option option;
    option.name = info.name;
    option.value = GetOption(info.name, effective_);
    option.default_value = GetOption(info.name, Config());
    option.source = wanted_.sources.at(info.name);
    option.reloadable = info.reloadable;
    const std::string wanted = GetOption(info.name, wanted_.config);
    if (wanted != option.value) option.pending = wanted;
    options.push_back(std::move(option));
  }
  return options;
}

RunningConfig::Stats RunningConfig::stats() const {
  MutexLock lock(mu_);
  return stats_;
}

void RunningConfig::Applied(const Config& effective, LoadedConfig wanted) {
  const std::uint64_t pending = ChangedOptions(effective, wanted.config).size();
  const std::int64_t now = clock_.UnixMillis();
  MutexLock lock(mu_);
  effective_ = effective;
  // Of an option that waits for a start, the source is that of the value in force.
  for (auto& [name, source] : wanted.sources) {
    if (GetOption(name, effective) != GetOption(name, wanted.config)) {
      source = wanted_.sources.at(name);
    }
  }
  wanted_ = std::move(wanted);
  ++stats_.applied;
  stats_.last_refused = false;
  stats_.loaded_unix_millis = now;
  stats_.pending_options = pending;
  stats_.problem.clear();
}

void RunningConfig::Refused(const absl::Status& why) {
  MutexLock lock(mu_);
  ++stats_.refused;
  stats_.last_refused = true;
  stats_.problem = std::string(why.message());
}

}  // namespace kvmill
