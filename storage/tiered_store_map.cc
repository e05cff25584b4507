// Blocks as readers in other processes see them.
#include <optional>

#include "storage/tiered_store_impl.h"

namespace kvmill {

BlockRef TieredStore::FetchFromMemory(const BlockId& id, FetchPath path, PageMemory memory) {
  std::optional<Tier> only;
  if (memory != PageMemory::kInPlace) {
    only = memory == PageMemory::kGpu ? Tier::kGpu : Tier::kHost;
  }
  BlockRef ref;
  if (impl_->TryReference(this, id, &ref, only)) {
    ref.tier_ = ref.memory_;
    impl_->counters_.fetched(path, ref.tier_).Add();
  }
  return ref;
}

void TieredStore::Prefetch(absl::Span<const BlockId> ids) const { impl_->index_->Prefetch(ids); }

std::uint64_t TieredStore::Touch(absl::Span<const BlockId> ids) {
  std::uint64_t touched = 0;
  for (const BlockId& id : ids) {
    BlockRef ref;  // The policy wants a block that stays while it is touched.
    if (impl_->TryReference(this, id, &ref)) ++touched;
  }
  return touched;
}

void TieredStore::Locate(const BlockRef& block, std::vector<PageLocation>* pages) const {
  const PagePool& pool = impl_->tiers_->pool(block.memory_);
  const std::size_t first = pages->size();
  pages->resize(first + block.pages_.size());
  const auto locate = [&](std::size_t i, SlotRef slot) {
    const PagePool::Location where = pool.Locate(slot);
    PageLocation& page = (*pages)[first + i];
    page.tier = block.memory_;
    page.arena = where.arena;
    page.arena_epoch = where.arena_epoch;
    page.offset_bytes = where.offset_bytes;
    page.page_bytes = static_cast<std::uint32_t>(block.pages_[i].size());
    page.generation = pool.Generation(slot);
    page.generation_offset_bytes = where.generation_offset_bytes;
  };
  if (!block.slots_.empty()) {
    for (std::size_t i = 0; i < block.slots_.size(); ++i) locate(i, block.slots_[i]);
    return;
  }
  impl_->index_->With(block.entry_, [&](BlockEntry& e) {
    for (std::size_t i = 0; i < e.pages().size(); ++i) locate(i, e.pages()[i].slot);
  });
}

TieredStore::Arena TieredStore::ArenaOf(const PageLocation& page) const {
  const PagePool& pool = impl_->tiers_->pool(page.tier);
  return {pool.ArenaFd(page.arena), pool.arena_bytes()};
}

TieredStore::Arena TieredStore::GenerationsOf(const PageLocation& page) const {
  const PagePool& pool = impl_->tiers_->pool(page.tier);
  return {pool.GenerationFd(page.arena),
          page.tier == Tier::kGpu ? kExtentBytes : pool.arena_bytes()};
}

}  // namespace kvmill
