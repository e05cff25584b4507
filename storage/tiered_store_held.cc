// What is here, for who keeps account of it.
#include <algorithm>
#include <vector>

#include "storage/core/check.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

bool InSomeTier(std::uint8_t flags) { return InMemory(flags) || (flags & kOnDisk) != 0; }

// Whether every layer group but the first has the block.
bool OthersHave(BlockIndex& index, const OpenedNamespace& space, const BlockKey& key) {
  for (std::size_t g = 1; g < space.spec.groups.size(); ++g) {
    bool has = false;
    index.Find({space.id, static_cast<std::uint8_t>(g), key},
               [&](EntryId, BlockEntry& e) { has = InSomeTier(e.flags); });
    if (!has) return false;
  }
  return true;
}

}  // namespace

void TieredStore::Inspect(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
                          absl::Span<HeldBlock> found) const {
  KVMILL_CHECK(found.size() == keys.size());
  const OpenedNamespace* space = impl_->namespaces_.Find(namespace_id);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    HeldBlock& block = found[i];
    block = HeldBlock();
    if (space == nullptr) continue;
    impl_->index_->Find({namespace_id, 0, keys[i]}, [&](EntryId entry, BlockEntry& e) {
      block.whole = InSomeTier(e.flags);
      block.entry = entry;
      block.link = impl_->index_->LinkOf(entry);
    });
    block.whole = block.whole && OthersHave(*impl_->index_, *space, keys[i]);
  }
}

bool TieredStore::Walk(WalkCursor* cursor,
                       absl::FunctionRef<void(const BlockId&, const HeldBlock&)> visit) const {
  struct Found {
    BlockId id;
    HeldBlock block;
  };
  std::vector<Found> step;
  step.reserve(BlockIndex::kStepEntries);
  BlockIndex::Cursor at{cursor->shard, cursor->local};
  const bool more = impl_->index_->ForNext(&at, [&](EntryId entry, const BlockEntry& e) {
    const BlockId id = e.id();
    if (id.group != 0) return;
    step.push_back({id, {InSomeTier(e.flags), impl_->index_->LinkOf(entry), entry}});
  });
  *cursor = {at.shard, at.local};
  for (Found& found : step) {
    const OpenedNamespace& space = *impl_->namespaces_.Find(found.id.namespace_id);
    found.block.whole = found.block.whole && OthersHave(*impl_->index_, space, found.id.key);
    visit(found.id, found.block);
  }
  return more;
}

void TieredStore::Impl::LookAt(NamespaceId namespace_id, absl::Span<const BlockKey> keys,
                               absl::Span<BlockState> found) const {
  KVMILL_CHECK(found.size() == keys.size());
  const OpenedNamespace* space = namespaces_.Find(namespace_id);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    BlockState& block = found[i];
    block = BlockState{.whole = space != nullptr, .tier = Tier::kGpu};
    for (std::size_t g = 0; block.whole && g < space->spec.groups.size(); ++g) {
      block.whole = false;
      index_->Find({namespace_id, static_cast<std::uint8_t>(g), keys[i]},
                   [&](EntryId, BlockEntry& e) {
                     block.whole = InSomeTier(e.flags);
                     block.tier = std::max(block.tier, TierOf(e.flags));
                     block.token_count = e.token_count;
                   });
    }
  }
}

std::uint8_t TieredStore::UsesAt(EntryId entry) const {
  std::uint8_t uses = 0;
  impl_->index_->At(entry, [&uses](const BlockEntry& e) { uses = e.uses; });
  return uses;
}

bool TieredStore::BlockAt(EntryId entry, BlockId* id, std::uint64_t* bytes) const {
  *bytes = 0;
  const auto add = [bytes](const BlockEntry& e) {
    for (const PagePlace& place : e.pages()) *bytes += place.page_bytes;
  };
  const bool there = impl_->index_->At(entry, [&](const BlockEntry& e) {
    *id = e.id();
    add(e);
  });
  if (!there) return false;
  const OpenedNamespace& space = *impl_->namespaces_.Find(id->namespace_id);
  for (std::size_t g = 0; g < space.spec.groups.size(); ++g) {
    if (g == id->group) continue;
    impl_->index_->Find({id->namespace_id, static_cast<std::uint8_t>(g), id->key},
                        [&](EntryId, BlockEntry& e) { add(e); });
  }
  return true;
}

}  // namespace kvmill
