#include "client/eval/shipped_data.h"

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/files.h"
#include "client/cli/kv_files.h"
#include "storage/core/status_macros.h"

namespace kvmill::eval {

namespace {

// `file` in share/kvmill/FOLDER or tests/data/FOLDER of the nearest folder above the program.
// `what` and `flag` are for the message.
absl::StatusOr<std::string> FindShipped(absl::string_view folder, absl::string_view file,
                                        absl::string_view what, absl::string_view flag) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  std::filesystem::path above = program.parent_path();
  while (!above.empty()) {
    for (const char* below : {"share/kvmill/", "tests/data/"}) {
      std::string path = (above / absl::StrCat(below, folder, "/", file)).string();
      if (cli::FileExists(path)) return path;
    }
    if (above == above.parent_path()) break;
    above = above.parent_path();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, " are neither in share/kvmill/", folder, " nor in tests/data/", folder,
                   " of a folder above ", program.string(), "; name others with ", flag));
}

}  // namespace

absl::StatusOr<std::string> FindShippedKv() {
  constexpr absl::string_view kPrefix = "retrieval_";
  KVMILL_ASSIGN_OR_RETURN(std::string path,
                          FindShipped("tiny-lm-kv", cli::LayerPath(kPrefix, 0, "_k.npy"),
                                      "the K and V that come with kvmill", "--kv"));
  path.resize(path.size() - cli::LayerPath("", 0, "_k.npy").size());
  return path;
}

absl::StatusOr<std::string> FindShippedModel() {
  return FindShipped("tiny-lm", "tiny-lm.json", "the weights that come with kvmill", "--model");
}

}  // namespace kvmill::eval
