// Removal, eviction on demand, and what people look at.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {

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
    const Tier tier = (flags & kInHost) != 0 ? Tier::kHost : Tier::kDisk;
    counters_.evicted(tier, EvictReason::kRemoved).Add();
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
  if (tier != Tier::kHost) {
    return absl::InvalidArgumentError(
        absl::StrCat("evict from tier ", TierName(tier), ": want host"));
  }
  MemoryTiers::Evicted evicted = impl_->tiers_->Evict(bytes, EvictReason::kAdmin);
  if (evicted.bytes < bytes && impl_->write_behind_ != nullptr) {
    impl_->write_behind_->WaitWritten();
    evicted.blocks += impl_->tiers_->Evict(bytes - evicted.bytes, EvictReason::kAdmin).blocks;
  }
  return evicted.blocks;
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
    info.tier = (e.flags & kInHost) != 0 ? Tier::kHost : Tier::kDisk;
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
    if ((block.flags & kInHost) != 0) {
      absl::Status verified;
      {
        BlockRef ref;
        if (impl_->TryReference(this, block.id, &ref)) {
          for (std::size_t i = 0; i < ref.pages().size() && verified.ok(); ++i) {
            verified =
                VerifyPage(IdentityOfPage(space, block.id, i, ref.token_count()), ref.pages()[i]);
          }
          result.records_checked += ref.pages().size() * space.spec.groups[block.id.group].kv_heads;
        }
      }
      if (!verified.ok()) {
        ++result.failures;
        impl_->counters_.checksum_failures[Index(Tier::kHost)].Add();
        LogError(absl::StrCat("host tier: block ", block.id.key.ToHex(),
                              " is damaged and is dropped: ", verified.message()));
        // Someone may be reading it: then the whole block is hidden, its copy on disk with it.
        if (!impl_->tiers_->DropCopy(block.id, Tier::kHost)) {
          KVMILL_RETURN_IF_ERROR(impl_->RemoveBlocks({block.id}).status());
        }
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

StoreStats TieredStore::stats() const {
  StoreStats stats;
  impl_->counters_.Fill(&stats);
  stats.blocks = impl_->index_->size();
  stats.metadata_bytes = impl_->index_->metadata_bytes();
  const PagePool::Stats pool = impl_->pool_->stats();
  stats.tiers[Index(Tier::kHost)].used_bytes = pool.used_bytes;
  stats.tiers[Index(Tier::kHost)].capacity_bytes = pool.capacity_bytes;
  if (impl_->disk_ != nullptr) {
    const DiskStore::Stats disk = impl_->disk_->stats();
    stats.tiers[Index(Tier::kDisk)].used_bytes = disk.used_bytes;
    stats.tiers[Index(Tier::kDisk)].capacity_bytes = disk.capacity_bytes;
  }
  if (impl_->write_behind_ != nullptr) stats.unwritten_blocks = impl_->write_behind_->pending();
  MutexLock lock(impl_->assemblies_mu_);
  stats.assembling_blocks = impl_->assemblies_.size();
  return stats;
}

}  // namespace kvmill
