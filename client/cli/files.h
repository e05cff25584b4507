// Whole files in and out. Errors are FAILED_PRECONDITION and name the path and the system's reason
// (NOT_FOUND is the word for a miss, and an input file that is not there is none).
#ifndef KVMILL_CLIENT_CLI_FILES_H_
#define KVMILL_CLIENT_CLI_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill::cli {

absl::StatusOr<std::string> ReadFile(const std::string& path);

// Writes beside `path` and renames: a reader sees the old file or the new one, never a part. The
// pieces are written one after the other.
absl::Status WriteFile(const std::string& path, absl::Span<const absl::string_view> pieces);

bool FileExists(const std::string& path);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_FILES_H_
