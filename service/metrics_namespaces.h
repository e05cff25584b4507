// Namespaces as /metrics labels them: few of them, and by name only for who may see names.
#ifndef KVMILL_SERVICE_METRICS_NAMESPACES_H_
#define KVMILL_SERVICE_METRICS_NAMESPACES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "service/metrics.h"
#include "storage/tiered_store.h"

namespace kvmill {

// Names hold no spaces, so these are names of none.
inline constexpr const char* kOtherNamespaces = "other namespaces";
inline constexpr const char* kAllNamespaces = "all namespaces";

// One of another tenant than the default has it before its name. They are UTF-8, as all strings of
// protobuf.
std::string NamespaceLabel(absl::string_view tenant, absl::string_view name);

struct NamespaceShare {
  std::string label;
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;
};
// Of `stored`, which begins with the most: `shown_max` by name and the others together; where names
// are left out all together. Empty when nobody stored anything.
std::vector<NamespaceShare> SharesOf(const std::vector<TieredStore::NamespaceStored>& stored,
                                     std::size_t shown_max, NamespaceNames names);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_METRICS_NAMESPACES_H_
