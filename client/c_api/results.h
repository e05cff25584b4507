// Reading a result. Internal to client/c_api.
#ifndef KVMILL_CLIENT_C_API_RESULTS_H_
#define KVMILL_CLIENT_C_API_RESULTS_H_

#include <cstdint>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/c_api/border.h"
#include "client/c_api/queue.h"
#include "client/client.h"

namespace kvmill::c_api {

// The value of an operation that succeeded.
template <typename T>
absl::StatusOr<const T*> ValueOf(const kvmill_result* result, const void* out) {
  if (result == nullptr) return Null("result");
  if (out == nullptr) return Null("out");
  if (const T* value = std::get_if<T>(&result->value)) return value;
  return absl::FailedPreconditionError(
      result->status.ok()
          ? absl::StrCat("the result of operation ", result->operation, " has no such value")
          : absl::StrCat("the operation failed: ", result->message));
}

inline std::uint64_t RetryMs(const absl::Status& status) {
  return static_cast<std::uint64_t>(absl::ToInt64Milliseconds(RetryAfter(status)));
}

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_RESULTS_H_
