#include "service/metrics_names.h"

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::StatusOr<NamespaceNames> NamesFor(const HttpServer::Asker& asker,
                                        const Identities& identities) {
  if (!asker.authorization.empty()) {
    KVMILL_ASSIGN_OR_RETURN(const Identities::Identity identity,
                            identities.IdentifyToken(asker.authorization));
    if (identity.names) return NamespaceNames::kShown;
    return absl::PermissionDeniedError(
        absl::StrCat("tenant \"", identity.tenant,
                     "\" may not see the names of all: want a token of one with metrics: true or "
                     "admin: true in --tenants"));
  }
  // An address says which host, not which of its users.
  const bool shown = asker.is_local && !identities.has_tokens_for_names();
  return shown ? NamespaceNames::kShown : NamespaceNames::kLeftOut;
}

}  // namespace kvmill
