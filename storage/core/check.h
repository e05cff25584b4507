// Checks of what only a bug can cause. Never on outside input: that is a Status.
#ifndef KVMILL_STORAGE_CORE_CHECK_H_
#define KVMILL_STORAGE_CORE_CHECK_H_

namespace kvmill {

// Prints file, line and the failed condition to standard error and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace kvmill

// Always on.
#define KVMILL_CHECK(condition)                              \
  do {                                                       \
    if (!(condition)) [[unlikely]]                           \
      ::kvmill::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

// For hot loops: only in builds without NDEBUG.
#ifdef NDEBUG
#define KVMILL_DCHECK(condition) \
  do {                           \
    if (false) {                 \
      (void)(condition);         \
    }                            \
  } while (false)
#else
#define KVMILL_DCHECK(condition) KVMILL_CHECK(condition)
#endif

#endif  // KVMILL_STORAGE_CORE_CHECK_H_
