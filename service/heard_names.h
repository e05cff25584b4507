// Names of namespaces that no engine opened here: they came with blocks from other nodes.
//
// Such a namespace is open under a name that no engine uses, which says what those of the other
// node call it: "peer-", its fingerprint, and, where that fits, ":" and the name. So the name
// outlives that node, and a restart of this one, and is nobody's: an engine here may use it for
// something else (docs/decisions/0036).
#ifndef KVMILL_SERVICE_HEARD_NAMES_H_
#define KVMILL_SERVICE_HEARD_NAMES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/namespace.h"
#include "storage/tiered_store.h"

namespace kvmill {

// What to open the namespace under. `heard`: another node's name for it, of whatever form; one that
// is too long, or no name at all, is left out.
std::string NameOfHeard(const Fingerprint& fingerprint, absl::string_view heard);

// What engines call a namespace that is open under `name`: `name`, or what was heard; may be empty.
absl::string_view EngineName(absl::string_view name);

// The namespace of the tenant that was heard of by this name; its `name` is that. NOT_FOUND: none.
// FAILED_PRECONDITION naming two fingerprints: nodes meant different ones by it. Looks at the names
// of all namespaces, so not for every call.
absl::StatusOr<TieredStore::NamespaceInfo> FindHeard(const TieredStore& store,
                                                     absl::string_view tenant,
                                                     absl::string_view name);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_HEARD_NAMES_H_
