// The quotas in the file of --tenants.
#ifndef KVMILL_SERVICE_TENANT_QUOTAS_H_
#define KVMILL_SERVICE_TENANT_QUOTAS_H_

#include <string>

#include "absl/status/statusor.h"
#include "storage/tenant_quotas.h"

namespace kvmill {

// Of the file, which is YAML (docs/security.md), what it says of quotas; Identities::Read reads the
// rest. None for an empty path.
//
//   tenants:
//     NAME: {quota: {soft: SIZE, hard: SIZE}}
//
// Either alone will do. NAME may be any tenant: one of the file, default, or uid-N of the host.
// INVALID_ARGUMENT with file and line: no name of a tenant (CheckTenantName), an unknown key in
// quota, a size that is none or 0, soft above hard, a uid that is none, more than kQuotasMax of
// them. Reads the file again with every call: for TieredStore::SetQuotas at the start, and
// whenever the configuration is read again (service/reload.h).
absl::StatusOr<TenantQuotas> ReadTenantQuotas(const std::string& path);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_TENANT_QUOTAS_H_
