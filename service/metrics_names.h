// To whom the metrics port says names of tenants and namespaces (docs/security.md, decision 0055).
#ifndef KVMILL_SERVICE_METRICS_NAMES_H_
#define KVMILL_SERVICE_METRICS_NAMES_H_

#include "absl/status/statusor.h"
#include "service/http_server.h"
#include "service/identities.h"
#include "service/metrics.h"

namespace kvmill {

// Names are for a token that may see them; where --tenants has none such, for whoever comes from a
// loopback address. UNAUTHENTICATED: a token that nobody has, which is no token of a silent
// stranger. PERMISSION_DENIED: one of a tenant that may not see names.
absl::StatusOr<NamespaceNames> NamesFor(const HttpServer::Asker& asker,
                                        const Identities& identities);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_METRICS_NAMES_H_
