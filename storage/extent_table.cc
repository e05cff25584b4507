#include "storage/extent_table.h"

#include "storage/core/check.h"

namespace kvmill {

ExtentTable::ExtentTable(std::uint32_t arena_count, std::uint32_t extents_per_arena)
    : extents_per_arena_(extents_per_arena),
      arenas_(arena_count),
      tenants_(arena_count),
      held_((std::size_t{arena_count} * extents_per_arena + 63) / 64) {
  unassigned_.reserve(arena_count);
  for (std::uint32_t arena = arena_count; arena-- > 0;) unassigned_.push_back(arena);
}

std::uint32_t ExtentTable::FindOrAddTenant(TenantId tenant) {
  // Tenants that hold memory are few, at most one an arena, and this is one look a block.
  std::uint32_t unused = kNone;
  for (std::uint32_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i].used && tenants_[i].id == tenant) return i;
    if (!tenants_[i].used && unused == kNone) unused = i;
  }
  if (unused != kNone) tenants_[unused] = {.id = tenant, .used = true};
  return unused;
}

void ExtentTable::ForgetIfIdle(std::uint32_t tenant_index) {
  if (tenants_[tenant_index].arena_count == 0) tenants_[tenant_index] = Tenant{};
}

std::uint32_t ExtentTable::Take(std::uint32_t tenant_index, std::uint32_t run,
                                std::uint32_t arenas_max) {
  for (std::uint32_t arena = tenants_[tenant_index].with_room; arena != kNone && arenas_max > 0;
       arena = arenas_[arena].next, --arenas_max) {
    const std::uint32_t first = TakeFrom(arena, run);
    if (first != kNone) return first;
  }
  const std::uint32_t arena = Assign(tenant_index);
  return arena == kNone ? kNone : TakeFrom(arena, run);
}

void ExtentTable::Return(std::uint32_t first, std::uint32_t run) {
  Mark(first, run, false);
  extents_held_ -= run;
  const std::uint32_t arena = first / extents_per_arena_;
  KVMILL_CHECK(arenas_[arena].held >= run);
  arenas_[arena].held -= run;
  if (!arenas_[arena].linked && !IsEmptying(arena)) Link(arena);
  if (arenas_[arena].held == 0) Unassign(arena);
}

std::uint32_t ExtentTable::TakeForRenewal(TenantId tenant) {
  for (std::size_t i = unassigned_.size(); i-- > 0;) {
    const Arena& arena = arenas_[unassigned_[i]];
    if (!MayHave(arena, tenant)) continue;
    if (!arena.renew && (arena.clean || arena.last_tenant == tenant)) continue;
    const std::uint32_t taken = unassigned_[i];
    unassigned_.erase(unassigned_.begin() + static_cast<std::ptrdiff_t>(i));
    return taken;
  }
  return kNone;
}

void ExtentTable::AddRenewed(std::uint32_t arena, bool clean) {
  arenas_[arena].clean = clean;
  arenas_[arena].renew = !clean;
  unassigned_.push_back(arena);
}

bool ExtentTable::HasArena(TenantId tenant) const {
  for (const Tenant& has : tenants_) {
    if (has.used && has.id == tenant) return has.arena_count > 0;
  }
  return false;
}

bool ExtentTable::BeginEmptying(std::uint32_t arena, TenantId heir, std::uint64_t ticket) {
  Arena& a = arenas_[arena];
  if (!IsAssigned(arena) || IsEmptying(arena) || TenantOf(arena) == heir) return false;
  if (a.linked) Unlink(arena);
  a.emptying = ticket;
  a.heir = heir;
  ++emptying_count_;
  return true;
}

bool ExtentTable::EndEmptying(std::uint32_t arena, std::uint64_t ticket) {
  Arena& a = arenas_[arena];
  if (a.emptying != ticket) return false;
  a.emptying = 0;
  --emptying_count_;
  if (IsAssigned(arena) && a.held < extents_per_arena_ - 1) Link(arena);
  return true;
}

void ExtentTable::Mark(std::uint32_t first, std::uint32_t run, bool held) {
  for (std::uint32_t extent = first; extent < first + run; ++extent) {
    KVMILL_CHECK(IsHeld(extent) != held);
    held_[extent / 64] ^= std::uint64_t{1} << (extent % 64);
  }
}

std::uint32_t ExtentTable::FindRun(std::uint32_t arena, std::uint32_t run) const {
  const std::uint32_t end = (arena + 1) * extents_per_arena_;
  std::uint32_t free = 0;
  for (std::uint32_t extent = end - extents_per_arena_ + 1; extent < end; ++extent) {
    free = IsHeld(extent) ? 0 : free + 1;
    if (free == run) return extent + 1 - run;
  }
  return kNone;
}

std::uint32_t ExtentTable::TakeFrom(std::uint32_t arena, std::uint32_t run) {
  if (extents_per_arena_ - 1 - arenas_[arena].held < run) return kNone;
  const std::uint32_t first = FindRun(arena, run);
  if (first == kNone) return kNone;
  Mark(first, run, true);
  extents_held_ += run;
  arenas_[arena].held += run;
  if (arenas_[arena].held == extents_per_arena_ - 1) Unlink(arena);
  return first;
}

std::uint32_t ExtentTable::Assign(std::uint32_t tenant_index) {
  Tenant& tenant = tenants_[tenant_index];
  std::size_t found = unassigned_.size();
  for (std::size_t i = unassigned_.size(); i-- > 0;) {
    const Arena& arena = arenas_[unassigned_[i]];
    if (arena.renew || (!arena.clean && arena.last_tenant != tenant.id)) continue;
    if (!MayHave(arena, tenant.id)) continue;
    found = i;
    if (!arena.clean) break;  // Its own bytes: leaves clean ones to other tenants.
  }
  if (found == unassigned_.size()) return kNone;
  const std::uint32_t arena = unassigned_[found];
  unassigned_.erase(unassigned_.begin() + static_cast<std::ptrdiff_t>(found));
  arenas_[arena].tenant_index = tenant_index;
  arenas_[arena].last_tenant = tenant.id;
  arenas_[arena].clean = false;
  if (IsEmptying(arena)) --emptying_count_;
  arenas_[arena].emptying = 0;
  ++tenant.arena_count;
  Link(arena);
  return arena;
}

void ExtentTable::Unassign(std::uint32_t arena) {
  const std::uint32_t tenant_index = arenas_[arena].tenant_index;
  if (arenas_[arena].linked) Unlink(arena);
  arenas_[arena].tenant_index = kNone;
  unassigned_.push_back(arena);
  --tenants_[tenant_index].arena_count;
  ForgetIfIdle(tenant_index);
}

void ExtentTable::Link(std::uint32_t arena) {
  Tenant& tenant = tenants_[arenas_[arena].tenant_index];
  arenas_[arena].prev = kNone;
  arenas_[arena].next = tenant.with_room;
  arenas_[arena].linked = true;
  if (tenant.with_room != kNone) arenas_[tenant.with_room].prev = arena;
  tenant.with_room = arena;
}

void ExtentTable::Unlink(std::uint32_t arena) {
  Arena& a = arenas_[arena];
  if (a.prev != kNone) {
    arenas_[a.prev].next = a.next;
  } else {
    tenants_[a.tenant_index].with_room = a.next;
  }
  if (a.next != kNone) arenas_[a.next].prev = a.prev;
  a.prev = a.next = kNone;
  a.linked = false;
}

}  // namespace kvmill
