// Quotas of the store as a whole: what is charged on the way in, and what leaves for it.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

constexpr std::size_t kVictimsAtOnce = 64;  // One batch of the disk.
// One store takes no longer for its tenant, whose quota may have been lowered by much.
constexpr int kBatchesPerCharge = 8;
// Of its hard quota, a tenant whose copies were refused for want of time gets free at once.
constexpr std::uint64_t kTrimShare = 16;
// How often who waits looks at the clock.
constexpr std::chrono::milliseconds kWaitSlice{20};
constexpr absl::string_view kRefusalPayload = "kvmill.hard_quota";

}  // namespace

bool IsQuotaRefusal(const absl::Status& status) {
  return status.GetPayload(kRefusalPayload).has_value();
}

absl::Status TieredStore::Impl::Charge(TenantId tenant, std::uint64_t bytes, absl::Duration wait,
                                       TenantCharge* charge) {
  TenantAccount& account = accounts_[tenant];
  // Removing from the disk may take as long as that likes.
  const bool may_evict = wait > absl::ZeroDuration() || disk_ == nullptr;
  const std::int64_t end_nanos = clock_.MonotonicNanos() + absl::ToInt64Nanoseconds(wait);
  int batches = 0;
  while (!account.TryCharge(bytes)) {
    const std::uint64_t seen = QuotaEvictions(tenant);
    const std::uint64_t hard = account.hard_bytes.load(std::memory_order_relaxed);
    const std::uint64_t charged = account.charged_bytes.load(std::memory_order_relaxed);
    if (hard == kNoQuota) continue;  // Gone meanwhile.
    std::string why;
    if (bytes > hard) {
      why = absl::StrCat("this block alone is larger, ", bytes, " bytes");
    } else {
      const std::uint64_t room = hard - std::min(hard, charged);
      if (room >= bytes) continue;  // Others gave some back.
      if (may_evict && batches < kBatchesPerCharge) {
        if (EvictForQuota(tenant, charged - (hard - bytes)) > 0) {
          ++batches;
          continue;
        }
        if (WaitForQuotaEviction(tenant, seen, end_nanos)) continue;
        why = "none of its blocks can leave now";
      } else {
        TrimSoonFor(tenant, bytes, hard);
        why = "room is made in the background, as far as blocks may leave";
      }
      why = absl::StrCat(bytes, " more are wanted, and ", why);
    }
    absl::Status refused = absl::ResourceExhaustedError(absl::StrCat(
        "tenant \"", namespaces_.TenantNames()[tenant], "\" is at its hard quota: ", charged,
        " of ", hard, " bytes are used, ", why,
        "; end leases, remove blocks, or raise quota.hard of the tenant in --tenants"));
    refused.SetPayload(kRefusalPayload, absl::Cord());
    return refused;
  }
  charge->Add(account, bytes);
  return absl::OkStatus();
}

