#include "client/eval/shipped_data.h"

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/files.h"
#include "client/cli/kv_files.h"

namespace kvmill::eval {

absl::StatusOr<std::string> FindShippedKv() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  std::filesystem::path folder = program.parent_path();
  while (!folder.empty()) {
    for (const char* below : {"share/kvmill/tiny-lm-kv", "tests/data/tiny-lm-kv"}) {
      const std::string prefix = (folder / below / "retrieval_").string();
      if (cli::FileExists(cli::LayerPath(prefix, 0, "_k.npy"))) return prefix;
    }
    if (folder == folder.parent_path()) break;
    folder = folder.parent_path();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the K and V that come with kvmill are neither in share/kvmill/tiny-lm-kv nor in "
      "tests/data/tiny-lm-kv of a folder above ",
      program.string(), "; name others with --kv"));
}

}  // namespace kvmill::eval
