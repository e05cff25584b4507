#include "storage/memory_tiers.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

MemoryTiers::MemoryTiers(BlockIndex& index, const Clock& clock, StoreCounters& counters, Part host,
                         Part gpu, StoreObserver* observer, const NamespaceTable& namespaces,
                         TenantAccounts& accounts, TenantOrders::Options orders)
    : index_(index),
      clock_(clock),
      counters_(counters),
      observer_(observer),
      watcher_(dynamic_cast<BlockWatcher*>(observer)),
      namespaces_(namespaces),
      accounts_(accounts),
      pools_{gpu.pool, host.pool},
      rooms_{Room(clock), Room(clock)},
      orders_(std::move(orders)),
      policies_{std::move(gpu.policy), std::move(host.policy)} {}

void MemoryTiers::ReleasePages(BlockEntry& entry) {
  if (!InMemory(entry.flags)) return;
  PagePool& from = pool(TierOf(entry.flags));
  for (PagePlace& place : entry.pages()) {
    from.Release(place.slot);
    place.slot = SlotRef{};
  }
  entry.flags = static_cast<std::uint8_t>(entry.flags & ~(kInGpu | kInHost));
}

void MemoryTiers::RoomMayHaveComeFree() {
  for (Room& room : rooms_) room.MayHaveComeFree();
}

std::uint32_t MemoryTiers::NowSeconds() const {
  return static_cast<std::uint32_t>(clock_.MonotonicNanos() / 1'000'000'000);
}

void MemoryTiers::CountBlock(Tier tier, std::size_t page_count, const Weight& weight, int sign) {
  if (sign > 0) {
    counters_.tier_blocks[Index(tier)].Add();
    counters_.memory_pages.Add(page_count);
    accounts_[weight.tenant].AddToTier(tier, weight.bytes);
  } else {
    counters_.tier_blocks[Index(tier)].Subtract();
    counters_.memory_pages.Subtract(page_count);
    accounts_[weight.tenant].TakeFromTier(tier, weight.bytes);
  }
}

void MemoryTiers::OrderInsert(Tier tier, EntryId entry, const EntryTraits& traits,
                              TenantId tenant) {
  policy(tier).Insert(entry, traits);
  orders_.Insert(tenant, tier, entry, traits);
}

void MemoryTiers::OrderRemove(Tier tier, EntryId entry, TenantId tenant) {
  policy(tier).Remove(entry);
  orders_.Remove(tenant, tier, entry);
}

void MemoryTiers::Cooled(EntryId entry, TenantId tenant) {
  if (!orders_.tracks(tenant)) return;
  EntryTraits traits;
  index_.With(entry, [&](BlockEntry& e) { traits.key_hash = HashOf(e.id()); });
  orders_.Insert(tenant, Tier::kDisk, entry, traits);
}

void MemoryTiers::CountEvicted(Tier tier, EvictReason reason, std::uint32_t age_s) {
  counters_.evicted(tier, reason).Add();
  counters_.eviction_age_seconds[Index(tier)].Observe(age_s);
}

EntryTraits MemoryTiers::TraitsOf(const BlockId& id, const BlockKey& parent,
                                  std::uint32_t block_index, Tier tier) {
  EntryTraits traits;
  traits.key_hash = HashOf(id);
  traits.depth = block_index;
  if (!parent.empty()) {
    index_.Find({id.namespace_id, id.group, parent}, [&](EntryId found, BlockEntry& e) {
      if (TierOf(e.flags) == tier) traits.parent = found;
    });
  }
  return traits;
}

absl::Status MemoryTiers::AddNew(const NewBlock& block) {
  Telling telling(*this);
  Weight weight{namespaces_.TenantOf(block.id.namespace_id), 0};
  for (const PagePlace& place : block.places) weight.bytes += place.page_bytes;
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(block.id, block.parent, block.block_index, Tier::kHost);
  KVMILL_ASSIGN_OR_RETURN(const EntryId entry,
                          index_.Insert(
                              block.id, block.places.size(),
                              [&](BlockEntry& e) {
                                e.token_count = block.token_count;
                                e.flags = block.flags;
                                e.references = block.referenced != nullptr ? 1 : 0;
                                e.inserted_at_s = NowSeconds();
                                std::copy(block.places.begin(), block.places.end(),
                                          e.pages().begin());
                              },
                              block.link));
  telling.Stored(block.id, block.parent);
  OrderInsert(Tier::kHost, entry, traits, weight.tenant);
  accounts_[weight.tenant].AddBlock(weight.bytes);
  CountBlock(Tier::kHost, block.places.size(), weight, +1);
  if ((block.flags & kUnwritten) != 0) {
    // A job of a block of this name that was removed may have written this one by now.
    index_.With(entry, [&](BlockEntry& e) {
      if ((e.flags & kOnDisk) == 0) unwritten_.Add(weight.tenant, block.id);
    });
  }
  if (block.referenced != nullptr) *block.referenced = entry;
  return absl::OkStatus();
}

EntryId MemoryTiers::ReferenceOnDisk(const BlockId& id) {
  EntryId entry = kNoEntry;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kOnDisk) == 0) return;
    entry = found;
    ++e.references;
  });
  return entry;
}

