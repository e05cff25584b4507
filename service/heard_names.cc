#include "service/heard_names.h"

#include <algorithm>
#include <optional>

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
  std::optional<TieredStore::NamespaceInfo> found;
  for (TieredStore::NamespaceInfo& info : store.Namespaces()) {
    // Those that were heard under no name are not what an empty one means.
    const bool heard = IsHeard(info.name) && !name.empty() && EngineName(info.name) == name;
    if (!heard || info.spec.tenant != tenant) continue;
    if (found.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "namespace ", Quoted(name),
          " was another one on one node than on another: ", ToHex(found->fingerprint), " and ",
          ToHex(info.fingerprint), "; open it with its model and format, or give the fingerprint"));
    }
    found = std::move(info);
    found->name = std::string(name);
  }
  if (!found.has_value()) {
    return absl::NotFoundError(absl::StrCat("namespace ", Quoted(name), " is not known here"));
  }
  return *std::move(found);
}

}  // namespace kvmill
