// Removal, eviction on demand, and what people look at.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

// Tells the watcher, which may be null, that a namespace is being cleared, and at the end that it
// was.
class ClearTold {
 public:
  ClearTold(BlockWatcher* watcher, NamespaceId space) : watcher_(watcher), space_(space) {
    if (watcher_ != nullptr) watcher_->Clearing(space_);
  }
  ~ClearTold() {
    if (watcher_ != nullptr) watcher_->Cleared(space_);
  }
  ClearTold(const ClearTold&) = delete;
  ClearTold& operator=(const ClearTold&) = delete;

 private:
  BlockWatcher* const watcher_;
  const NamespaceId space_;
};

}  // namespace

absl::StatusOr<std::uint64_t> TieredStore::Impl::RemoveBlocks(absl::Span<const BlockId> ids) {
  std::uint64_t removed = 0;
  bool flush = false;
  {
    const WriteBehind::Removal removal(write_behind_.get(), ids);
    std::vector<DiskBlockId> on_disk = HideBlocks(ids, &removed);
    flush = !on_disk.empty();
    if (flush) KVMILL_RETURN_IF_ERROR(disk_->Remove(on_disk));
  }
  if (flush) KVMILL_RETURN_IF_ERROR(disk_->Flush());
  tiers_->RoomMayHaveComeFree();
  return removed;
}

std::vector<DiskBlockId> TieredStore::Impl::HideBlocks(absl::Span<const BlockId> ids,
                                                       std::uint64_t* removed) {
  std::vector<DiskBlockId> on_disk;
  for (const BlockId& id : ids) {
    NoteRemoval(id);
    std::shared_ptr<BlockWriter::Assembly> assembling;
    {
      MutexLock lock(assemblies_mu_);
      if (auto it = assemblies_.find(id); it != assemblies_.end()) assembling = it->second;
    }
    if (assembling != nullptr)
      assembling->Abandon(absl::AbortedError("removed while it was stored"));
    const std::uint8_t flags = tiers_->Remove(id);
    if (flags == 0) continue;
    ++*removed;
    counters_.evicted(TierOf(flags), EvictReason::kRemoved).Add();
    if ((flags & kOnDisk) != 0) on_disk.push_back(write_behind_->DiskIdOf(id));
  }
  return on_disk;
}

absl::StatusOr<std::uint64_t> TieredStore::Remove(NamespaceId namespace_id,
                                                  absl::Span<const BlockKey> keys) {
  const OpenedNamespace* space = impl_->namespaces_.Find(namespace_id);
  if (space == nullptr) return 0;
  std::vector<BlockId> ids;
  for (const BlockKey& key : keys) {
    for (std::size_t g = 0; g < space->spec.groups.size(); ++g) {
      ids.push_back({namespace_id, static_cast<std::uint8_t>(g), key});
    }
  }
  return impl_->RemoveBlocks(ids);
}

absl::StatusOr<std::uint64_t> TieredStore::Clear(NamespaceId namespace_id) {
  // Copies are in no table: those of other namespaces end as well.
  for (auto& removals : impl_->removals_) removals.fetch_add(1, std::memory_order_acq_rel);
  // However it ends: nobody may wait for the second call.
  const ClearTold told(impl_->watcher_, namespace_id);
  std::vector<BlockId> ids;
  impl_->index_->ForEach([&](EntryId, const BlockEntry& e) {
    if (e.id().namespace_id == namespace_id) ids.push_back(e.id());
    return true;
  });
  {
    MutexLock lock(impl_->assemblies_mu_);
    for (const auto& [id, assembly] : impl_->assemblies_) {
      if (id.namespace_id == namespace_id) ids.push_back(id);
    }
  }
  return impl_->RemoveBlocks(ids);
}

absl::StatusOr<std::uint64_t> TieredStore::Evict(Tier tier, std::uint64_t bytes) {
  if (tier != Tier::kGpu && tier != Tier::kHost) {
    return absl::InvalidArgumentError(
        absl::StrCat("evict from tier ", TierName(tier), ": want gpu or host"));
  }
  if (tier == Tier::kGpu && impl_->gpu_ == nullptr) {
    return absl::FailedPreconditionError("evict from tier gpu: this daemon has none");
  }
  const auto evict = [&](std::uint64_t more_bytes) {
    return tier == Tier::kGpu ? impl_->gpu_->Demote(more_bytes, EvictReason::kAdmin)
                              : impl_->tiers_->Evict(more_bytes, EvictReason::kAdmin);
  };
  MemoryTiers::Evicted evicted = evict(bytes);
  if (evicted.bytes < bytes && impl_->write_behind_ != nullptr) {
    impl_->write_behind_->WaitWritten();
    evicted.blocks += evict(bytes - evicted.bytes).blocks;
  }
  return evicted.blocks;
}

absl::Status TieredStore::SetWatermarks(Tier tier, Watermarks marks) {
  if (tier != Tier::kGpu && tier != Tier::kHost) {
    return absl::InvalidArgumentError(
        absl::StrCat("watermarks of tier ", TierName(tier), ": want gpu or host"));
  }
  KVMILL_RETURN_IF_ERROR(CheckWatermarks(marks));
  impl_->keeper_->Set(tier, marks);
  return absl::OkStatus();
}

