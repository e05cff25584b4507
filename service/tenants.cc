#include "service/tenants.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/cluster/registration.h"

namespace kvmill {

absl::Status CheckTenantName(absl::string_view name) {
  if (name == "all" || name == "other") {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant \"", name,
                     "\": metrics have \"all\" and \"other\" for tenants together; "
                     "want another name"));
  }
  return CheckName("tenant", name);
}

bool SharedTenants::Has(absl::string_view tenant) const {
  if (tenant == kDefaultTenant) return true;
  if (absl::StartsWith(tenant, kLocalTenantPrefix)) return options_.local_users;
  return options_.named && CheckTenantName(tenant).ok();
}

absl::StatusOr<TieredStore::NamespaceInfo> SharedTenants::Find(
    const TieredStore& store, const Fingerprint& fingerprint) const {
  absl::StatusOr<TieredStore::NamespaceInfo> space = store.FindAnyNamespace(fingerprint);
  if (!space.ok() || Has(space->spec.tenant)) return space;
  return absl::NotFoundError(absl::StrCat("namespace ", ToHex(fingerprint), " is not known here"));
}

}  // namespace kvmill