void TieredStore::Impl::CountRefusal(TenantId tenant, const absl::Status& why) {
  if (!IsQuotaRefusal(why)) return;
  accounts_[tenant].rejections.fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t TieredStore::Impl::QuotaEvictions(TenantId tenant) {
  MutexLock lock(evictions_mu_);
  return evictions_[tenant].ended;
}

bool TieredStore::Impl::WaitForQuotaEviction(TenantId tenant, std::uint64_t seen,
                                             std::int64_t end_nanos) {
  MutexLock lock(evictions_mu_);
  while (evictions_[tenant].running > 0 && evictions_[tenant].ended == seen) {
    if (clock_.MonotonicNanos() >= end_nanos) return false;
    eviction_ended_.WaitFor(evictions_mu_, kWaitSlice);
  }
  return evictions_[tenant].ended != seen;
}

std::uint64_t TieredStore::Impl::EvictForQuota(TenantId tenant, std::uint64_t bytes) {
  {
    MutexLock lock(evictions_mu_);
    ++evictions_[tenant].running;
  }
  const std::uint64_t evicted = EvictBatch(tenant, bytes);
  {
    MutexLock lock(evictions_mu_);
    --evictions_[tenant].running;
    if (evicted > 0) ++evictions_[tenant].ended;
  }
  eviction_ended_.NotifyAll();
  if (evicted > 0) tiers_->RoomMayHaveComeFree();
  return evicted;
}

std::uint64_t TieredStore::Impl::EvictBatch(TenantId tenant, std::uint64_t bytes) {
  std::vector<MemoryTiers::QuotaVictim> victims;
  std::vector<BlockId> ids;
  for (std::uint64_t found = 0; found < bytes && victims.size() < kVictimsAtOnce;) {
    MemoryTiers::QuotaVictim victim;
    if (!tiers_->TakeQuotaVictim(tenant, &victim)) break;
    found += victim.bytes;
    victims.push_back(victim);
    ids.push_back(victim.id);
  }
  if (victims.empty()) return 0;
  std::uint64_t evicted = 0;
  {
    const WriteBehind::Removal removal(write_behind_.get(), ids);
    std::vector<DiskBlockId> on_disk;
    for (const MemoryTiers::QuotaVictim& victim : victims) {
      const std::uint8_t flags = tiers_->FinishQuotaVictim(tenant, victim);
      if (flags == 0) continue;
      ++evicted;
      if ((flags & kOnDisk) != 0) on_disk.push_back(write_behind_->DiskIdOf(victim.id));
    }
    // Not flushed: whatever a crash brings back is counted at the next start.
    const absl::Status removed = on_disk.empty() ? absl::OkStatus() : disk_->Remove(on_disk);
    if (!on_disk.empty() && quota_removal_failed_.exchange(!removed.ok()) != !removed.ok()) {
      // Once per series of failures.
      if (removed.ok()) {
        LogInfo("disk tier: blocks that leave for their tenant's quota are removed again");
      } else {
        LogWarning(
            absl::StrCat("disk tier: blocks that left for their tenant's quota are still "
                         "there, and may be found at the next start: ",
                         removed.message()));
      }
    }
  }
  return evicted;
}

void TieredStore::Impl::TrimSoonFor(TenantId tenant, std::uint64_t bytes,
                                    std::uint64_t hard_bytes) {
  {
    MutexLock lock(evictions_mu_);
    std::uint64_t& wanted = evictions_[tenant].wanted_bytes;
    // Callers who come again and again do not add up to all that the tenant has.
    wanted = std::max({bytes, wanted, std::min(wanted + bytes, hard_bytes / kTrimShare)});
  }
  TrimSoon();
}

bool TieredStore::Impl::TrimTenants() {
  bool more = false;
  const std::size_t tenants = namespaces_.TenantNames().size();
  for (TenantId tenant = 0; tenant < tenants && !stopping(); ++tenant) {
    const TenantAccount& account = accounts_[tenant];
    const std::uint64_t hard = account.hard_bytes.load(std::memory_order_relaxed);
    if (hard == kNoQuota) continue;
    std::uint64_t wanted = 0;
    {
      MutexLock lock(evictions_mu_);
      wanted = std::min(evictions_[tenant].wanted_bytes, hard);
    }
    const std::uint64_t charged = account.charged_bytes.load(std::memory_order_relaxed);
    if (charged > hard - wanted && EvictForQuota(tenant, charged - (hard - wanted)) > 0) {
      more = true;
      continue;
    }
    MutexLock lock(evictions_mu_);
    evictions_[tenant].wanted_bytes = 0;
  }
  return more;
}

absl::Status TieredStore::SetQuotas(const TenantQuotas& quotas) {
  if (quotas.size() > kQuotasMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(quotas.size(), " tenants with a quota: want at most ", kQuotasMax));
  }
  for (const auto& [tenant, quota] : quotas) {
    if (quota.soft_bytes == kNoQuota || quota.soft_bytes <= quota.hard_bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("tenant \"", tenant, "\": soft quota ",
                                                   quota.soft_bytes, " is above the hard one, ",
                                                   quota.hard_bytes));
  }
  {
    MutexLock lock(impl_->quotas_mu_);
    std::vector<std::pair<TenantId, TenantQuota>> by_number;
    for (const auto& [tenant, quota] : quotas) {
      if (quota == TenantQuota()) continue;
      KVMILL_ASSIGN_OR_RETURN(const TenantId number, impl_->namespaces_.InternTenant(tenant));
      by_number.emplace_back(number, quota);
    }
    impl_->tiers_->SetQuotas(by_number);
  }
  impl_->TrimSoon();
  return absl::OkStatus();
}

TenantHolding TieredStore::Holding(absl::string_view tenant) const {
  TenantHolding holding;
  const std::optional<TenantId> number = impl_->namespaces_.FindTenant(tenant);
  if (!number.has_value()) return holding;
  const TenantAccount& account = impl_->accounts_[*number];
  holding.blocks = account.blocks.load(std::memory_order_relaxed);
  std::uint64_t disk_blocks = holding.blocks;
  std::uint64_t disk_bytes = account.used_bytes.load(std::memory_order_relaxed);
  // A block is in one memory at most, and what is in none is on disk.
  for (const Tier tier : {Tier::kGpu, Tier::kHost}) {
    const std::size_t i = Index(tier);
    holding.tier_blocks[i] = account.tier_blocks[i].load(std::memory_order_relaxed);
    holding.tier_bytes[i] = account.tier_bytes[i].load(std::memory_order_relaxed);
    disk_blocks -= std::min(disk_blocks, holding.tier_blocks[i]);
    disk_bytes -= std::min(disk_bytes, holding.tier_bytes[i]);
  }
  holding.tier_blocks[Index(Tier::kDisk)] = disk_blocks;
  holding.tier_bytes[Index(Tier::kDisk)] = disk_bytes;
  return holding;
}

std::vector<TenantUsage> TieredStore::Usage() const {
  const std::vector<std::string> names = impl_->namespaces_.TenantNames();
  std::vector<bool> has_namespace(names.size());
  for (const OpenedNamespace* space : impl_->namespaces_.All()) {
    if (space->tenant_id < names.size()) has_namespace[space->tenant_id] = true;
  }
  std::vector<TenantUsage> usages;
  for (TenantId tenant = 0; tenant < names.size(); ++tenant) {
    const TenantAccount& account = impl_->accounts_[tenant];
    TenantUsage usage;
    usage.tenant = names[tenant];
    usage.used_bytes = account.used_bytes.load(std::memory_order_relaxed);
    usage.charged_bytes = account.charged_bytes.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kTierCount; ++i) {
      usage.tier_bytes[i] = account.tier_bytes[i].load(std::memory_order_relaxed);
    }
    usage.quota = {account.soft_bytes.load(std::memory_order_relaxed),
                   account.hard_bytes.load(std::memory_order_relaxed)};
    usage.rejections = account.rejections.load(std::memory_order_relaxed);
    if (has_namespace[tenant] || usage.quota != TenantQuota()) usages.push_back(usage);
  }
  std::sort(usages.begin(), usages.end(),
            [](const TenantUsage& a, const TenantUsage& b) { return a.tenant < b.tenant; });
  return usages;
}

}  // namespace kvmill
