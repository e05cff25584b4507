// The configuration that is in force, and what became of reading it again.
#ifndef KVMILL_SERVICE_RUNNING_CONFIG_H_
#define KVMILL_SERVICE_RUNNING_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "service/loaded_config.h"
#include "storage/core/clock.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe. What the daemon shows (Admin.Config, /metrics) is here; Reloader writes it.
class RunningConfig {
 public:
  // What the daemon starts with; it passed CheckConfig.
  RunningConfig(LoadedConfig started, std::string file, const Clock& clock);

  Config config() const;
  const std::string& file() const { return file_; }  // Empty: none.

  struct Option {
    std::string name, value, default_value;
    OptionSource source = OptionSource::kDefault;
    bool reloadable = false;
    // What file and flags have since it was read again, and only another start would take over.
    std::optional<std::string> pending;
  };
  std::vector<Option> Options() const;

  struct Stats {
    std::uint64_t applied = 0, refused = 0;  // Times that it was read again.
    bool last_refused = false;
    std::int64_t loaded_unix_millis = 0;  // When what is in force was read.
    std::uint64_t pending_options = 0;
    std::string problem;  // Why the last reading was refused; empty: it was not.
  };
  Stats stats() const;

  // `effective` is in force, `wanted` what file and flags say.
  void Applied(const Config& effective, LoadedConfig wanted);
  void Refused(const absl::Status& why);

 private:
  const std::string file_;
  const Clock& clock_;
  mutable Mutex mu_;
  Config effective_ ABSL_GUARDED_BY(mu_);
  LoadedConfig wanted_ ABSL_GUARDED_BY(mu_);
  Stats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_RUNNING_CONFIG_H_