bool MemoryTiers::AddLoaded(EntryId entry, const BlockId& id, const BlockKey& parent,
                            absl::Span<const PagePlace> places) {
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(id, parent, 0, Tier::kHost);
  bool added = false;
  Weight weight;
  index_.With(entry, [&](BlockEntry& e) {
    if ((e.flags & kDetached) != 0 || InMemory(e.flags)) return;
    if (e.pages().size() != places.size()) return;
    weight = WeightOf(e);
    std::copy(places.begin(), places.end(), e.pages().begin());
    e.flags |= kInHost;
    e.inserted_at_s = NowSeconds();
    added = true;
  });
  if (!added) return false;
  telling.Moved(id);
  orders_.Remove(weight.tenant, Tier::kDisk, entry);
  OrderInsert(Tier::kHost, entry, traits, weight.tenant);
  CountBlock(Tier::kHost, places.size(), weight, +1);
  return true;
}

void MemoryTiers::Touch(EntryId entry) {
  MutexLock lock(policy_mu_);
  std::uint8_t flags = 0;
  TenantId tenant = 0;
  index_.With(entry, [&](BlockEntry& e) {
    flags = e.flags;
    tenant = namespaces_.TenantOf(e.namespace_id());
    if (e.uses < std::numeric_limits<std::uint8_t>::max()) ++e.uses;
  });
  if (!InMemory(flags) || (flags & (kDetached | kLeaving)) != 0) return;
  policy(TierOf(flags)).Touch(entry);
  orders_.Touch(tenant, TierOf(flags), entry);
}

std::uint8_t MemoryTiers::RemoveLocked(EntryId entry, Telling* telling) {
  std::uint8_t flags = 0;
  bool referenced = false;
  std::size_t page_count = 0;
  Weight weight;
  const bool detached = index_.Detach(entry, [&](BlockEntry& e) {
    flags = e.flags;
    weight = WeightOf(e);
    page_count = e.pages().size();
    referenced = e.references != 0;
    if (telling->wanted()) telling->Removed(e.id());
    if ((flags & kOnDisk) == 0) unwritten_.Remove(weight.tenant, e.id());
    if (!referenced) ReleasePages(e);
  });
  KVMILL_CHECK(detached);
  if (InMemory(flags)) {
    if ((flags & kLeaving) == 0) OrderRemove(TierOf(flags), entry, weight.tenant);
    CountBlock(TierOf(flags), page_count, weight, -1);
  } else {
    orders_.Remove(weight.tenant, Tier::kDisk, entry);
  }
  TenantAccount& account = accounts_[weight.tenant];
  if ((flags & kOnDisk) != 0) {
    counters_.tier_blocks[Index(Tier::kDisk)].Subtract();
    account.TakeFromTier(Tier::kDisk, weight.bytes);
  }
  account.TakeBlock(weight.bytes);
  // Pages that somebody reads are charged until the last one lets go.
  if (!referenced || !InMemory(flags)) account.Uncharge(weight.bytes);
  if (!referenced) index_.Free(entry);
  return flags;
}

std::uint8_t MemoryTiers::Remove(const BlockId& id) {
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  if (!index_.Find(id, [&](EntryId found, BlockEntry&) { entry = found; })) return 0;
  return RemoveLocked(entry, &telling);
}

