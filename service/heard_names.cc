#include "service/heard_names.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/core/quoted.h"
#include "storage/namespace_table.h"

namespace kvmill {
namespace {

constexpr absl::string_view kPrefix = "peer-";
constexpr std::size_t kFixedBytes = kPrefix.size() + 2 * sizeof(Fingerprint);

// As NamespaceTable::Open wants them.
bool IsName(absl::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) > ' ' && c != 127;
  });
}

bool IsHeard(absl::string_view name) {
  return absl::StartsWith(name, kPrefix) && name.size() >= kFixedBytes &&
         std::all_of(name.begin() + kPrefix.size(), name.begin() + kFixedBytes,
                     [](char c) { return absl::ascii_isxdigit(static_cast<unsigned char>(c)); }) &&
         (name.size() == kFixedBytes || name[kFixedBytes] == ':');
}

}  // namespace

std::string NameOfHeard(const Fingerprint& fingerprint, absl::string_view heard) {
  std::string name = absl::StrCat(kPrefix, ToHex(fingerprint));
  if (IsName(heard) && name.size() + 1 + heard.size() <= kNamespaceNameBytesMax) {
    absl::StrAppend(&name, ":", heard);
  }
  return name;
}

absl::string_view EngineName(absl::string_view name) {
  if (!IsHeard(name)) return name;
  return name.substr(std::min(name.size(), kFixedBytes + 1));
}

absl::StatusOr<TieredStore::NamespaceInfo> FindHeard(const TieredStore& store,
                                                     absl::string_view tenant,
                                                     absl::string_view name) {
  // Those that were heard under no name are not what an empty one means.
  std::vector<TieredStore::NamespaceInfo> found;
  if (!name.empty()) {
    found = store.NamespacesWhere([&](absl::string_view whose, absl::string_view opened) {
      return IsHeard(opened) && EngineName(opened) == name && whose == tenant;
    });
  }
  if (found.empty()) {
    return absl::NotFoundError(absl::StrCat("namespace ", Quoted(name), " is not known here"));
  }
  if (found.size() > 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("namespace ", Quoted(name), " was another one on one node than on another: ",
                     ToHex(found[0].fingerprint), " and ", ToHex(found[1].fingerprint),
                     "; open it with its model and format, or give the fingerprint"));
  }
  found[0].name = std::string(name);
  return std::move(found[0]);
}

}  // namespace kvmill
