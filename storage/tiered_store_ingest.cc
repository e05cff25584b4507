// The way in: from BeginStore to a block in the index.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/error_guard.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

RunLink LinkOf(const OpenedNamespace& space, const BlockOrigin& origin) {
  // Nobody looks for the blocks behind a tail, or for a tail by its run.
  if (origin.token_count < space.spec.block_tokens || !origin.index_known) return {};
  RunLink link;
  link.place = static_cast<std::uint8_t>(origin.block_index % kRunBlocks);
  if (link.place == 0) {
    link.kind = RunLink::Kind::kFirst;
  } else if (origin.anchor_hash != 0) {
    link.kind = RunLink::Kind::kAnchor;
    link.hash = origin.anchor_hash;
  } else if (!origin.parent.empty()) {
    link.kind = RunLink::Kind::kParent;
    link.hash = KeyHash(space.fingerprint, origin.parent);
  } else {
    return {};
  }
  return link;
}

}  // namespace

absl::Status TieredStore::Impl::CheckOrigin(const BlockId& id, const BlockOrigin& origin) const {
  const OpenedNamespace* space = namespaces_.Find(id.namespace_id);
  if (space == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("namespace ", id.namespace_id, " is not open"));
  if (id.key.empty()) return absl::InvalidArgumentError("block key of 0 bytes: want 1 to 64");
  if (id.group >= space->spec.groups.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer group ", int{id.group}, ": the namespace has ", space->spec.groups.size()));
  }
  if (origin.token_count == 0 || origin.token_count > space->spec.block_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_count ", origin.token_count, ": want 1 to ", space->spec.block_tokens));
  }
  // Two continuations of one parent must never share a name: the first one's bytes would be served
  // for the other.
  if (origin.token_count < space->spec.block_tokens &&
      (origin.tail_key.empty() ||
       !(id.key == TailKey(origin.parent, origin.token_count, origin.tail_key)))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", id.key.ToHex(), " of ", origin.token_count,
        " tokens is a tail, and a tail's key is TailKey(parent, tokens, the engine's key)"));
  }
  return absl::OkStatus();
}

absl::Status TieredStore::Impl::AcquirePages(TenantId tenant, std::size_t page_bytes,
                                             std::size_t count, std::vector<SlotRef>* slots) {
  return tiers_->Acquire(tenant, page_bytes, count, options_.room_wait, slots);
}

absl::StatusOr<std::shared_ptr<BlockWriter::Assembly>> TieredStore::Impl::BeginStore(
    const BlockId& id, const BlockOrigin& origin) {
  KVMILL_RETURN_IF_ERROR(CheckOrigin(id, origin));
  GiveUpStaleAssemblies();
  {
    MutexLock lock(assemblies_mu_);
    KVMILL_ASSIGN_OR_RETURN(std::shared_ptr<BlockWriter::Assembly> joined, Join(id, origin));
    if (joined != nullptr) return joined;
  }
  // After that: what is there is fine, and a block that was begun before may be finished.
  OpenedNamespace& space = *namespaces_.Find(id.namespace_id);
  if (options_.guard != nullptr) {
    if (absl::Status allowed = options_.guard->CheckStore(space); !allowed.ok()) {
      counters_.rejected_blocks.Add();
      return allowed;
    }
  }
  // Getting memory may take a while: no lock is held, and whoever comes second drops what it got.
  auto made = std::make_shared<BlockWriter::Assembly>(*this, space, id, origin);
  absl::Status prepared = made->Prepare();
  if (!prepared.ok()) {
    {
      // Another writer of the block may have had the last room, under a quota or in the pool.
      MutexLock lock(assemblies_mu_);
      KVMILL_ASSIGN_OR_RETURN(std::shared_ptr<BlockWriter::Assembly> joined, Join(id, origin));
      if (joined != nullptr) return joined;
    }
    counters_.rejected_blocks.Add();
    CountRefusal(namespaces_.TenantOf(id.namespace_id), prepared);
    return prepared;
  }
  Holds strange;
  {
    MutexLock lock(assemblies_mu_);
    KVMILL_ASSIGN_OR_RETURN(std::shared_ptr<BlockWriter::Assembly> joined, Join(id, origin));
    if (joined != nullptr) return joined;
    assemblies_[id] = made;
    Follow(made, &strange);
  }
  FailHolds(strange, absl::AbortedError("it is stored with another parent, index or token count"));
  return made;
}

absl::StatusOr<std::shared_ptr<BlockWriter::Assembly>> TieredStore::Impl::Join(
    const BlockId& id, const BlockOrigin& origin) {
  if (auto it = assemblies_.find(id); it != assemblies_.end()) {
    if (it->second->origin() == origin) return it->second;
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", id.key.ToHex(), " is being stored with another parent, index or token count"));
  }
  // After the table, because Commit enters the index before it leaves the table.
  if (index_->Find(id, [](EntryId, BlockEntry&) {})) {
    counters_.existing_blocks.Add();
    return absl::AlreadyExistsError("the block is in the store");
  }
  return std::shared_ptr<BlockWriter::Assembly>();
}

