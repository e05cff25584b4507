// Traces of requests, as JSON lines with "hash_ids" (the format of the Mooncake traces).
#ifndef KVMILL_CLIENT_CLI_TRACE_H_
#define KVMILL_CLIENT_CLI_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvmill::cli {

// The ids of every request's blocks, in file order. Empty lines are skipped, other fields ignored.
// FAILED_PRECONDITION when the file cannot be read; INVALID_ARGUMENT naming the line otherwise.
absl::StatusOr<std::vector<std::vector<std::uint64_t>>> ReadTrace(const std::string& path);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_TRACE_H_
