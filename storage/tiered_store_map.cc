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

void TieredStore::Impl::ForEachSlot(const BlockRef& block,
                                    absl::FunctionRef<void(std::size_t, SlotRef)> use) {
  if (!block.slots_.empty()) {
    for (std::size_t i = 0; i < block.slots_.size(); ++i) use(i, block.slots_[i]);
    return;
  }
  index_->With(block.entry_, [&](BlockEntry& e) {
    for (std::size_t i = 0; i < e.pages().size(); ++i) use(i, e.pages()[i].slot);
  });
}

void TieredStore::Locate(const BlockRef& block, std::vector<PageRun>* runs) const {
  const PagePool& pool = impl_->tiers_->pool(block.memory_);
  SlotRef previous;
  impl_->ForEachSlot(block, [&](std::size_t i, SlotRef slot) {
    const auto page_bytes = static_cast<std::uint32_t>(block.pages_[i].size());
    // Neighbours in one extent are at the extent's stride, and so are their generations.
    if (previous.valid() && slot.extent == previous.extent && slot.index == previous.index + 1 &&
        runs->back().page_bytes == page_bytes) {
      PageRun& run = runs->back();
      if (++run.page_count == 2) {
        run.stride_bytes = static_cast<std::uint32_t>(pool.Bytes(slot).size());
      }
    } else {
      const PagePool::Location where = pool.Locate(slot);
      PageRun& run = runs->emplace_back();
      run.tier = block.memory_;
      run.arena = where.arena;
      run.arena_epoch = where.arena_epoch;
      run.offset_bytes = where.offset_bytes;
      run.generation_offset_bytes = where.generation_offset_bytes;
      run.page_count = 1;
      run.page_bytes = page_bytes;
    }
    previous = slot;
  });
}

void TieredStore::LoadGenerations(const BlockRef& block,
                                  std::vector<std::uint64_t>* generations) const {
  const PagePool& pool = impl_->tiers_->pool(block.memory_);
  impl_->ForEachSlot(
      block, [&](std::size_t, SlotRef slot) { generations->push_back(pool.Generation(slot)); });
}

TieredStore::Arena TieredStore::ArenaOf(const PageRun& run) const {
  const PagePool& pool = impl_->tiers_->pool(run.tier);
  return {pool.ArenaFd(run.arena), pool.arena_bytes()};
}

TieredStore::Arena TieredStore::GenerationsOf(const PageRun& run) const {
  const PagePool& pool = impl_->tiers_->pool(run.tier);
  return {pool.GenerationFd(run.arena), run.tier == Tier::kGpu ? kExtentBytes : pool.arena_bytes()};
}

}  // namespace kvmill
