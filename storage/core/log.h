// Logging to standard error. The layer that decides what an error means logs it; nothing logs per
// block or per page. Thread-safe. Messages carry values and never key material, salts or tokens'
// contents.
#ifndef KVMILL_STORAGE_CORE_LOG_H_
#define KVMILL_STORAGE_CORE_LOG_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmill {

// "trace", "debug", "info", "warn", "error" or "off"; INVALID_ARGUMENT otherwise. Until called the
// level is "info".
absl::Status SetLogLevel(absl::string_view level);

void LogDebug(absl::string_view message);
void LogInfo(absl::string_view message);
void LogWarning(absl::string_view message);
void LogError(absl::string_view message);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_LOG_H_
