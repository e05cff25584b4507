// How a line of the log is written, and when it is left out. Internal to log.cc and its tests.
#ifndef KVMILL_STORAGE_CORE_LOG_LINE_H_
#define KVMILL_STORAGE_CORE_LOG_LINE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"

namespace kvmill {

// "2026-05-04T10:20:30.123Z info message name=value": a value with spaces, quotes or an equals sign
// is quoted. Control characters are escaped, in the message too: one event is one line, whatever a
// peer put in its message. No line end.
std::string TextLine(absl::Time time, absl::string_view level, absl::string_view message,
                     absl::Span<const LogField> fields);
// {"ts":"...","level":"info","msg":"message","name":"value"}. What is not UTF-8 becomes U+FFFD; of
// fields with one name the last one stays. No line end.
std::string JsonLine(absl::Time time, absl::string_view level, absl::string_view message,
                     absl::Span<const LogField> fields);

// Thread-safe.
class LogLimiter {
 public:
  enum class Verdict {
    kLog,
    kLogAfterGap,  // The first one after some were left out: `left_out` says how many.
    kLogThatFull,  // Leave it out, and say, once, that more will be.
    kLeaveOut,
  };
  struct Answer {
    Verdict verdict = Verdict::kLog;
    std::uint64_t left_out = 0;
  };
  // A line of that place, at that moment of a monotonic clock.
  Answer Admit(const char* file, int line, std::int64_t now_nanos);
  std::uint64_t left_out() const;  // In all.

 private:
  struct Place {
    std::int64_t window_begin_nanos = 0;
    std::uint32_t lines = 0;
    std::uint64_t left_out = 0;
  };
  mutable Mutex mu_;
  // As many as there are places in the code that log.
  std::map<std::pair<absl::string_view, int>, Place> places_ ABSL_GUARDED_BY(mu_);
  std::uint64_t left_out_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_LOG_LINE_H_