absl::Status TieredStore::Impl::Enter(const BlockId& id, const BlockOrigin& origin,
                                      absl::Span<const PagePlace> places, EntryId* referenced) {
  MemoryTiers::NewBlock entry;
  entry.id = id;
  entry.parent = origin.parent;
  entry.block_index = origin.block_index;
  entry.link = LinkOf(*namespaces_.Find(id.namespace_id), origin);
  entry.token_count = static_cast<std::uint16_t>(origin.token_count);
  entry.flags =
      static_cast<std::uint8_t>(write_behind_ != nullptr ? kInHost | kUnwritten : kInHost);
  entry.places = places;
  entry.referenced = referenced;
  KVMILL_RETURN_IF_ERROR(tiers_->AddNew(entry));
  if (write_behind_ != nullptr) {
    write_behind_->Enqueue(id, origin.parent, entry.link);
  } else if (gpu_ != nullptr) {
    gpu_->Enqueue(id, origin.parent);
  }
  return absl::OkStatus();
}

absl::Status TieredStore::Impl::Commit(const BlockWriter::Assembly& assembly, SealedBlock* block) {
  std::vector<PagePlace> places(block->slots.size());
  for (std::size_t i = 0; i < places.size(); ++i)
    places[i] = PagePlace{block->slots[i], block->page_bytes[i], 0};
  // A block whose pages somebody may be reading must not leave before its holds refer to it. Who
  // follows the assembly was counted before its seal began: both orders are sequentially
  // consistent.
  EntryId entry = kNoEntry;
  const bool held = hold_count_.load() != 0;
  const absl::Status entered = Enter(block->id, block->origin, places, held ? &entry : nullptr);
  Holds holds, expecting;
  {
    MutexLock lock(assemblies_mu_);
    assemblies_.erase(block->id);
    holds = HoldsOf(block->id, &assembly);
    expecting = HoldsOf(block->id, nullptr);
  }
  if (!entered.ok()) {
    FailHolds(holds, entered);
    return entered;
  }
  SealHolds(block->id, holds, entry);
  SealHolds(block->id, expecting);
  if (entry != kNoEntry) tiers_->Release(entry);
  counters_.stored_blocks.Add();
  if (block->raw_heads > 0) counters_.raw_blocks.Add();
  const std::size_t format =
      FormatNameIndex(FormatOf(block->space->spec, block->space->spec.groups[block->id.group]));
  counters_.raw_bytes_ingested[format].Add(block->raw_bytes);
  counters_.encoded_bytes_stored[format].Add(block->stored_bytes);
  stored_.Add(block->id.namespace_id, block->stored_bytes);
  return absl::OkStatus();
}

void TieredStore::Impl::Abandoned(const BlockWriter::Assembly& assembly, const absl::Status& why) {
  counters_.rejected_blocks.Add();
  CountRefusal(namespaces_.TenantOf(assembly.id().namespace_id), why);
  // The pages go back to the pool with the last writer, outside the lock.
  std::shared_ptr<BlockWriter::Assembly> dropped;
  Holds holds;
  {
    MutexLock lock(assemblies_mu_);
    if (auto it = assemblies_.find(assembly.id());
        it != assemblies_.end() && it->second.get() == &assembly) {
      dropped = std::move(it->second);
      assemblies_.erase(it);
    }
    holds = HoldsOf(assembly.id(), &assembly);
  }
  FailHolds(holds, why);
}

void TieredStore::Impl::GiveUpStaleAssemblies() {
  const std::int64_t oldest_nanos =
      clock_.MonotonicNanos() - absl::ToInt64Nanoseconds(options_.assembly_timeout);
  std::vector<std::shared_ptr<BlockWriter::Assembly>> stale;
  {
    MutexLock lock(assemblies_mu_);
    for (const auto& [id, assembly] : assemblies_) {
      if (assembly->last_progress_nanos() < oldest_nanos) stale.push_back(assembly);
    }
  }
  for (const auto& assembly : stale) {
    assembly->Abandon(absl::AbortedError(
        absl::StrCat("not completed within ", absl::FormatDuration(options_.assembly_timeout),
                     " of the last write")));
  }
  if (!stale.empty()) tiers_->RoomMayHaveComeFree();
}

void TieredStore::Impl::TrimSoon() {
  {
    MutexLock lock(maintenance_mu_);
    trim_ = true;
  }
  stop_changed_.NotifyAll();
}

void TieredStore::Impl::RunMaintenance() {
  bool more = false;
  for (;;) {
    {
      MutexLock lock(maintenance_mu_);
      if (!stopping_ && !trim_ && !more)
        stop_changed_.WaitFor(maintenance_mu_, std::chrono::seconds(1));
      if (stopping_) return;
      trim_ = false;
    }
    GiveUpStaleAssemblies();
    more = TrimTenants();
  }
}

}  // namespace kvmill
