#include "storage/core/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "storage/core/clock.h"
#include "storage/core/log_line.h"

namespace kvmill {
namespace {

spdlog::logger* NewLogger() {
  auto* made = new spdlog::logger("kvmill", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  made->set_pattern("%v");  // Lines come whole.
  made->flush_on(spdlog::level::debug);
  return made;
}

// Leaked on purpose, as the limiter below: threads may log while the process exits.
spdlog::logger& Logger() {
  static spdlog::logger* logger = NewLogger();
  return *logger;
}

// Whoever may change the level does not silence what says who did.
spdlog::logger& AuditLogger() {
  static spdlog::logger* logger = NewLogger();
  return *logger;
}

LogLimiter& Limiter() {
  static auto* limiter = new LogLimiter;
  return *limiter;
}

std::atomic<bool> as_json{false};  // A stale value is a line in the format of before.
thread_local const LogScope* scope_of_thread = nullptr;

absl::string_view NameOf(spdlog::level::level_enum level) {
  const auto name = spdlog::level::to_string_view(level);
  return absl::string_view(name.data(), name.size());
}

void Write(spdlog::logger& logger, spdlog::level::level_enum level, absl::string_view message,
           absl::Span<const LogField> fields, LogField more = {}) {
  std::vector<LogField> all = FieldsOfThread();
  all.insert(all.end(), fields.begin(), fields.end());
  if (!more.name.empty()) all.push_back(std::move(more));
  const auto line = as_json.load(std::memory_order_relaxed) ? &JsonLine : &TextLine;
  logger.log(level, spdlog::string_view_t(line(absl::Now(), NameOf(level), message, all)));
}

void Log(spdlog::level::level_enum level, absl::string_view message,
         absl::Span<const LogField> fields, const char* file, int line) {
  if (!Logger().should_log(level)) return;
  const LogLimiter::Answer answer = Limiter().Admit(file, line, SystemClock().MonotonicNanos());
  switch (answer.verdict) {
    case LogLimiter::Verdict::kLog:
      return Write(Logger(), level, message, fields);
    case LogLimiter::Verdict::kLogAfterGap:
      return Write(Logger(), level, message, fields, {"left_out", absl::StrCat(answer.left_out)});
    case LogLimiter::Verdict::kLogThatFull:
      return Write(Logger(), level,
                   absl::StrCat("more lines of one kind are left out for up to ", kLogWindowSeconds,
                                " s, after ", kLogLinesMax, ": ", message),
                   fields);
    case LogLimiter::Verdict::kLeaveOut:
      return;
  }
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

absl::Status SetLogFormat(absl::string_view format) {
  if (format != "text" && format != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("log format \"", format, "\": want text or json"));
  }
  as_json.store(format == "json", std::memory_order_relaxed);
  return absl::OkStatus();
}

void LogDebug(absl::string_view message, absl::Span<const LogField> fields, const char* file,
              int line) {
  Log(spdlog::level::debug, message, fields, file, line);
}
void LogInfo(absl::string_view message, absl::Span<const LogField> fields, const char* file,
             int line) {
  Log(spdlog::level::info, message, fields, file, line);
}
void LogWarning(absl::string_view message, absl::Span<const LogField> fields, const char* file,
                int line) {
  Log(spdlog::level::warn, message, fields, file, line);
}
void LogError(absl::string_view message, absl::Span<const LogField> fields, const char* file,
              int line) {
  Log(spdlog::level::err, message, fields, file, line);
}

void LogAudit(absl::string_view message, absl::Span<const LogField> fields) {
  Write(AuditLogger(), spdlog::level::info, message, fields, {"audit", "true"});
}

LogScope::LogScope(Fields fields, const void* of)
    : fields_(fields), of_(of), outer_(std::exchange(scope_of_thread, this)) {}

LogScope::~LogScope() { scope_of_thread = outer_; }

std::vector<LogField> FieldsOfThread() {
  std::vector<LogField> fields;
  std::vector<const LogScope*> scopes;
  for (const LogScope* s = scope_of_thread; s != nullptr; s = s->outer_) scopes.push_back(s);
  for (auto s = scopes.rbegin(); s != scopes.rend(); ++s) {
    for (LogField& field : (*s)->fields_((*s)->of_)) fields.push_back(std::move(field));
  }
  return fields;
}

std::uint64_t SuppressedLogLines() { return Limiter().left_out(); }

}  // namespace kvmill
