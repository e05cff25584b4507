#include "storage/core/log_line.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvmill {
namespace {

// UTC, with milliseconds.
std::string TimeText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

void AppendEscaped(absl::string_view text, bool quoted, std::string* out) {
  for (const char c : text) {
    if (c == '\n') {
      out->append("\\n");
    } else if (IsControl(c)) {
      absl::StrAppendFormat(out, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      if (quoted && (c == '"' || c == '\\')) out->push_back('\\');
      out->push_back(c);
    }
  }
}

}  // namespace

std::string TextLine(absl::Time time, absl::string_view level, absl::string_view message,
                     absl::Span<const LogField> fields) {
  std::string line = absl::StrCat(TimeText(time), " ", level, " ");
  AppendEscaped(message, /*quoted=*/false, &line);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.name, "=");
    const bool quoted =
        field.value.empty() || std::any_of(field.value.begin(), field.value.end(), [](char c) {
          return c == ' ' || c == '"' || c == '=' || c == '\\' || IsControl(c);
        });
    if (quoted) line.push_back('"');
    AppendEscaped(field.value, quoted, &line);
    if (quoted) line.push_back('"');
  }
  return line;
}

std::string JsonLine(absl::Time time, absl::string_view level, absl::string_view message,
                     absl::Span<const LogField> fields) {
  nlohmann::ordered_json line = {
      {"ts", TimeText(time)}, {"level", std::string(level)}, {"msg", std::string(message)}};
  for (const LogField& field : fields) line[field.name] = field.value;
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

LogLimiter::Answer LogLimiter::Admit(const char* file, int line, std::int64_t now_nanos) {
  constexpr std::int64_t kWindowNanos = kLogWindowSeconds * 1'000'000'000;
  MutexLock lock(mu_);
  Place& place = places_[{file, line}];
  if (place.lines == 0 || now_nanos - place.window_begin_nanos >= kWindowNanos) {
    const std::uint64_t left_out = std::exchange(place.left_out, 0);
    place.window_begin_nanos = now_nanos;
    place.lines = 1;
    if (left_out == 0) return {};
    return {Verdict::kLogAfterGap, left_out};
  }
  if (place.lines < kLogLinesMax) {
    ++place.lines;
    return {};
  }
  ++left_out_;
  return {++place.left_out == 1 ? Verdict::kLogThatFull : Verdict::kLeaveOut, place.left_out};
}

std::uint64_t LogLimiter::left_out() const {
  MutexLock lock(mu_);
  return left_out_;
}

}  // namespace kvmill
