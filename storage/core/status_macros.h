// Early return of a Status; see docs/architecture.md for which code means what.
#ifndef KVMILL_STORAGE_CORE_STATUS_MACROS_H_
#define KVMILL_STORAGE_CORE_STATUS_MACROS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVMILL_CONCAT_INNER(a, b) a##b
#define KVMILL_CONCAT(a, b) KVMILL_CONCAT_INNER(a, b)

// KVMILL_RETURN_IF_ERROR(expression): returns the Status when it is not OK.
#define KVMILL_RETURN_IF_ERROR(expression)       \
  do {                                           \
    ::absl::Status kvmill_status = (expression); \
    if (!kvmill_status.ok()) [[unlikely]]        \
      return kvmill_status;                      \
  } while (false)

// KVMILL_ASSIGN_OR_RETURN(auto x, StatusOrExpression): declares or assigns x, or returns the
// Status.
#define KVMILL_ASSIGN_OR_RETURN(target, expression) \
  KVMILL_ASSIGN_OR_RETURN_IMPL(KVMILL_CONCAT(kvmill_statusor_, __LINE__), target, expression)
#define KVMILL_ASSIGN_OR_RETURN_IMPL(statusor, target, expression) \
  auto statusor = (expression);                                    \
  if (!statusor.ok()) [[unlikely]]                                 \
    return std::move(statusor).status();                           \
  target = *std::move(statusor)

#endif  // KVMILL_STORAGE_CORE_STATUS_MACROS_H_
