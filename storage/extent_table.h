// Which extents belong to whom: arenas to tenants, runs of adjacent extents to their takers.
//
// An arena belongs to the tenant of the first extent taken from it until its last extent is
// returned. The first extent of every arena is never given out (generations live there). Memory of
// an arena that another tenant had must be renewed before this tenant may have it; the table says
// which arena, the owner does it.
//
// Internal to storage/. Not thread-safe. Nothing is allocated after construction.
#ifndef KVMILL_STORAGE_EXTENT_TABLE_H_
#define KVMILL_STORAGE_EXTENT_TABLE_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "storage/page_pool.h"

namespace kvmill {

inline constexpr std::uint32_t kNone = 0xFFFFFFFFu;  // No extent, arena or tenant index.

class ExtentTable {
 public:
  ExtentTable(std::uint32_t arena_count, std::uint32_t extents_per_arena);

  // Dense index below arena_count of a tenant that has or wants arenas, kNone when there are more
  // such tenants than arenas. Valid until the tenant's last extent is returned, or until
  // ForgetIfIdle.
  std::uint32_t FindOrAddTenant(TenantId tenant);
  void ForgetIfIdle(std::uint32_t tenant_index);

  // The first of `run` adjacent extents (1 to extents_per_arena - 1), kNone when the tenant's
  // arenas and the unassigned ones that need no renewal have no such run. Looks into at most
  // `arenas_max` of the tenant's arenas.
  std::uint32_t Take(std::uint32_t tenant_index, std::uint32_t run, std::uint32_t arenas_max);
  void Return(std::uint32_t first, std::uint32_t run);
  std::uint32_t TenantIndexOf(std::uint32_t extent) const {
    return arenas_[extent / extents_per_arena_].tenant_index;
  }

  // Hands out an unassigned arena that this tenant may have only after its memory was renewed;
  // kNone when there is none. AddRenewed gives it back: clean, or (when renewal failed) still to be
  // renewed.
  std::uint32_t TakeForRenewal(TenantId tenant);
  void AddRenewed(std::uint32_t arena, bool clean);

  // Nothing is taken from this arena until EndEmptying with the same ticket, which is not 0, or
  // until it was unassigned and `heir` took it: nobody else may. False when it is unassigned, the
  // heir's own, or being emptied already.
  bool BeginEmptying(std::uint32_t arena, TenantId heir, std::uint64_t ticket);
  // False when there was nothing to end.
  bool EndEmptying(std::uint32_t arena, std::uint64_t ticket);
  std::uint32_t emptying_count() const { return emptying_count_; }
  bool HasArena(TenantId tenant) const;
  bool IsEmptying(std::uint32_t arena) const { return arenas_[arena].emptying != 0; }
  bool IsEmptyingFor(std::uint32_t arena, std::uint64_t ticket) const {
    return arenas_[arena].emptying == ticket;
  }
  TenantId HeirOf(std::uint32_t arena) const { return arenas_[arena].heir; }  // While emptied.
  bool IsAssigned(std::uint32_t arena) const { return arenas_[arena].tenant_index != kNone; }
  TenantId TenantOf(std::uint32_t arena) const {  // Of one that is assigned.
    return tenants_[arenas_[arena].tenant_index].id;
  }

  std::uint64_t extents_held() const { return extents_held_; }

 private:
  struct Arena {
    std::uint32_t tenant_index = kNone;  // kNone: unassigned.
    std::uint32_t held = 0;              // Extents taken.
    bool renew = false;                  // Unassigned, and not usable by anyone before renewal.
    bool clean = true;                   // Nobody has had it since its memory was new.
    TenantId last_tenant = 0;            // Whose bytes are in it unless clean.
    std::uint32_t prev = kNone;          // Arenas of one tenant that have free extents.
    std::uint32_t next = kNone;
    bool linked = false;
    std::uint64_t emptying = 0;  // A ticket, or 0.
    TenantId heir = 0;           // While it is being emptied.
  };
  struct Tenant {
    TenantId id = 0;
    bool used = false;
    std::uint32_t arena_count = 0;
    std::uint32_t with_room = kNone;  // Head of its list of arenas.
  };

  bool MayHave(const Arena& arena, TenantId tenant) const {
    return arena.emptying == 0 || arena.heir == tenant;
  }
  bool IsHeld(std::uint32_t extent) const { return (held_[extent / 64] >> (extent % 64) & 1) != 0; }
  void Mark(std::uint32_t first, std::uint32_t run, bool held);
  std::uint32_t FindRun(std::uint32_t arena, std::uint32_t run) const;
  std::uint32_t TakeFrom(std::uint32_t arena, std::uint32_t run);
  // An unassigned arena without another tenant's bytes becomes this tenant's; kNone without one.
  std::uint32_t Assign(std::uint32_t tenant_index);
  void Unassign(std::uint32_t arena);
  void Link(std::uint32_t arena);
  void Unlink(std::uint32_t arena);

  const std::uint32_t extents_per_arena_;
  std::uint64_t extents_held_ = 0;
  std::uint32_t emptying_count_ = 0;
  std::vector<Arena> arenas_;
  std::vector<std::uint32_t> unassigned_;  // Stack; the last one returned is used first.
  std::vector<Tenant> tenants_;
  std::vector<std::uint64_t> held_;  // One bit an extent.
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_EXTENT_TABLE_H_
