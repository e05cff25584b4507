// In which order the blocks of one tenant leave, for each tenant that has a quota.
//
// Beside the eviction policies of the tiers, which know all blocks: of those tenants, the blocks of
// a memory tier are in a policy of the same kind, too, that knows no others; so the tenant's next
// block is found without passing over other tenants' blocks. Blocks that are on disk only are in
// the order in which they left memory. All of these orders share one array of nodes, as a block is
// in one place at a time: 33 bytes an entry, once there is a quota. Without quotas there are none.
//
// Internal to storage/. Not thread-safe: under the policies' mutex (storage/memory_tiers.h).
#ifndef KVMILL_STORAGE_TENANT_ORDERS_H_
#define KVMILL_STORAGE_TENANT_ORDERS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/core/tier.h"
#include "storage/eviction/policy.h"
#include "storage/eviction/shared_nodes.h"
#include "storage/page_pool.h"

namespace kvmill {

class TenantOrders {
 public:
  struct Options {
    std::string policy;             // A name that CreateEvictionPolicy knows.
    std::uint32_t entries_max = 0;  // Ids are below.
    // Of each tier's policy, see EvictionPolicy::Options::capacity_blocks. A tenant's order gets
    // its part of it when it is made: one of as many as have orders then, and at most 2^18.
    std::array<std::uint32_t, 3> capacity_blocks{};
  };
  explicit TenantOrders(Options options) : options_(std::move(options)) {}

  // Which tenants, at most kQuotasMax, have orders from now on. The others' are dropped; new ones
  // are empty.
  void Track(const std::vector<TenantId>& tenants);
  std::size_t bytes() const;  // All memory of the orders.
  bool tracks(TenantId tenant) const {
    return tenant < by_tenant_.size() && by_tenant_[tenant] != nullptr;
  }

  // In all of these `tier` is kGpu, kHost, or kDisk for blocks that are nowhere else. Of a tenant
  // that is not tracked there is nothing. Touch and Remove do nothing to an entry that is not in
  // that order. A parent in `traits` that is not in it is left out.
  void Insert(TenantId tenant, Tier tier, EntryId entry, EntryTraits traits);
  void Touch(TenantId tenant, Tier tier, EntryId entry);
  void Remove(TenantId tenant, Tier tier, EntryId entry);
  // As EvictionPolicy::Evict.
  EntryId Evict(TenantId tenant, Tier tier, absl::FunctionRef<bool(EntryId)> may_leave);
  bool Contains(Tier tier, EntryId entry) const {
    return nodes_ != nullptr && places_[entry] == PlaceOf(tier);
  }

 private:
  struct Orders {
    std::array<std::unique_ptr<EvictionPolicy>, 3> tiers;  // Made when first used.
  };
  static constexpr std::uint8_t PlaceOf(Tier tier) {
    return static_cast<std::uint8_t>(static_cast<std::uint8_t>(tier) + 1);
  }
  // Null when the tenant is not tracked.
  EvictionPolicy* Find(TenantId tenant, Tier tier);

  const Options options_;
  std::unique_ptr<SharedNodes> nodes_;  // Null until there is a tenant.
  std::vector<std::uint8_t> places_;    // Of entries: in which tier's order; 0: in none.
  std::vector<std::unique_ptr<Orders>> by_tenant_;
  std::uint32_t tracked_ = 0;  // How many.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_TENANT_ORDERS_H_
