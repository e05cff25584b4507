#include "client/cli/trace.h"

#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/files.h"
#include "client/cli/output.h"
#include "storage/core/status_macros.h"

namespace kvmill::cli {
namespace {

absl::StatusOr<std::vector<std::uint64_t>> ParseLine(absl::string_view line) {
  const Json request = Json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!request.is_object()) return absl::InvalidArgumentError("not a JSON object");
  const auto ids = request.find("hash_ids");
  if (ids == request.end() || !ids->is_array()) {
    return absl::InvalidArgumentError("no array \"hash_ids\"");
  }
  std::vector<std::uint64_t> result;
  result.reserve(ids->size());
  for (const Json& id : *ids) {
    if (!id.is_number_unsigned()) {
      return absl::InvalidArgumentError("an id in \"hash_ids\" is not a whole number from 0 on");
    }
    result.push_back(id.get<std::uint64_t>());
  }
  return result;
}

}  // namespace

absl::StatusOr<std::vector<std::vector<std::uint64_t>>> ReadTrace(const std::string& path) {
  KVMILL_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::vector<std::vector<std::uint64_t>> requests;
  Progress progress("reading");
  std::size_t number = 0;
  for (absl::string_view rest = text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    const absl::string_view line = absl::StripAsciiWhitespace(rest.substr(0, end));
    rest.remove_prefix(end == absl::string_view::npos ? rest.size() : end + 1);
    ++number;
    if (line.empty()) continue;
    absl::StatusOr<std::vector<std::uint64_t>> ids = ParseLine(line);
    if (!ids.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": ", ids.status().message()));
    }
    requests.push_back(*std::move(ids));
    progress.Update(number, 0, "lines");
  }
  return requests;
}

}  // namespace kvmill::cli
