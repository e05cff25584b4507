// How much of the store each tenant may have, and has.
//
// A block counts once against its tenant's hard quota, with the bytes of its pages (as List says
// them), in whichever tiers it is: where it lies, and in how many copies, is the store's choice. So
// quotas do not change when blocks move, and a tenant can count what it stored. What is on its way
// in (assemblies, copies from other nodes), and what was removed while somebody still reads it,
// counts too.
//
// - hard: no more than this. A store that would go over it first makes room among the tenant's own
//   blocks: those on disk only first, oldest first, then those in memory, in the order of the
//   eviction policy; they leave the store. When that is not enough it is refused, at once, but for
//   room that is just being made (up to Options::room_wait). A copy that may not wait is refused
//   while that room has to come from a disk. Blocks of other tenants never leave for it. On disk
//   the bytes of live blocks are counted: files may have more. (docs/decisions/0044-quotas.md)
// - soft: what the tenant keeps, in each tier, when others need room there. It compares with the
//   bytes that the tenant has in that tier. When a tier is full, blocks of those over their soft
//   quota leave first, the furthest over (as a ratio) first.
#ifndef KVMILL_STORAGE_TENANT_QUOTAS_H_
#define KVMILL_STORAGE_TENANT_QUOTAS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "storage/core/tier.h"

namespace kvmill {

inline constexpr std::uint64_t kNoQuota = std::numeric_limits<std::uint64_t>::max();
inline constexpr std::size_t kQuotasMax = 1024;  // Tenants with one.

struct TenantQuota {
  std::uint64_t soft_bytes = kNoQuota;  // At most hard_bytes when that is one.
  std::uint64_t hard_bytes = kNoQuota;

  friend bool operator==(const TenantQuota&, const TenantQuota&) = default;
};
using TenantQuotas = std::map<std::string, TenantQuota>;  // By tenant.

// What a tenant has now. Values read one after the other.
struct TenantUsage {
  std::string tenant;
  std::uint64_t used_bytes = 0;                        // Of its sealed blocks, each once.
  std::uint64_t charged_bytes = 0;                     // What the hard quota compares; see above.
  std::array<std::uint64_t, kTierCount> tier_bytes{};  // In each tier; a block can be in two.
  TenantQuota quota;
  std::uint64_t rejections = 0;  // Blocks that its hard quota refused, since the start.
};

// Whether this RESOURCE_EXHAUSTED of the store is the tenant's hard quota, so that there may be
// room for others.
bool IsQuotaRefusal(const absl::Status& status);

// How many blocks a tenant has, each counted in the fastest tier that it is in. Values read one
// after the other.
struct TenantHolding {
  std::uint64_t blocks = 0;
  std::array<std::uint64_t, kTierCount> tier_blocks{};
  std::array<std::uint64_t, kTierCount> tier_bytes{};
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_TENANT_QUOTAS_H_
