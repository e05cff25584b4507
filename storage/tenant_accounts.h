// What each tenant has in the store, counted where it is decided.
//
// Internal to storage/, but for TenantCharge as a member of what is on its way in. Thread-safe.
// Values are atomics: each changes under the lock of what it counts (the eviction policies' mutex,
// an index entry's), and a reader may see a sum a moment late.
#ifndef KVMILL_STORAGE_TENANT_ACCOUNTS_H_
#define KVMILL_STORAGE_TENANT_ACCOUNTS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "storage/page_pool.h"
#include "storage/tenant_quotas.h"

namespace kvmill {

struct alignas(64) TenantAccount {
  std::atomic<std::uint64_t> blocks{0};      // In the index,
  std::atomic<std::uint64_t> used_bytes{0};  //   and their bytes.
  // Those; what is on its way in; what was removed and is still referred to. Never above the hard
  // quota by anything that came in under it.
  std::atomic<std::uint64_t> charged_bytes{0};
  std::array<std::atomic<std::uint64_t>, kTierCount> tier_blocks{};
  std::array<std::atomic<std::uint64_t>, kTierCount> tier_bytes{};
  std::atomic<std::uint64_t> soft_bytes{kNoQuota};
  std::atomic<std::uint64_t> hard_bytes{kNoQuota};
  std::atomic<std::uint64_t> rejections{0};

  // False, and nothing charged, when that would be more than the hard quota.
  bool TryCharge(std::uint64_t bytes) {
    std::uint64_t charged = charged_bytes.load(std::memory_order_relaxed);
    for (;;) {
      const std::uint64_t hard = hard_bytes.load(std::memory_order_relaxed);
      if (hard != kNoQuota && (charged > hard || bytes > hard - charged)) return false;
      if (charged_bytes.compare_exchange_weak(charged, charged + bytes,
                                              std::memory_order_relaxed)) {
        return true;
      }
    }
  }
  void Uncharge(std::uint64_t bytes) { charged_bytes.fetch_sub(bytes, std::memory_order_relaxed); }

  // One block, in these four.
  void AddBlock(std::uint64_t bytes) {
    blocks.fetch_add(1, std::memory_order_relaxed);
    used_bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  void TakeBlock(std::uint64_t bytes) {
    blocks.fetch_sub(1, std::memory_order_relaxed);
    used_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  }
  void AddToTier(Tier tier, std::uint64_t bytes) {
    tier_blocks[static_cast<std::size_t>(tier)].fetch_add(1, std::memory_order_relaxed);
    tier_bytes[static_cast<std::size_t>(tier)].fetch_add(bytes, std::memory_order_relaxed);
  }
  void TakeFromTier(Tier tier, std::uint64_t bytes) {
    tier_blocks[static_cast<std::size_t>(tier)].fetch_sub(1, std::memory_order_relaxed);
    tier_bytes[static_cast<std::size_t>(tier)].fetch_sub(bytes, std::memory_order_relaxed);
  }
  std::uint64_t InTier(Tier tier) const {
    return tier_bytes[static_cast<std::size_t>(tier)].load(std::memory_order_relaxed);
  }
  // How many times the soft quota is there; at most 1: the tenant is not over it.
  double OverSoft(Tier tier) const {
    const std::uint64_t soft = soft_bytes.load(std::memory_order_relaxed);
    if (soft == kNoQuota) return 0;
    const std::uint64_t bytes = InTier(tier);
    // With a quota of nothing, one byte more is further over than any other tenant can be.
    if (soft == 0) return bytes == 0 ? 0 : 1e30 + static_cast<double>(bytes);
    return static_cast<double>(bytes) / static_cast<double>(soft);
  }
};

// Bytes charged for a block on its way in: given back by the destructor, unless the block arrived.
// Movable. Not thread-safe.
class TenantCharge {
 public:
  TenantCharge() = default;
  TenantCharge(TenantCharge&& other) noexcept
      : account_(std::exchange(other.account_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  TenantCharge& operator=(TenantCharge&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    account_ = std::exchange(other.account_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~TenantCharge() { Reset(); }

  // `bytes` more were charged to the account, always the same one.
  void Add(TenantAccount& account, std::uint64_t bytes) {
    account_ = &account;
    bytes_ += bytes;
  }
  // What `other` has of the same account.
  void Join(TenantCharge&& other) {
    if (other.account_ != nullptr) Add(*other.account_, other.bytes_);
    other.BecomesBlock();
  }
  void GiveBack(std::uint64_t bytes) {
    account_->Uncharge(bytes);
    bytes_ -= bytes;
  }
  // The block is in the index: its entry takes the charge over, which is its bytes.
  void BecomesBlock() {
    account_ = nullptr;
    bytes_ = 0;
  }
  void Reset() {
    if (account_ != nullptr) account_->Uncharge(bytes_);
    account_ = nullptr;
    bytes_ = 0;
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  TenantAccount* account_ = nullptr;  // Outlives this.
  std::uint64_t bytes_ = 0;
};

class TenantAccounts {
 public:
  explicit TenantAccounts(std::size_t tenants_max)
      : accounts_(std::make_unique<TenantAccount[]>(tenants_max)) {}

  TenantAccount& operator[](TenantId tenant) { return accounts_[tenant]; }
  const TenantAccount& operator[](TenantId tenant) const { return accounts_[tenant]; }

 private:
  const std::unique_ptr<TenantAccount[]> accounts_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_TENANT_ACCOUNTS_H_
