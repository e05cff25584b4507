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

void TieredStore::Locate(const BlockRef& block, std::vector<PageRun>* runs) const {
  const PagePool& pool = impl_->tiers_->pool(block.memory_);
  const auto append = [&](const auto& slot_of) {
    SlotRef before;
    for (std::size_t i = 0; i < block.pages_.size(); ++i) {
      const SlotRef slot = slot_of(i);
      const auto page_bytes = static_cast<std::uint32_t>(block.pages_[i].size());
      if (Follows(slot, before) && runs->back().page_bytes == page_bytes) {
        PageRun& run = runs->back();
        if (++run.page_count == 2) {
          run.stride_bytes =
              static_cast<std::uint32_t>(block.pages_[i].data() - block.pages_[i - 1].data());
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
      before = slot;
    }
  };
  if (!block.slots_.empty()) {
    append([&](std::size_t i) { return block.slots_[i]; });
    return;
  }
  impl_->index_->With(block.entry_, [&](BlockEntry& e) {
    append([&](std::size_t i) { return e.pages()[i].slot; });
  });
}

void TieredStore::LoadGenerations(const BlockRef& block,
                                  std::vector<std::uint64_t>* generations) const {
  const PagePool& pool = impl_->tiers_->pool(block.memory_);
  for (const SlotRef slot : block.slots_) generations->push_back(pool.Generation(slot));
  if (!block.slots_.empty()) return;
  impl_->index_->With(block.entry_, [&](BlockEntry& e) {
    for (const PagePlace& page : e.pages()) generations->push_back(pool.Generation(page.slot));
  });
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