bool MemoryTiers::DropCopy(const BlockId& id, Tier tier) {
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  bool gone = false;
  std::size_t page_count = 0;
  Weight weight;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if (TierOf(e.flags) != tier || e.references != 0) return;
    entry = found;
    weight = WeightOf(e);
    page_count = e.pages().size();
    gone = (e.flags & kOnDisk) == 0;
    if (gone) return;
    ReleasePages(e);
    e.flags = static_cast<std::uint8_t>(e.flags & ~kUnwritten);
  });
  if (entry == kNoEntry) return false;
  if (gone) {
    RemoveLocked(entry, &telling);
  } else {
    telling.Moved(id);
    OrderRemove(tier, entry, weight.tenant);
    CountBlock(tier, page_count, weight, -1);
    Cooled(entry, weight.tenant);
  }
  return true;
}

void MemoryTiers::EvictedFromDisk(const BlockId& id) {
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  EntryId entry = kNoEntry;
  const std::uint32_t now_s = NowSeconds();
  std::uint32_t age_s = 0;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    entry = found;
    age_s = now_s - std::min(now_s, e.inserted_at_s);
  });
  CountEvicted(Tier::kDisk, EvictReason::kCapacity, age_s);
  if (entry != kNoEntry) DiskCopyIsGoneLocked(entry, &telling);
}

void MemoryTiers::DiskCopyIsGone(EntryId entry) {
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  DiskCopyIsGoneLocked(entry, &telling);
}

void MemoryTiers::DiskCopyIsGoneLocked(EntryId entry, Telling* telling) {
  bool known = false;
  bool gone = false;
  index_.With(entry, [&](BlockEntry& e) {
    if ((e.flags & kOnDisk) == 0 || (e.flags & kDetached) != 0) return;
    known = true;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kOnDisk);
    gone = !InMemory(e.flags);
    const Weight weight = WeightOf(e);
    accounts_[weight.tenant].TakeFromTier(Tier::kDisk, weight.bytes);
    if (!gone) unwritten_.Add(weight.tenant, e.id());
  });
  if (!known) return;
  counters_.tier_blocks[Index(Tier::kDisk)].Subtract();
  if (gone) RemoveLocked(entry, telling);
}

void MemoryTiers::Written(BlockEntry& entry) {
  entry.flags |= kOnDisk;
  const Weight weight = WeightOf(entry);
  accounts_[weight.tenant].AddToTier(Tier::kDisk, weight.bytes);
  unwritten_.Remove(weight.tenant, entry.id());
}

void MemoryTiers::Release(EntryId entry) {
  bool last = false;
  index_.With(entry, [&](BlockEntry& e) {
    KVMILL_DCHECK(e.references > 0);
    --e.references;
    last = e.references == 0 && (e.flags & kDetached) != 0;
    if (!last) return;
    if (InMemory(e.flags)) {
      const Weight weight = WeightOf(e);
      accounts_[weight.tenant].Uncharge(weight.bytes);
    }
    ReleasePages(e);
  });
  if (last) index_.Free(entry);
  RoomMayHaveComeFree();
}

bool MemoryTiers::TakeFromHost(const BlockId& id, bool only_if_free, MovingBlock* block) {
  block->entry = kNoEntry;
  index_.Find(id, [&](EntryId found, BlockEntry& e) {
    if ((e.flags & kInHost) == 0) return;
    if (only_if_free && (e.references != 0 || (e.flags & kUnwritten) != 0)) return;
    ++e.references;
    *block = {found, id, e.token_count, {e.pages().begin(), e.pages().end()}};
  });
  return block->entry != kNoEntry;
}

