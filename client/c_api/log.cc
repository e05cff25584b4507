// Log lines of a library in somebody else's process: warnings and errors go to standard error as
// they are. It stands in for storage/core/log.cc, whose logging library an engine may have in a
// version of its own.
#include "storage/core/log.h"

#include <cstdio>

namespace kvmill {

absl::Status SetLogLevel(absl::string_view) {
  return absl::UnimplementedError("the shared library has no log levels");
}

void LogDebug(absl::string_view) {}
void LogInfo(absl::string_view) {}

void LogWarning(absl::string_view message) {
  std::fprintf(stderr, "kvmill: warning: %.*s\n", static_cast<int>(message.size()), message.data());
}

void LogError(absl::string_view message) {
  std::fprintf(stderr, "kvmill: error: %.*s\n", static_cast<int>(message.size()), message.data());
}

}  // namespace kvmill
