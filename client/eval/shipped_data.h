// The K and V and the model that come with kvmill: what `kvmill eval` works on when it is given
// none.
#ifndef KVMILL_CLIENT_EVAL_SHIPPED_DATA_H_
#define KVMILL_CLIENT_EVAL_SHIPPED_DATA_H_

#include <string>

#include "absl/status/statusor.h"

namespace kvmill::eval {

// The prefix of the files (as --kv takes it), of the nearest folder above the running program that
// has share/kvmill/tiny-lm-kv (an installation) or tests/data/tiny-lm-kv (the source tree, build
// folders inside of it included). FAILED_PRECONDITION saying where it looked.
absl::StatusOr<std::string> FindShippedKv();

// The header of the model, likewise from share/kvmill/tiny-lm or tests/data/tiny-lm.
absl::StatusOr<std::string> FindShippedModel();

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_SHIPPED_DATA_H_
