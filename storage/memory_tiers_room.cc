// Making room in host memory: by blocks, and by whole arenas for tenants that have none.
#include <algorithm>
#include <map>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/memory_tiers.h"

namespace kvmill {
namespace {

// Arenas that somebody began to use while they were looked at cannot be emptied: so many are tried.
constexpr std::size_t kArenaTriesMax = 4;
// While an arena is being emptied, blocks that were sealed in it meanwhile are looked for this
// seldom.
constexpr std::uint32_t kLooksPerWalk = 16;
// What is not on disk is lost when it leaves: counts for so many times its bytes.
constexpr std::uint64_t kLostWeight = 4;
constexpr std::uint64_t kUsesMax = 15;

}  // namespace

absl::Status MemoryTiers::Acquire(TenantId tenant, std::size_t page_bytes, std::size_t count,
                                  absl::Duration wait, std::vector<SlotRef>* slots) {
  PagePool& host = pool(Tier::kHost);
  Room::Attempt attempt(room(Tier::kHost), wait);
  Search search;
  bool may_wait = wait > absl::ZeroDuration();
  absl::Status acquired;
  for (;;) {
    attempt.Look();
    search.arenas_seen = arenas_emptied_.load(std::memory_order_acquire);
    acquired = host.Acquire(tenant, page_bytes, count, slots);
    if (acquired.ok()) {
      attempt.Found();
      Pressed();
    }
    if (!absl::IsResourceExhausted(acquired)) break;
    const MadeRoom made = MakeRoom(tenant, page_bytes * count, may_wait, &search);
    if (made.some || attempt.Wait()) continue;
    if (made.withheld) {
      may_wait = false;  // It waited for those over their quota as long as it could.
      continue;
    }
    const PagePool::Stats stats = host.stats();
    acquired = absl::ResourceExhaustedError(
        absl::StrCat("host tier is full: ", page_bytes * count, " bytes wanted, ", stats.used_bytes,
                     " of ", stats.capacity_bytes,
                     " in use and none of it can leave now; retry in 1s or raise --host-bytes"));
    break;
  }
  StopEmptying(&search);
  return acquired;
}

void MemoryTiers::StopEmptying(Search* search) {
  if (search->ticket == 0) return;
  pool(Tier::kHost).EndEmptying(search->arena, search->ticket);
  room(Tier::kHost).MayHaveComeFree();
  search->ticket = 0;
  search->emptied = false;
  search->left.clear();
}

absl::Status MemoryTiers::AcquireFree(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                                      std::vector<SlotRef>* slots) {
  return AcquireRuns(page_bytes, slots, [&](std::size_t bytes, std::size_t count) {
    return pool(Tier::kHost).Acquire(tenant, bytes, count, slots);
  });
}

absl::Status MemoryTiers::AcquirePages(TenantId tenant, absl::Span<const std::uint32_t> page_bytes,
                                       absl::Duration wait, std::vector<SlotRef>* slots) {
  return AcquireRuns(page_bytes, slots, [&](std::size_t bytes, std::size_t count) {
    return Acquire(tenant, bytes, count, wait, slots);
  });
}

absl::Status MemoryTiers::AcquireRuns(
    absl::Span<const std::uint32_t> page_bytes, std::vector<SlotRef>* slots,
    absl::FunctionRef<absl::Status(std::size_t bytes, std::size_t count)> acquire) {
  const std::size_t before = slots->size();
  for (std::size_t begin = 0; begin < page_bytes.size();) {
    std::size_t end = begin + 1;
    while (end < page_bytes.size() && page_bytes[end] == page_bytes[begin]) ++end;
    absl::Status acquired = acquire(page_bytes[begin], end - begin);
    if (!acquired.ok()) {
      for (std::size_t i = before; i < slots->size(); ++i) pool(Tier::kHost).Release((*slots)[i]);
      slots->resize(before);
      return acquired;
    }
    begin = end;
  }
  return absl::OkStatus();
}

MemoryTiers::MadeRoom MemoryTiers::MakeRoom(TenantId tenant, std::uint64_t bytes, bool may_wait,
                                            Search* search) {
  PagePool& host = pool(Tier::kHost);
  if (search->emptied) StopEmptying(search);  // It was not enough.
  if (search->ticket != 0) {
    if (EmptyFurther(search)) return {.some = true};
    if (may_wait) return {.withheld = true};
    StopEmptying(search);
  } else if (may_wait && host.IsEmptyingFor(tenant)) {
    return {.withheld = true};  // Another caller of the tenant is at it.
  }
  const std::vector<TenantId> over = OverSoftNow(Tier::kHost);
  const absl::Span<const TenantId> others = over;
  const std::size_t own =
      static_cast<std::size_t>(std::find(over.begin(), over.end(), tenant) - over.begin());
  if (EvictArena(others.first(own), tenant, may_wait, search)) return {.some = true};
  if (search->ticket != 0) return {.withheld = true};
  if (own < over.size()) {
    std::uint64_t freed = 0;
    while (freed < bytes) {
      const Left left = EvictOne(tenant, EvictReason::kCapacity);
      if (!left.evicted) break;
      freed += left.weight.bytes;
    }
    if (freed > 0) return {.some = true};
    if (EvictArena(others.subspan(own + 1), tenant, may_wait, search)) return {.some = true};
    // Who is over does not take from those who are not.
    return {.withheld = search->ticket != 0};
  }

  if (!host.HasArena(tenant)) {
    // What leaves one by one leaves arenas that are still another tenant's.
    std::map<TenantId, std::size_t> holders;
    for (const PagePool::ArenaUse& use : host.ArenasInUse()) ++holders[use.tenant];
    std::vector<std::pair<std::size_t, TenantId>> largest;
    for (const auto& [holder, arenas] : holders) largest.emplace_back(arenas, holder);
    std::sort(largest.rbegin(), largest.rend());
    std::vector<TenantId> from;
    for (const auto& [arenas, holder] : largest) from.push_back(holder);
    if (EvictArena(from, tenant, may_wait, search)) return {.some = true};
    return {.withheld = search->ticket != 0};
  }
  MadeRoom made;
  std::uint64_t freed = 0;
  while (freed < bytes) {
    const Left left = search->own_only ? EvictOwn(tenant) : EvictOne({}, EvictReason::kCapacity);
    if (!left.evicted) break;
    made.some = true;
    freed += left.weight.bytes;
    if (left.weight.tenant == tenant) continue;
    // Room for that one, not for this. It may be an arena's last block; but where a tenant's
    // blocks were stored all over its arenas, nearly all would leave before an arena is free.
    search->others_bytes += left.weight.bytes;
    if (search->others_bytes < host.arena_bytes() / 4) continue;
    search->others_bytes = 0;
    if (EvictArena({left.weight.tenant}, tenant, may_wait, search)) return {.some = true};
    if (search->ticket != 0) return {.withheld = true};
    // Something in each of them stays: what else leaves would be in vain, too.
    search->own_only = true;
    break;
  }
  return made;
}

EntryId MemoryTiers::OrderEvict(Tier tier, std::optional<TenantId> of, std::optional<TenantId> only,
                                bool may_lose) {
  const auto may_leave = [this, only, may_lose](EntryId entry) {
    bool may = false;
    index_.With(entry, [&](BlockEntry& e) {
      may = (e.flags & kUnwritten) == 0 && e.references == 0 &&
            (may_lose || (e.flags & kOnDisk) != 0) &&
            (!only.has_value() || namespaces_.TenantOf(e.namespace_id()) == *only);
    });
    return may;
  };
  if (of.has_value()) {
    const EntryId victim = orders_.Evict(*of, tier, may_leave);
    if (victim != kNoEntry) policy(tier).Remove(victim);
    return victim;
  }
  const EntryId victim = policy(tier).Evict(may_leave);
  if (victim != kNoEntry && orders_.Contains(tier, victim)) {
    TenantId tenant = 0;
    index_.With(victim, [&](BlockEntry& e) { tenant = namespaces_.TenantOf(e.namespace_id()); });
    orders_.Remove(tenant, tier, victim);
  }
  return victim;
}

MemoryTiers::Left MemoryTiers::EvictOne(std::optional<TenantId> of, EvictReason reason,
                                        bool may_lose) {
  Left left;
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  for (;;) {
    const EntryId victim = OrderEvict(Tier::kHost, of, std::nullopt, may_lose);
    if (victim == kNoEntry) return left;
    if (LeaveHost(victim, reason, &telling, &left.weight)) break;
  }
  left.evicted = true;
  return left;
}

MemoryTiers::Left MemoryTiers::EvictOwn(TenantId tenant) {
  // By the order of all. Blocks of others that it is asked about count as just used: they are
  // passed over once, and the tenant's next stores find its own at the front.
  std::uint32_t asks = 1;
  Left left;
  for (std::uint32_t i = 0; i < asks && !left.evicted; ++i) {
    Telling telling(*this);
    MutexLock lock(policy_mu_);
    asks = 1 + policy(Tier::kHost).size() / static_cast<std::uint32_t>(EvictionPolicy::kAsksMax);
    const EntryId victim = OrderEvict(Tier::kHost, {}, tenant);
    left.evicted =
        victim != kNoEntry && LeaveHost(victim, EvictReason::kCapacity, &telling, &left.weight);
  }
  return left;
}

bool MemoryTiers::LeaveHost(EntryId victim, EvictReason reason, Telling* telling, Weight* weight) {
  // Between the policy's question and now a fetch may have taken a reference: references are
  // taken without the policy's lock.
  bool referenced = false;
  bool gone = false;
  std::size_t page_count = 0;
  std::uint32_t age_s = 0;
  const std::uint32_t now_s = NowSeconds();
  EntryTraits traits;
  index_.With(victim, [&](BlockEntry& e) {
    referenced = e.references != 0;
    traits.key_hash = HashOf(e.id());
    *weight = WeightOf(e);
    if (referenced) return;
    telling->Moved(e.id());  // Or it is gone, which is said instead.
    page_count = e.pages().size();
    age_s = now_s - std::min(now_s, e.inserted_at_s);
    gone = (e.flags & kOnDisk) == 0;
    ReleasePages(e);
  });
  if (referenced) {
    OrderInsert(Tier::kHost, victim, traits, weight->tenant);
    return false;
  }
  CountBlock(Tier::kHost, page_count, *weight, -1);
  // A block that is in no memory cannot be referenced, and one that is nowhere else either is of
  // no use in the table.
  if (gone) {
    RemoveLocked(victim, telling);
  } else {
    Cooled(victim, weight->tenant);
  }
  CountEvicted(Tier::kHost, reason, age_s);
  return true;
}

MemoryTiers::Evicted MemoryTiers::Evict(std::uint64_t bytes, EvictReason reason, bool may_lose) {
  Evicted evicted;
  std::vector<TenantId> in_vain;  // Asked once: a block that is refused is taken for used.
  while (evicted.bytes < bytes) {
    Left left;
    for (const TenantId over : OverSoftNow(Tier::kHost)) {
      if (std::find(in_vain.begin(), in_vain.end(), over) != in_vain.end()) continue;
      left = EvictOne(over, reason, may_lose);
      if (left.evicted) break;
      in_vain.push_back(over);
    }
    if (!left.evicted) left = EvictOne({}, reason, may_lose);
    if (!left.evicted) break;
    ++evicted.blocks;
    evicted.bytes += left.weight.bytes;
  }
  return evicted;
}

// What is in an arena, as blocks.
struct MemoryTiers::ArenaBlocks {
  std::uint32_t arena = 0;
  TenantId tenant = 0;  // Not known of one arena alone.
  std::uint64_t slots_used = 0;
  std::uint64_t slots_found = 0;   // Of blocks that may leave now.
  std::uint64_t slots_leased = 0;  // Of those that somebody refers to, but for the disk.
  std::uint64_t loss = 0;          // Bytes of the first, by what they are worth.
  std::vector<EntryId> may_leave, stay;
};

std::vector<MemoryTiers::ArenaBlocks> MemoryTiers::LookAtArenas(
    absl::Span<const TenantId> of, std::optional<std::uint32_t> only) const {
  PagePool& host = pool(Tier::kHost);
  absl::flat_hash_map<std::uint32_t, ArenaBlocks> arenas;
  if (only.has_value()) arenas[*only].arena = *only;
  for (const PagePool::ArenaUse& use : host.ArenasInUse()) {
    if (only.has_value() || std::find(of.begin(), of.end(), use.tenant) == of.end()) continue;
    ArenaBlocks& blocks = arenas[use.arena];
    blocks.arena = use.arena;
    blocks.tenant = use.tenant;
    blocks.slots_used = use.slots_used;
  }
  std::vector<ArenaBlocks> found;
  if (arenas.empty()) return found;
  index_.ForEach([&](EntryId entry, const BlockEntry& e) {
    if ((e.flags & kInHost) == 0) return true;
    if (of.size() == 1 && namespaces_.TenantOf(e.namespace_id()) != of[0]) return true;
    const bool unwritten = (e.flags & kUnwritten) != 0;
    const bool may_leave = e.references == 0 && !unwritten;
    const std::uint64_t worth = (1 + std::min<std::uint64_t>(e.uses, kUsesMax)) *
                                ((e.flags & kOnDisk) != 0 ? 1 : kLostWeight);
    ArenaBlocks* in = nullptr;
    for (const PagePlace& place : e.pages()) {
      const std::uint32_t arena = host.ArenaOf(place.slot);
      if (in == nullptr || in->arena != arena) {
        const auto it = arenas.find(arena);
        in = it == arenas.end() ? nullptr : &it->second;
        if (in == nullptr) continue;
        (may_leave ? in->may_leave : in->stay).push_back(entry);
      }
      if (may_leave) {
        ++in->slots_found;
        in->loss += worth * place.page_bytes;
      } else if (!unwritten) {
        ++in->slots_leased;
      }
    }
    return true;
  });
  for (auto& [arena, blocks] : arenas) found.push_back(std::move(blocks));
  return found;
}

bool MemoryTiers::EvictArena(absl::Span<const TenantId> from, TenantId heir, bool may_wait,
                             Search* search) {
  if (from.empty()) return false;
  MutexLock lock(arena_mu_);
  // Somebody emptied one meanwhile, maybe for this tenant: first another look.
  if (arenas_emptied_.load(std::memory_order_relaxed) != search->arenas_seen) return true;
  absl::flat_hash_map<TenantId, std::vector<ArenaBlocks>> by_tenant;
  for (ArenaBlocks& blocks : LookAtArenas(from, std::nullopt)) {
    by_tenant[blocks.tenant].push_back(std::move(blocks));
  }
  for (const TenantId tenant : from) {
    if (EvictOneOf(by_tenant[tenant], heir, may_wait, search)) return true;
    if (search->ticket != 0) return false;
  }
  return false;
}

bool MemoryTiers::EvictOneOf(std::vector<ArenaBlocks>& arenas, TenantId heir, bool may_wait,
                             Search* search) {
  PagePool& host = pool(Tier::kHost);
  // What is not of a block that may leave is leased, or of one on its way in or to the disk: the
  // fewer of those, the sooner the arena is empty, if ever. Among equals that which loses least.
  const auto staying = [](const ArenaBlocks& blocks) {
    return blocks.slots_used - std::min(blocks.slots_used, blocks.slots_found) +
           3 * blocks.slots_leased;
  };
  std::sort(arenas.begin(), arenas.end(), [&](const ArenaBlocks& a, const ArenaBlocks& b) {
    return std::pair(staying(a), a.loss) < std::pair(staying(b), b.loss);
  });
  if (arenas.size() > kArenaTriesMax) arenas.resize(kArenaTriesMax);
  for (ArenaBlocks& blocks : arenas) {
    if (staying(blocks) > 0) {
      if (!may_wait) break;
      // A lease ends when its holder likes. Who has an arena has other ways to room.
      if (blocks.slots_leased > 0 && host.HasArena(heir)) continue;
    }
    const std::uint64_t ticket = host.BeginEmptying(blocks.arena, heir);
    if (ticket == 0) continue;
    std::erase_if(blocks.may_leave,
                  [&](EntryId entry) { return EvictFromArena(entry, blocks.arena); });
    const bool emptied = host.IsEmptied(blocks.arena, ticket);
    if (!emptied && !may_wait) {
      host.EndEmptying(blocks.arena, ticket);
      continue;
    }
    search->arena = blocks.arena;
    search->ticket = ticket;
    search->emptied = emptied;
    // The rest leaves as it is written or released; nothing comes to it any more.
    search->left = std::move(blocks.may_leave);
    search->left.insert(search->left.end(), blocks.stay.begin(), blocks.stay.end());
    if (emptied) arenas_emptied_.fetch_add(1, std::memory_order_release);
    return emptied;
  }
  return false;
}

bool MemoryTiers::EmptyFurther(Search* search) {
  std::erase_if(search->left, [&](EntryId entry) { return EvictFromArena(entry, search->arena); });
  if (pool(Tier::kHost).IsEmptied(search->arena, search->ticket)) {
    search->emptied = true;
    arenas_emptied_.fetch_add(1, std::memory_order_release);
    return true;
  }
  // Also when nothing is left that the index knows: what is being stored there enters it later.
  if (search->looks % kLooksPerWalk == 0) {
    search->left.clear();
    for (const ArenaBlocks& blocks : LookAtArenas({}, search->arena)) {
      search->left.insert(search->left.end(), blocks.may_leave.begin(), blocks.may_leave.end());
      search->left.insert(search->left.end(), blocks.stay.begin(), blocks.stay.end());
    }
  }
  ++search->looks;
  return false;
}

bool MemoryTiers::EvictFromArena(EntryId entry, std::uint32_t arena) {
  const PagePool& host = pool(Tier::kHost);
  Telling telling(*this);
  MutexLock lock(policy_mu_);
  // It may be another block's by now. Nothing leaves the table while the mutex is held.
  bool is_there = false;
  bool may_leave = false;
  TenantId tenant = 0;
  index_.At(entry, [&](const BlockEntry& e) {
    if ((e.flags & kInHost) == 0) return;
    for (const PagePlace& place : e.pages()) {
      is_there = is_there || host.ArenaOf(place.slot) == arena;
    }
    may_leave = is_there && (e.flags & kUnwritten) == 0 && e.references == 0;
    tenant = namespaces_.TenantOf(e.namespace_id());
  });
  if (!may_leave) return !is_there;
  OrderRemove(Tier::kHost, entry, tenant);
  Weight weight;
  return LeaveHost(entry, EvictReason::kCapacity, &telling, &weight);
}

}  // namespace kvmill
