// How two namespaces differ, for people.
#ifndef KVMILL_STORAGE_CORE_NAMESPACE_DIFFERENCE_H_
#define KVMILL_STORAGE_CORE_NAMESPACE_DIFFERENCE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "storage/core/namespace.h"

namespace kvmill {

// As DescribeDifference, with words for where each of the two is: `model is "a" in this request and
// "b" at the daemon`.
std::string DescribeDifference(const NamespaceSpec& got, const NamespaceSpec& want,
                               absl::string_view where_got, absl::string_view where_want);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_CORE_NAMESPACE_DIFFERENCE_H_
