// Blocks as readers in other processes see them.
#include "storage/tiered_store_impl.h"

namespace kvmill {

BlockRef TieredStore::FetchFromMemory(const BlockId& id, FetchPath path) {
  BlockRef ref;
  if (impl_->TryReference(this, id, &ref)) {
    ref.tier_ = Tier::kHost;
    impl_->counters_.fetched(path, Tier::kHost).Add();
  }
  return ref;
}

std::uint64_t TieredStore::Touch(absl::Span<const BlockId> ids) {
  std::uint64_t touched = 0;
  for (const BlockId& id : ids) {
    BlockRef ref;  // The policy wants a block that stays while it is touched.
    if (impl_->TryReference(this, id, &ref)) ++touched;
  }
  return touched;
}

void TieredStore::Locate(const BlockRef& block, std::vector<PageLocation>* pages) const {
  impl_->index_->With(block.entry_, [&](BlockEntry& e) {
    for (const PagePlace& place : e.pages()) {
      const PagePool::Location where = impl_->pool_->Locate(place.slot);
      PageLocation& page = pages->emplace_back();
      page.tier = Tier::kHost;
      page.arena = where.arena;
      page.arena_epoch = where.arena_epoch;
      page.offset_bytes = where.offset_bytes;
      page.page_bytes = place.page_bytes;
      page.generation = impl_->pool_->Generation(place.slot);
      page.generation_offset_bytes = where.generation_offset_bytes;
    }
  });
}

TieredStore::Arena TieredStore::ArenaOf(const PageLocation& page) const {
  return {impl_->pool_->ArenaFd(page.arena), impl_->pool_->arena_bytes()};
}

}  // namespace kvmill
