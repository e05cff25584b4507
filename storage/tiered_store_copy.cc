// The other way in: blocks that were sealed by another node.
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/pages_digest.h"
#include "storage/core/status_macros.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {
namespace {

// A page of a sealed block has every head, whoever sealed it.
absl::Status CheckWhole(absl::Span<const std::byte> page) {
  KVMILL_ASSIGN_OR_RETURN(const PageView view, PageView::Parse(page));
  for (std::size_t head = 0; head < view.head_count(); ++head) {
    if (view.slot(head).kind == SlotKind::kAbsent) {
      return absl::DataLossError(
          absl::StrCat("layer ", view.header().layer, " head ", head, " is absent"));
    }
  }
  return absl::OkStatus();
}

// Whether a page of such a block can have so many bytes.
absl::Status CheckPageBytes(const OpenedNamespace& space, const BlockId& id,
                            const BlockOrigin& origin, std::uint32_t bytes) {
  const LayerGroup& group = space.spec.groups[id.group];
  const std::size_t bytes_max = UniformPageBytes(FormatOf(space.spec, group), origin.token_count,
                                                 SlotKind::kRaw, group.kv_heads);
  if (bytes >= PageHeaderBytes(group.kv_heads) && bytes <= bytes_max &&
      bytes % kPageAlignment == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("a page of ", bytes, " bytes: want ",
                                                 PageHeaderBytes(group.kv_heads), " to ", bytes_max,
                                                 ", a multiple of ", kPageAlignment));
}

}  // namespace

BlockCopy::BlockCopy(BlockCopy&& other) noexcept { *this = std::move(other); }

BlockCopy& BlockCopy::operator=(BlockCopy&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  store_ = std::exchange(other.store_, nullptr);
  id_ = other.id_;
  origin_ = other.origin_;
  removals_ = other.removals_;
  slots_ = std::move(other.slots_);
  pages_ = std::move(other.pages_);
  charge_ = std::move(other.charge_);
  return *this;
}

void BlockCopy::Drop() {
  if (store_ == nullptr) return;
  TieredStore::Impl& store = *std::exchange(store_, nullptr)->impl_;
  for (const SlotRef slot : slots_) store.pool_->Release(slot);
  slots_.clear();
  pages_.clear();
  charge_.Reset();
  store.counters_.copying_blocks.Subtract();
  store.tiers_->RoomMayHaveComeFree();
}

absl::Status BlockCopy::ResizePage(std::size_t layer, std::uint32_t page_bytes,
                                   absl::Duration room_wait) {
  TieredStore::Impl& store = *store_->impl_;
  const OpenedNamespace& space = *store.namespaces_.Find(id_.namespace_id);
  if (layer >= pages_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " of a copy of ", pages_.size(), " pages"));
  }
  if (page_bytes == pages_[layer].size()) return absl::OkStatus();
  KVMILL_RETURN_IF_ERROR(CheckPageBytes(space, id_, origin_, page_bytes));
  const std::uint32_t before_bytes = static_cast<std::uint32_t>(pages_[layer].size());
  TenantCharge more;
  if (page_bytes > before_bytes) {
    const absl::Status charged =
        store.Charge(space.tenant_id, page_bytes - before_bytes, room_wait, &more);
    if (!charged.ok()) {
      store.CountRefusal(space.tenant_id, charged);
      return charged;
    }
  }
  std::vector<SlotRef> slot;
  KVMILL_RETURN_IF_ERROR(
      store.tiers_->AcquirePages(space.tenant_id, {page_bytes}, room_wait, &slot));
  charge_.Join(std::move(more));
  if (page_bytes < before_bytes) charge_.GiveBack(before_bytes - page_bytes);
  store.pool_->Release(slots_[layer]);
  slots_[layer] = slot[0];
  pages_[layer] = store.pool_->Bytes(slot[0]).first(page_bytes);
  return absl::OkStatus();
}

absl::Status BlockCopy::CheckPage(std::size_t layer) const {
  const OpenedNamespace& space = *store_->impl_->namespaces_.Find(id_.namespace_id);
  KVMILL_RETURN_IF_ERROR(
      VerifyPage(IdentityOfPage(space, id_, layer, origin_.token_count), pages_[layer]));
  return CheckWhole(pages_[layer]);
}

std::uint64_t BlockCopy::Digest() const {
  const std::vector<absl::Span<const std::byte>> pages(pages_.begin(), pages_.end());
  return PagesDigest(pages);
}