bool MemoryTiers::TakeGpuVictim(std::optional<TenantId> for_tenant, MovingBlock* block,
                                bool on_disk_only) {
  MutexLock lock(policy_mu_);
  for (;;) {
    EntryId victim = kNoEntry;
    for (const TenantId over : OverSoft(Tier::kGpu)) {
      victim = OrderEvict(Tier::kGpu, over, std::nullopt, !on_disk_only);
      if (victim != kNoEntry) break;
    }
    const bool only_over =
        for_tenant.has_value() && accounts_[*for_tenant].OverSoft(Tier::kGpu) > 1;
    if (victim == kNoEntry && !only_over) {
      victim = OrderEvict(Tier::kGpu, {}, std::nullopt, !on_disk_only);
    }
    if (victim == kNoEntry) return false;
    bool referenced = false;
    EntryTraits traits;
    TenantId tenant = 0;
    index_.With(victim, [&](BlockEntry& e) {
      referenced = e.references != 0;
      traits.key_hash = HashOf(e.id());
      tenant = namespaces_.TenantOf(e.namespace_id());
      if (referenced) return;
      ++e.references;
      e.flags |= kLeaving;
      *block = {victim, e.id(), e.token_count, {e.pages().begin(), e.pages().end()}};
    });
    if (!referenced) return true;
    OrderInsert(Tier::kGpu, victim, traits, tenant);
  }
}

bool MemoryTiers::Move(const MovingBlock& block, Tier to, const BlockKey& parent,
                       absl::Span<const PagePlace> places, EvictReason reason) {
  const Tier from = to == Tier::kGpu ? Tier::kHost : Tier::kGpu;
  const std::uint32_t now_s = NowSeconds();
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  const EntryTraits traits = TraitsOf(block.id, parent, 0, to);
  bool moved = false;
  std::uint32_t age_s = 0;
  Weight weight;
  index_.With(block.entry, [&](BlockEntry& e) {
    if (e.references != 1 || (e.flags & (kDetached | kUnwritten)) != 0) return;
    weight = WeightOf(e);
    ReleasePages(e);
    std::copy(places.begin(), places.end(), e.pages().begin());
    e.flags =
        static_cast<std::uint8_t>((e.flags & ~kLeaving) | (to == Tier::kGpu ? kInGpu : kInHost));
    age_s = now_s - std::min(now_s, e.inserted_at_s);
    moved = true;
  });
  if (!moved) return false;
  telling.Moved(block.id);
  // A victim has left its order already.
  if (from == Tier::kHost) OrderRemove(from, block.entry, weight.tenant);
  OrderInsert(to, block.entry, traits, weight.tenant);
  CountBlock(from, places.size(), weight, -1);
  CountBlock(to, places.size(), weight, +1);
  if (from == Tier::kGpu) CountEvicted(from, reason, age_s);
  counters_.moved_blocks[Index(to)].Add();
  return true;
}

bool MemoryTiers::Leave(const MovingBlock& block, bool may_lose, EvictReason reason) {
  const std::uint32_t now_s = NowSeconds();
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  bool left = false;
  bool gone = false;
  std::uint32_t age_s = 0;
  Weight weight;
  index_.With(block.entry, [&](BlockEntry& e) {
    gone = (e.flags & kOnDisk) == 0;
    weight = WeightOf(e);
    if (e.references != 1 || (e.flags & (kDetached | kUnwritten)) != 0 || (gone && !may_lose)) {
      return;
    }
    ReleasePages(e);
    e.flags = static_cast<std::uint8_t>(e.flags & ~kLeaving);
    age_s = now_s - std::min(now_s, e.inserted_at_s);
    left = true;
  });
  if (!left) return false;
  telling.Moved(block.id);  // Or it is gone, which is said instead.
  CountBlock(Tier::kGpu, block.places.size(), weight, -1);
  CountEvicted(Tier::kGpu, reason, age_s);
  if (gone) {
    RemoveLocked(block.entry, &telling);
  } else {
    Cooled(block.entry, weight.tenant);
  }
  return true;
}

void MemoryTiers::PutBack(const MovingBlock& block) {
  MutexLock lock(policy_mu_);
  EntryTraits traits;
  traits.key_hash = HashOf(block.id);
  const TenantId tenant = namespaces_.TenantOf(block.id.namespace_id);
  bool detached = false;
  index_.With(block.entry, [&](BlockEntry& e) {
    detached = (e.flags & kDetached) != 0;
    e.flags = static_cast<std::uint8_t>(e.flags & ~kLeaving);
  });
  if (!detached) OrderInsert(Tier::kGpu, block.entry, traits, tenant);
}

}  // namespace kvmill
