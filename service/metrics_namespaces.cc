#include "service/metrics_namespaces.h"

#include "absl/strings/str_cat.h"
#include "service/callers.h"

namespace kvmill {

std::string NamespaceLabel(absl::string_view tenant, absl::string_view name) {
  return tenant == kDefaultTenant ? std::string(name) : absl::StrCat(tenant, " ", name);
}

std::vector<NamespaceShare> SharesOf(const std::vector<TieredStore::NamespaceStored>& stored,
                                     std::size_t shown_max, NamespaceNames names) {
  const bool shown = names == NamespaceNames::kShown;
  std::vector<NamespaceShare> shares;
  NamespaceShare together{.label = shown ? kOtherNamespaces : kAllNamespaces};
  for (const TieredStore::NamespaceStored& of : stored) {
    if (shown && shares.size() < shown_max) {
      shares.push_back({NamespaceLabel(of.tenant, of.name), of.blocks, of.bytes});
    } else {
      together.blocks += of.blocks;
      together.bytes += of.bytes;
    }
  }
  if (together.blocks > 0) shares.push_back(together);
  return shares;
}

}  // namespace kvmill
