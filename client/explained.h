// Marks an error of the client library whose text already says what to do next.
#ifndef KVMILL_CLIENT_EXPLAINED_H_
#define KVMILL_CLIENT_EXPLAINED_H_

#include "absl/strings/string_view.h"

namespace kvmill {

// The type of a payload of absl::Status, which is empty.
inline constexpr absl::string_view kExplainedPayload = "kvmill.client/explained";

}  // namespace kvmill

#endif  // KVMILL_CLIENT_EXPLAINED_H_
