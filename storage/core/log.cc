#include "storage/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

spdlog::logger& Logger() {
  // Leaked on purpose: threads may log while the process exits.
  static spdlog::logger* logger = [] {
    auto* made = new spdlog::logger("kvmill", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *logger;
}

}  // namespace

absl::Status SetLogLevel(absl::string_view level) {
  for (const char* known : {"trace", "debug", "info", "warn", "error", "off"}) {
    if (level == known) {
      Logger().set_level(spdlog::level::from_str(known));
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level \"", level, "\": want trace, debug, info, warn, error or off"));
}

void LogDebug(absl::string_view message) { Logger().debug("{}", std::string(message)); }
void LogInfo(absl::string_view message) { Logger().info("{}", std::string(message)); }
void LogWarning(absl::string_view message) { Logger().warn("{}", std::string(message)); }
void LogError(absl::string_view message) { Logger().error("{}", std::string(message)); }

}  // namespace kvmill
