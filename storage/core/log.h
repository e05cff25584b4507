// Logging to standard error: one event a line, as text or as JSON, with named fields besides the
// message. The layer that decides what an error means logs it; nothing logs per block or per page.
// Thread-safe. Messages and fields carry values and never key material, salts or tokens' contents.
//
// A place in the code logs at most kLogLinesMax lines in kLogWindowSeconds; what is above that is
// counted and left out, so that a full disk or a peer that lies floods nobody.
#ifndef KVMILL_STORAGE_CORE_LOG_H_
#define KVMILL_STORAGE_CORE_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

inline constexpr std::uint32_t kLogLinesMax = 20;
inline constexpr std::int64_t kLogWindowSeconds = 10;

// "trace", "debug", "info", "warn", "error" or "off"; INVALID_ARGUMENT otherwise. Until called the
// level is "info".
absl::Status SetLogLevel(absl::string_view level);
// "text" or "json"; INVALID_ARGUMENT otherwise. Until called it is "text".
absl::Status SetLogFormat(absl::string_view format);

// A value that programs read. Names are lower case with underscores, other than ts, level and msg;
// values are any bytes.
struct LogField {
  std::string name;
  std::string value;
};

// `file` and `line` are the place that is counted; callers leave them alone.
void LogDebug(absl::string_view message, absl::Span<const LogField> fields = {},
              const char* file = __builtin_FILE(), int line = __builtin_LINE());
void LogInfo(absl::string_view message, absl::Span<const LogField> fields = {},
             const char* file = __builtin_FILE(), int line = __builtin_LINE());
void LogWarning(absl::string_view message, absl::Span<const LogField> fields = {},
                const char* file = __builtin_FILE(), int line = __builtin_LINE());
void LogError(absl::string_view message, absl::Span<const LogField> fields = {},
              const char* file = __builtin_FILE(), int line = __builtin_LINE());
// What an administrator had done: as LogInfo, with the field audit, and never left out, whatever
// the level.
void LogAudit(absl::string_view message, absl::Span<const LogField> fields = {});

// While it lives all lines of this thread have these fields, too. One within another: the inner
// one's come after.
class LogScope {
 public:
  using Fields = std::vector<LogField> (*)(const void* of);
  // `fields(of)` are asked for when there is a line: a scope costs nothing before.
  LogScope(Fields fields, const void* of);
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

 private:
  friend std::vector<LogField> FieldsOfThread();
  const Fields fields_;
  const void* const of_;
  const LogScope* const outer_;
};
// Those of the scopes that this thread is in, the outermost first.
std::vector<LogField> FieldsOfThread();

// Lines that were left out since the start.
std::uint64_t SuppressedLogLines();

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_LOG_H_
