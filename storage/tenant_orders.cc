#include "storage/tenant_orders.h"

#include <algorithm>

#include "storage/core/check.h"
#include "storage/tenant_quotas.h"

namespace kvmill {
namespace {

// Those on disk only leave in the order in which they left memory.
constexpr const char* kDiskPolicy = "lru";
constexpr std::uint32_t kOrdersMax = static_cast<std::uint32_t>(kQuotasMax) * 3;
// Of a tenant: bounds what ghosts cost, of which each has its own, to about 2 MiB.
constexpr std::uint32_t kCapacityBlocksMax = 1u << 18;

}  // namespace

void TenantOrders::Track(const std::vector<TenantId>& tenants) {
  KVMILL_CHECK(tenants.size() <= kQuotasMax);
  std::vector<std::unique_ptr<Orders>> tracked;
  for (const TenantId tenant : tenants) {
    if (tracked.size() <= tenant) tracked.resize(tenant + 1);
    tracked[tenant] = tracks(tenant) ? std::move(by_tenant_[tenant]) : std::make_unique<Orders>();
  }
  for (std::unique_ptr<Orders>& dropped : by_tenant_) {
    if (dropped == nullptr) continue;
    for (std::unique_ptr<EvictionPolicy>& order : dropped->tiers) {
      if (order == nullptr) continue;
      for (EntryId entry = 0; entry != kNoEntry;) {
        entry = order->Evict([](EntryId) { return true; });
        if (entry != kNoEntry) places_[entry] = 0;
      }
    }
  }
  by_tenant_ = std::move(tracked);
  tracked_ = static_cast<std::uint32_t>(tenants.size());
  if (tenants.empty()) {
    nodes_.reset();
    places_ = std::vector<std::uint8_t>();
  } else if (nodes_ == nullptr) {
    nodes_ = std::make_unique<SharedNodes>(options_.entries_max, kOrdersMax);
    places_.resize(options_.entries_max);
  }
}

std::size_t TenantOrders::bytes() const {
  if (nodes_ == nullptr) return 0;
  std::size_t bytes = nodes_->bytes() + places_.size();
  for (const std::unique_ptr<Orders>& orders : by_tenant_) {
    if (orders == nullptr) continue;
    for (const std::unique_ptr<EvictionPolicy>& order : orders->tiers) {
      if (order != nullptr) bytes += order->bytes();
    }
  }
  return bytes;
}

EvictionPolicy* TenantOrders::Find(TenantId tenant, Tier tier) {
  if (!tracks(tenant)) return nullptr;
  std::unique_ptr<EvictionPolicy>& order =
      by_tenant_[tenant]->tiers[static_cast<std::size_t>(tier)];
  if (order == nullptr) {
    EvictionPolicy::Options options;
    options.entries_max = options_.entries_max;
    options.capacity_blocks =
        std::clamp(options_.capacity_blocks[static_cast<std::size_t>(tier)] / tracked_, 1u,
                   std::min(kCapacityBlocksMax, options_.entries_max));
    options.nodes = nodes_.get();
    absl::StatusOr<std::unique_ptr<EvictionPolicy>> made =
        CreateEvictionPolicy(tier == Tier::kDisk ? kDiskPolicy : options_.policy, options);
    KVMILL_CHECK(made.ok());  // The same options made the tier's own.
    order = *std::move(made);
  }
  return order.get();
}

void TenantOrders::Insert(TenantId tenant, Tier tier, EntryId entry, EntryTraits traits) {
  EvictionPolicy* const order = Find(tenant, tier);
  if (order == nullptr) return;
  if (traits.parent != kNoEntry && !Contains(tier, traits.parent)) traits.parent = kNoEntry;
  order->Insert(entry, traits);
  places_[entry] = PlaceOf(tier);
}

void TenantOrders::Touch(TenantId tenant, Tier tier, EntryId entry) {
  if (tracks(tenant) && Contains(tier, entry)) Find(tenant, tier)->Touch(entry);
}

void TenantOrders::Remove(TenantId tenant, Tier tier, EntryId entry) {
  if (!tracks(tenant) || !Contains(tier, entry)) return;
  Find(tenant, tier)->Remove(entry);
  places_[entry] = 0;
}

EntryId TenantOrders::Evict(TenantId tenant, Tier tier,
                            absl::FunctionRef<bool(EntryId)> may_leave) {
  EvictionPolicy* const order = Find(tenant, tier);
  if (order == nullptr) return kNoEntry;
  const EntryId entry = order->Evict(may_leave);
  if (entry != kNoEntry) places_[entry] = 0;
  return entry;
}

}  // namespace kvmill
