// Log lines of a library in somebody else's process: warnings and errors go to standard error as
// they are. It stands in for storage/core/log.cc, whose logging library an engine may have in a
// version of its own.
#include "storage/core/log.h"

#include <cstdio>

namespace kvmill {

absl::Status SetLogLevel(absl::string_view) {
  return absl::UnimplementedError("the shared library has no log levels");
}
absl::Status SetLogFormat(absl::string_view) {
  return absl::UnimplementedError("the shared library has no log formats");
}

void LogDebug(absl::string_view, absl::Span<const LogField>, const char*, int) {}
void LogInfo(absl::string_view, absl::Span<const LogField>, const char*, int) {}
void LogAudit(absl::string_view, absl::Span<const LogField>) {}

void LogWarning(absl::string_view message, absl::Span<const LogField>, const char*, int) {
  std::fprintf(stderr, "kvmill: warning: %.*s\n", static_cast<int>(message.size()), message.data());
}

void LogError(absl::string_view message, absl::Span<const LogField>, const char*, int) {
  std::fprintf(stderr, "kvmill: error: %.*s\n", static_cast<int>(message.size()), message.data());
}

LogScope::LogScope(Fields fields, const void* of) : fields_(fields), of_(of), outer_(nullptr) {}
LogScope::~LogScope() = default;
std::vector<LogField> FieldsOfThread() { return {}; }
std::uint64_t SuppressedLogLines() { return 0; }

}  // namespace kvmill