absl::Status BlockCopy::Commit() {
  if (!valid()) return absl::FailedPreconditionError("the copy was committed or dropped before");
  TieredStore::Impl& store = *store_->impl_;
  absl::Status status;
  for (std::size_t i = 0; i < pages_.size() && status.ok(); ++i) status = CheckPage(i);
  if (!status.ok()) {
    store.counters_.checksum_failures[Index(Tier::kPeer)].Add();
  } else if (store.RemovalsOf(id_) != removals_) {
    status = absl::AbortedError("the block was removed while it was copied");
  } else {
    std::vector<PagePlace> places(pages_.size());
    for (std::size_t i = 0; i < places.size(); ++i) {
      store.pool_->Publish(slots_[i]);
      places[i] = PagePlace{slots_[i], static_cast<std::uint32_t>(pages_[i].size()), 0};
    }
    status = store.Enter(id_, origin_, places);
  }
  if (status.ok()) {
    slots_.clear();  // The entry's now.
    charge_.BecomesBlock();
    store.counters_.copied_blocks.Add();
    store.EndAssembly(id_);
  }
  Drop();
  return status;
}

absl::StatusOr<BlockCopy> TieredStore::BeginCopy(const BlockId& id, const BlockOrigin& origin,
                                                 absl::Span<const std::uint32_t> page_bytes,
                                                 absl::Duration room_wait) {
  KVMILL_RETURN_IF_ERROR(impl_->CheckOrigin(id, origin));
  const OpenedNamespace& space = *impl_->namespaces_.Find(id.namespace_id);
  const LayerGroup& group = space.spec.groups[id.group];
  if (page_bytes.size() != group.layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a copy of ", page_bytes.size(),
                                                   " pages: layer group ", int{id.group}, " has ",
                                                   group.layers.size()));
  }
  for (const std::uint32_t bytes : page_bytes) {
    KVMILL_RETURN_IF_ERROR(CheckPageBytes(space, id, origin, bytes));
  }
  BlockCopy copy;
  // Before the look: a removal in between must not be undone.
  copy.removals_ = impl_->RemovalsOf(id);
  if (impl_->index_->Find(id, [](EntryId, BlockEntry&) {})) {
    return absl::AlreadyExistsError("the block is in the store");
  }
  std::uint64_t bytes_wanted = 0;
  for (const std::uint32_t bytes : page_bytes) bytes_wanted += bytes;
  const absl::Status charged =
      impl_->Charge(space.tenant_id, bytes_wanted, room_wait, &copy.charge_);
  if (!charged.ok()) {
    impl_->CountRefusal(space.tenant_id, charged);
    return charged;
  }
  KVMILL_RETURN_IF_ERROR(
      impl_->tiers_->AcquirePages(space.tenant_id, page_bytes, room_wait, &copy.slots_));
  copy.store_ = this;
  impl_->counters_.copying_blocks.Add();
  copy.id_ = id;
  copy.origin_ = origin;
  copy.pages_.reserve(page_bytes.size());
  for (std::size_t i = 0; i < page_bytes.size(); ++i) {
    copy.pages_.push_back(impl_->pool_->Bytes(copy.slots_[i]).first(page_bytes[i]));
  }
  return copy;
}

absl::StatusOr<std::uint32_t> TieredStore::PlainPageBytes(const BlockId& id,
                                                          const BlockOrigin& origin) const {
  KVMILL_RETURN_IF_ERROR(impl_->CheckOrigin(id, origin));
  const NamespaceSpec& spec = impl_->namespaces_.Find(id.namespace_id)->spec;
  const LayerGroup& group = spec.groups[id.group];
  return static_cast<std::uint32_t>(UniformPageBytes(FormatOf(spec, group), origin.token_count,
                                                     SlotKindOf(spec, origin), group.kv_heads));
}

void TieredStore::Impl::EndAssembly(const BlockId& id) {
  std::shared_ptr<BlockWriter::Assembly> ended;
  Holds expecting, following;
  {
    MutexLock lock(assemblies_mu_);
    expecting = HoldsOf(id, nullptr);
    if (auto it = assemblies_.find(id); it != assemblies_.end()) {
      ended = std::move(it->second);
      assemblies_.erase(it);
      following = HoldsOf(id, ended.get());
    }
  }
  if (ended != nullptr) ended->SealedElsewhere();
  SealHolds(id, expecting);
  FailHolds(following, absl::AlreadyExistsError("a copy from another node was sealed first"));
}

}  // namespace kvmill