void TieredStore::List(absl::FunctionRef<bool(const BlockInfo&)> visit) const {
  const std::uint32_t now_s =
      static_cast<std::uint32_t>(impl_->clock_.MonotonicNanos() / 1'000'000'000);
  // Copied first: the index forbids long callbacks, and `visit` may write to a peer.
  std::vector<BlockInfo> infos;
  impl_->index_->ForEach([&](EntryId, const BlockEntry& e) {
    BlockInfo info;
    const BlockId id = e.id();
    info.namespace_id = id.namespace_id;
    info.group = id.group;
    info.key = id.key;
    info.tier = TierOf(e.flags);
    for (const PagePlace& place : e.pages()) info.bytes += place.page_bytes;
    info.age_s = now_s - std::min(now_s, e.inserted_at_s);
    info.leases = e.references;
    infos.push_back(info);
    return true;
  });
  for (const BlockInfo& info : infos) {
    if (!visit(info)) return;
  }
}

absl::StatusOr<TieredStore::VerifyResult> TieredStore::Verify() {
  struct Found {
    BlockId id;
    std::uint8_t flags;
  };
  std::vector<Found> blocks;
  impl_->index_->ForEach([&](EntryId, const BlockEntry& e) {
    blocks.push_back({e.id(), e.flags});
    return true;
  });
  VerifyResult result;
  std::vector<std::byte> scratch;
  for (const Found& block : blocks) {
    const OpenedNamespace& space = *impl_->namespaces_.Find(block.id.namespace_id);
    if (InMemory(block.flags)) {
      absl::Status verified;
      Tier tier = Tier::kHost;
      {
        BlockRef ref;
        if (impl_->TryReference(this, block.id, &ref)) {
          tier = ref.memory();
          verified = impl_->VerifyInMemory(space, block.id, ref, &scratch);
          result.records_checked += ref.pages().size() * space.spec.groups[block.id.group].kv_heads;
        }
      }
      if (!verified.ok()) {
        ++result.failures;
        KVMILL_RETURN_IF_ERROR(impl_->DropDamaged(block.id, tier, verified));
      }
    }
    if ((block.flags & kOnDisk) != 0) {
      absl::Status verified =
          impl_->loader_->Verify(space, block.id, &scratch, &result.records_checked);
      if (absl::IsDataLoss(verified)) {
        ++result.failures;
      } else if (!verified.ok() && !absl::IsNotFound(verified)) {
        return verified;
      }
    }
  }
  return result;
}

absl::Status TieredStore::Impl::VerifyInMemory(const OpenedNamespace& space, const BlockId& id,
                                               const BlockRef& ref,
                                               std::vector<std::byte>* scratch) {
  if (ref.memory() == Tier::kHost) {
    for (std::size_t i = 0; i < ref.pages().size(); ++i) {
      KVMILL_RETURN_IF_ERROR(
          VerifyPage(IdentityOfPage(space, id, i, ref.token_count()), ref.pages()[i]));
    }
    return absl::OkStatus();
  }
  std::size_t total_bytes = 0;
  for (const auto& page : ref.pages()) total_bytes += page.size();
  if (scratch->size() < total_bytes) scratch->resize(total_bytes);
  std::vector<absl::Span<std::byte>> pages;
  std::size_t offset = 0;
  for (const auto& page : ref.pages()) {
    pages.push_back(absl::MakeSpan(*scratch).subspan(offset, page.size()));
    offset += page.size();
  }
  return gpu_->Read(space, id, ref.token_count(), ref.slots_, pages);
}

StoreStats TieredStore::stats() const {
  StoreStats stats;
  impl_->counters_.Fill(&stats);
  stats.blocks = impl_->index_->size();
  stats.metadata_bytes = impl_->index_->metadata_bytes() + impl_->tiers_->order_bytes();
  const PagePool::Stats pool = impl_->pool_->stats();
  stats.tiers[Index(Tier::kHost)].used_bytes = pool.used_bytes;
  stats.tiers[Index(Tier::kHost)].capacity_bytes = pool.capacity_bytes;
  stats.huge_page_bytes = pool.huge_bytes;
  if (impl_->gpu_ != nullptr) {
    const PagePool::Stats gpu = impl_->gpu_pool_->stats();
    stats.tiers[Index(Tier::kGpu)].used_bytes = gpu.used_bytes;
    stats.tiers[Index(Tier::kGpu)].capacity_bytes = gpu.capacity_bytes;
  }
  if (impl_->disk_ != nullptr) {
    const DiskStore::Stats disk = impl_->disk_->stats();
    stats.tiers[Index(Tier::kDisk)].used_bytes = disk.used_bytes;
    stats.tiers[Index(Tier::kDisk)].capacity_bytes = disk.capacity_bytes;
    stats.disk_write_failures += disk.failed_flushes;
  }
  if (impl_->write_behind_ != nullptr) stats.unwritten_blocks = impl_->write_behind_->pending();
  // After that: what was written goes on to the GPU, and is in one of the two counts.
  if (impl_->gpu_ != nullptr) stats.unpromoted_blocks = impl_->gpu_->pending();
  MutexLock lock(impl_->assemblies_mu_);
  stats.assembling_blocks = impl_->assemblies_.size();
  return stats;
}

}  // namespace kvmill
