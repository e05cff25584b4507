#include "storage/disk_loader.h"

#include "absl/strings/str_cat.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {

PageIdentity IdentityOfPage(const OpenedNamespace& space, const BlockId& id,
                            std::size_t layer_index, std::uint32_t token_count) {
  const LayerGroup& group = space.spec.groups[id.group];
  PageIdentity identity;
  identity.fingerprint = space.fingerprint;
  identity.key = id.key;
  identity.group_index = id.group;
  identity.layer = group.layers[layer_index];
  identity.head_count = group.kv_heads;
  identity.token_count = static_cast<std::uint16_t>(token_count);
  identity.format = FormatOf(space.spec, group);
  identity.source_dtype = space.spec.source_dtype;
  identity.frame = space.spec.frame;
  return identity;
}

absl::Status DiskLoader::Load(const OpenedNamespace& space, const BlockId& id,
                              absl::Duration room_wait) {
  const EntryId entry = tiers_.ReferenceOnDisk(id);
  if (entry == kNoEntry) return absl::NotFoundError("the block is not on disk");
  absl::Status loaded = LoadOnce(space, id, entry, room_wait);
  tiers_.Release(entry);
  return loaded;
}

absl::Status DiskLoader::LoadOnce(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                                  absl::Duration room_wait) {
  std::shared_ptr<InFlight> load;
  {
    MutexLock lock(mu_);
    std::shared_ptr<InFlight>& slot = in_flight_[entry];
    if (slot != nullptr) {
      load = slot;
      while (!load->done) ended_.Wait(mu_);
      return load->result;
    }
    slot = std::make_shared<InFlight>();
    load = slot;
  }
  absl::Status result = LoadAlone(space, id, entry, room_wait);
  {
    MutexLock lock(mu_);
    load->result = result;
    load->done = true;
    in_flight_.erase(entry);
  }
  ended_.NotifyAll();
  return result;
}

void DiskLoader::Drop(const DiskBlockId& disk_id, EntryId entry) {
  disk_.Remove({disk_id}).IgnoreError();  // It is out of the index in any case.
  tiers_.DiskCopyIsGone(entry);
}

absl::StatusOr<DiskBlockMeta> DiskLoader::Find(const OpenedNamespace& space, const BlockId& id,
                                               EntryId entry) {
  absl::StatusOr<DiskBlockMeta> found = disk_.Find({space.fingerprint, id.group, id.key});
  if (absl::IsNotFound(found.status())) tiers_.DiskCopyIsGone(entry);
  return found;
}

absl::Status DiskLoader::ReadVerified(const OpenedNamespace& space, const DiskBlockMeta& meta,
                                      EntryId entry,
                                      absl::Span<const absl::Span<std::byte>> pages) {
  const BlockId id{space.id, meta.id.group, meta.id.key};
  absl::Status read = disk_.Read(meta.id, 0, pages);
  for (std::size_t i = 0; i < pages.size() && read.ok(); ++i) {
    read = VerifyPage(IdentityOfPage(space, id, i, meta.token_count), pages[i]);
  }
  if (absl::IsDataLoss(read)) {
    counters_.checksum_failures[static_cast<std::size_t>(Tier::kDisk)].Add();
    counters_.evicted(Tier::kDisk, EvictReason::kCorrupt).Add();
    LogWarning(absl::StrCat("disk tier: block ", meta.id.key.ToHex(),
                            " is damaged and was dropped: ", read.message()));
    Drop(meta.id, entry);
  }
  if (absl::IsNotFound(read)) tiers_.DiskCopyIsGone(entry);
  return read;
}

absl::Status DiskLoader::LoadAlone(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                                   absl::Duration room_wait) {
  const std::int64_t start_nanos = clock_.MonotonicNanos();
  KVMILL_ASSIGN_OR_RETURN(const DiskBlockMeta meta, Find(space, id, entry));
  const std::size_t layer_count = space.spec.groups[id.group].layers.size();
  if (meta.page_bytes.size() != layer_count) {
    Drop(meta.id, entry);
    return absl::NotFoundError(
        absl::StrCat("block on disk has ", meta.page_bytes.size(), " pages, want ", layer_count));
  }

  std::vector<SlotRef> slots;
  KVMILL_RETURN_IF_ERROR(tiers_.AcquirePages(space.tenant_id, meta.page_bytes, room_wait, &slots));
  const auto release = [&] {
    for (SlotRef slot : slots) pool_.Release(slot);
  };
  std::vector<absl::Span<std::byte>> pages(layer_count);
  for (std::size_t i = 0; i < layer_count; ++i) {
    pages[i] = pool_.Bytes(slots[i]).first(meta.page_bytes[i]);
  }

  absl::Status read = ReadVerified(space, meta, entry, pages);
  if (!read.ok()) {
    release();
    return absl::IsDataLoss(read) ? absl::NotFoundError("the copy on disk was damaged") : read;
  }
  for (SlotRef slot : slots) pool_.Publish(slot);

  std::vector<PagePlace> places(layer_count);
  for (std::size_t i = 0; i < layer_count; ++i)
    places[i] = PagePlace{slots[i], meta.page_bytes[i], 0};
  // Removed or stored anew meanwhile: what was read is of no use.
  if (!tiers_.AddLoaded(entry, id, meta.parent, places)) release();
  counters_.ObserveStage(Stage::kFetchDisk,
                         static_cast<double>(clock_.MonotonicNanos() - start_nanos) * 1e-9);
  return absl::OkStatus();
}

absl::Status DiskLoader::Verify(const OpenedNamespace& space, const BlockId& id,
                                std::vector<std::byte>* scratch, std::uint64_t* records_checked) {
  const EntryId entry = tiers_.ReferenceOnDisk(id);
  if (entry == kNoEntry) return absl::NotFoundError("the block is not on disk");
  absl::Status verified = VerifyEntry(space, id, entry, scratch, records_checked);
  tiers_.Release(entry);
  return verified;
}

absl::Status DiskLoader::VerifyEntry(const OpenedNamespace& space, const BlockId& id, EntryId entry,
                                     std::vector<std::byte>* scratch,
                                     std::uint64_t* records_checked) {
  KVMILL_ASSIGN_OR_RETURN(const DiskBlockMeta meta, Find(space, id, entry));
  std::size_t total_bytes = 0;
  for (std::uint32_t bytes : meta.page_bytes) total_bytes += bytes;
  if (scratch->size() < total_bytes) scratch->resize(total_bytes);
  std::vector<absl::Span<std::byte>> pages;
  std::size_t offset = 0;
  for (std::uint32_t bytes : meta.page_bytes) {
    pages.push_back(absl::MakeSpan(*scratch).subspan(offset, bytes));
    offset += bytes;
  }
  *records_checked += pages.size() * space.spec.groups[id.group].kv_heads;
  return ReadVerified(space, meta, entry, pages);
}

}  // namespace kvmill
