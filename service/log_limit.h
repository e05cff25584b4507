// Which lines of a kind that others can cause at will are logged.
#ifndef KVMILL_SERVICE_LOG_LIMIT_H_
#define KVMILL_SERVICE_LOG_LIMIT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "storage/core/mutex.h"

namespace kvmill {

// Thread-safe.
class LogLimit {
 public:
  static constexpr std::int64_t kEveryNanos = 600'000'000'000;
  // Of what is remembered: of more there is no line.
  static constexpr std::size_t kSubjectsMax = 64;

  // Whether there is to be a line about the subject: once in kEveryNanos.
  bool Allows(const std::string& subject, std::int64_t now_nanos) {
    MutexLock lock(mu_);
    if (const auto last = logged_.find(subject); last != logged_.end()) {
      if (now_nanos - last->second < kEveryNanos) return false;
      last->second = now_nanos;
      return true;
    }
    if (logged_.size() >= kSubjectsMax) {
      std::erase_if(logged_, [now_nanos](const auto& entry) {
        return now_nanos - entry.second >= kEveryNanos;
      });
    }
    if (logged_.size() >= kSubjectsMax) return false;
    logged_[subject] = now_nanos;
    return true;
  }
  // The next line about it is a first one again.
  void Forget(const std::string& subject) {
    MutexLock lock(mu_);
    logged_.erase(subject);
  }

 private:
  Mutex mu_;
  std::map<std::string, std::int64_t> logged_ ABSL_GUARDED_BY(mu_);  // When.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_LOG_LIMIT_H_
