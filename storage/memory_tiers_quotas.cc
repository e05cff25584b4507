// Quotas in the memory tiers: whose blocks go first, and which of a tenant's.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/memory_tiers.h"

namespace kvmill {
namespace {

// Of EvictionPolicy::kAsksMax questions each, in one go under the mutex: a tenant with more leases
// than that may be refused although some block could leave, and the next store looks at others.
constexpr int kVictimTriesMax = 16;

}  // namespace

void MemoryTiers::SetQuotas(const std::vector<std::pair<TenantId, TenantQuota>>& quotas) {
  MutexLock lock(policy_mu_);
  absl::flat_hash_set<TenantId> fresh;
  std::vector<TenantId> limited;
  for (const auto& [tenant, quota] : quotas) {
    limited.push_back(tenant);
    if (!orders_.tracks(tenant)) fresh.insert(tenant);
  }
  for (const TenantId tenant : limited_) {
    if (std::find(limited.begin(), limited.end(), tenant) != limited.end()) continue;
    accounts_[tenant].soft_bytes.store(kNoQuota, std::memory_order_relaxed);
    accounts_[tenant].hard_bytes.store(kNoQuota, std::memory_order_relaxed);
  }
  with_soft_.clear();
  for (const auto& [tenant, quota] : quotas) {
    accounts_[tenant].soft_bytes.store(quota.soft_bytes, std::memory_order_relaxed);
    accounts_[tenant].hard_bytes.store(quota.hard_bytes, std::memory_order_relaxed);
    if (quota.soft_bytes != kNoQuota) with_soft_.push_back(tenant);
  }
  any_soft_.store(!with_soft_.empty(), std::memory_order_relaxed);
  limited_ = std::move(limited);
  orders_.Track(limited_);
  if (fresh.empty()) return;

  // Blocks that are there: the oldest leave first, and of a chain the last.
  struct Known {
    EntryId entry = kNoEntry;
    TenantId tenant = 0;
    Tier tier = Tier::kDisk;
    std::uint32_t inserted_at_s = 0;
    std::uint64_t key_hash = 0;
  };
  std::vector<Known> known;
  index_.ForEach([&](EntryId entry, const BlockEntry& e) {
    const TenantId tenant = namespaces_.TenantOf(e.namespace_id());
    if ((e.flags & kLeaving) != 0 || !fresh.contains(tenant)) return true;
    known.push_back({entry, tenant, TierOf(e.flags), e.inserted_at_s, HashOf(e.id())});
    return true;
  });
  std::stable_sort(known.begin(), known.end(), [](const Known& a, const Known& b) {
    return a.inserted_at_s < b.inserted_at_s;
  });
  absl::flat_hash_map<EntryId, const Known*> by_entry;
  for (const Known& block : known) by_entry[block.entry] = &block;
  const auto parent_of = [&](const Known& block) {
    if (block.tier == Tier::kDisk || !policy(block.tier).Contains(block.entry)) return kNoEntry;
    return policy(block.tier).Parent(block.entry);
  };
  std::vector<const Known*> chain;
  for (const Known& block : known) {
    // Parents first.
    for (const Known* at = &block; at != nullptr && !orders_.Contains(at->tier, at->entry);) {
      chain.push_back(at);
      const auto it = by_entry.find(parent_of(*at));
      at = it == by_entry.end() ? nullptr : it->second;
    }
    for (; !chain.empty(); chain.pop_back()) {
      const Known& next = *chain.back();
      if (orders_.Contains(next.tier, next.entry)) continue;
      EntryTraits traits;
      traits.key_hash = next.key_hash;
      traits.parent = parent_of(next);
      orders_.Insert(next.tenant, next.tier, next.entry, traits);
    }
  }
}

std::uint64_t MemoryTiers::order_bytes() {
  MutexLock lock(policy_mu_);
  return orders_.bytes();
}

std::vector<TenantId> MemoryTiers::OverSoft(Tier tier) {
  std::vector<std::pair<double, TenantId>> over;
  for (const TenantId tenant : with_soft_) {
    const double ratio = accounts_[tenant].OverSoft(tier);
    if (ratio > 1) over.emplace_back(ratio, tenant);
  }
  std::sort(over.rbegin(), over.rend());
  std::vector<TenantId> tenants;
  for (const auto& [ratio, tenant] : over) tenants.push_back(tenant);
  return tenants;
}

std::vector<TenantId> MemoryTiers::OverSoftNow(Tier tier) {
  if (!any_soft_.load(std::memory_order_relaxed)) return {};
  MutexLock lock(policy_mu_);
  return OverSoft(tier);
}

int MemoryTiers::OverSoftOnDisk(TenantId tenant) {
  if (!any_soft_.load(std::memory_order_relaxed)) return 0;
  if (accounts_[tenant].OverSoft(Tier::kDisk) > 1) return 1;
  MutexLock lock(policy_mu_);
  const bool any = std::any_of(with_soft_.begin(), with_soft_.end(), [this](TenantId other) {
    return accounts_[other].OverSoft(Tier::kDisk) > 1;
  });
  return any ? -1 : 0;
}

bool MemoryTiers::TakeQuotaVictim(TenantId tenant, QuotaVictim* victim) {
  MutexLock lock(policy_mu_);
  const auto may_leave = [this](EntryId entry) {
    bool may = false;
    index_.With(entry, [&](BlockEntry& e) { may = e.references == 0; });
    return may;
  };
  for (const Tier tier : {Tier::kDisk, Tier::kHost, Tier::kGpu}) {
    if (tier == Tier::kGpu && !has_gpu()) continue;
    for (int tries = 0; tries < kVictimTriesMax; ++tries) {
      // Blocks that it was refused count as just used: the next try asks about others.
      const EntryId entry = orders_.Evict(tenant, tier, may_leave);
      if (entry == kNoEntry) continue;
      bool referenced = false;
      EntryTraits traits;
      index_.With(entry, [&](BlockEntry& e) {
        referenced = e.references != 0;
        traits.key_hash = HashOf(e.id());
        if (referenced) return;
        ++e.references;
        *victim = {entry, e.id(), e.bytes()};
      });
      if (!referenced) return true;
      orders_.Insert(tenant, tier, entry, traits);
    }
  }
  return false;
}

std::uint8_t MemoryTiers::FinishQuotaVictim(TenantId tenant, const QuotaVictim& victim) {
  std::uint8_t flags = 0;
  {
    Telling telling(*this);
    MutexLock lock(policy_mu_);
    bool detached = false;
    bool referenced = false;
    std::uint32_t age_s = 0;
    const std::uint32_t now_s = NowSeconds();
    index_.With(victim.entry, [&](BlockEntry& e) {
      detached = (e.flags & kDetached) != 0;
      referenced = e.references != 1;  // By others.
      flags = e.flags;
      age_s = now_s - std::min(now_s, e.inserted_at_s);
    });
    if (!detached && !referenced) {
      RemoveLocked(victim.entry, &telling);
      CountEvicted(TierOf(flags), EvictReason::kQuota, age_s);
    } else {
      // It may have been loaded meanwhile, and is in that order then.
      const Tier tier = TierOf(flags);
      if (!detached && (flags & kLeaving) == 0 && !orders_.Contains(tier, victim.entry)) {
        EntryTraits traits;
        traits.key_hash = HashOf(victim.id);
        orders_.Insert(tenant, tier, victim.entry, traits);
      }
      flags = 0;
    }
  }
  Release(victim.entry);
  return flags;
}

}  // namespace kvmill
