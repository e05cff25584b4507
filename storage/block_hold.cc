#include "storage/block_hold.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/assembly.h"
#include "storage/core/pages_digest.h"
#include "storage/core/status_macros.h"
#include "storage/tiered_store_impl.h"

namespace kvmill {

BlockHold::~BlockHold() {
  assembly_ = nullptr;
  sealed_ = BlockRef();
  store_.impl_->Unhold(id_);
}

BlockHold::State BlockHold::state() const {
  MutexLock lock(mu_);
  return state_;
}

absl::Status BlockHold::why() const {
  MutexLock lock(mu_);
  return why_;
}

std::uint64_t BlockHold::digest() const {
  MutexLock lock(mu_);
  return digest_;
}

absl::Span<const std::byte> BlockHold::Page(std::uint32_t layer) const {
  MutexLock lock(mu_);
  if (sealed_.valid()) {
    return layer < sealed_.pages().size() ? sealed_.pages()[layer] : absl::Span<const std::byte>();
  }
  return assembly_ != nullptr ? assembly_->FinishedPage(layer) : absl::Span<const std::byte>();
}

void BlockHold::Follow(std::shared_ptr<BlockWriter::Assembly> assembly) {
  MutexLock lock(mu_);
  assembly_ = std::move(assembly);
  state_ = State::kAssembling;
}

bool BlockHold::Follows(const BlockWriter::Assembly* assembly) const {
  MutexLock lock(mu_);
  return state_ == State::kAssembling ? assembly_.get() == assembly
                                      : state_ == State::kExpected && assembly == nullptr;
}

bool BlockHold::End(BlockRef sealed) {
  const std::uint64_t digest = PagesDigest(sealed.pages());
  MutexLock lock(mu_);
  if (state_ == State::kSealed || state_ == State::kFailed) return false;
  sealed_ = std::move(sealed);
  digest_ = digest;
  state_ = State::kSealed;
  return true;
}

bool BlockHold::Fail(const absl::Status& why) {
  MutexLock lock(mu_);
  if (state_ == State::kSealed || state_ == State::kFailed) return false;
  why_ = why;
  state_ = State::kFailed;
  return true;
}

// --- In the store ---

absl::StatusOr<std::shared_ptr<BlockHold>> TieredStore::Hold(const BlockId& id,
                                                             const BlockOrigin& origin,
                                                             FetchPath path,
                                                             BlockHoldListener listener) {
  KVMILL_RETURN_IF_ERROR(impl_->CheckOrigin(id, origin));
  // Not make_shared: the constructor is private.
  std::shared_ptr<BlockHold> hold(new BlockHold(*this, id, origin, std::move(listener)));
  // Expected first, so that whoever begins or ends the block meanwhile knows.
  bool strange = false;
  {
    MutexLock lock(impl_->assemblies_mu_);
    impl_->holds_[id].push_back(hold);
    impl_->hold_count_.fetch_add(1);
    // One that is being sealed has looked for holds, or will; what it seals is found by Commit.
    if (const auto it = impl_->assemblies_.find(id);
        it != impl_->assemblies_.end() && !it->second->sealing()) {
      if (it->second->origin() == origin) hold->Follow(it->second);
      strange = !(it->second->origin() == origin);
    }
  }
  if (strange) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", id.key.ToHex(), " is being stored with another parent, index or token count"));
  }
  if (hold->state() != BlockHold::State::kExpected) return hold;
  if (impl_->FlagsOf(id) == 0) return hold;
  // It is sealed. A miss here is a block that has just left: it may be stored again.
  absl::StatusOr<BlockRef> sealed = Fetch(id, path);
  if (absl::IsNotFound(sealed.status())) return hold;
  KVMILL_RETURN_IF_ERROR(sealed.status());
  if (sealed->token_count() != origin.token_count) {
    return absl::InvalidArgumentError(absl::StrCat("block ", id.key.ToHex(), " has ",
                                                   sealed->token_count(), " tokens, not ",
                                                   origin.token_count));
  }
  hold->End(*std::move(sealed));
  return hold;
}

void TieredStore::Impl::Follow(const std::shared_ptr<BlockWriter::Assembly>& assembly,
                               Holds* strange) {
  for (const std::shared_ptr<BlockHold>& hold : HoldsOf(assembly->id(), nullptr)) {
    if (assembly->origin() == hold->origin_) {
      hold->Follow(assembly);
    } else {
      strange->push_back(hold);
    }
  }
}

TieredStore::Impl::Holds TieredStore::Impl::HoldsOf(const BlockId& id,
                                                    const BlockWriter::Assembly* assembly) const {
  Holds holds;
  if (holds_.empty()) return holds;
  const auto it = holds_.find(id);
  if (it == holds_.end()) return holds;
  for (const std::weak_ptr<BlockHold>& weak : it->second) {
    std::shared_ptr<BlockHold> hold = weak.lock();
    if (hold != nullptr && hold->Follows(assembly)) holds.push_back(std::move(hold));
  }
  return holds;
}

void TieredStore::Impl::Unhold(const BlockId& id) {
  {
    MutexLock lock(assemblies_mu_);
    const auto it = holds_.find(id);
    if (it != holds_.end()) {
      // The caller's pointer has expired, as have those of others that are being destroyed.
      const std::size_t expired = std::erase_if(
          it->second, [](const std::weak_ptr<BlockHold>& weak) { return weak.expired(); });
      hold_count_.fetch_sub(expired);
      if (it->second.empty()) holds_.erase(it);
    }
  }
  tiers_->RoomMayHaveComeFree();  // An assembly that was given up may have gone with it.
}

void TieredStore::Impl::LayerFinished(const BlockWriter::Assembly& assembly, std::uint32_t layer) {
  if (hold_count_.load() == 0) return;
  Holds holds;
  {
    MutexLock lock(assemblies_mu_);
    holds = HoldsOf(assembly.id(), &assembly);
  }
  for (const std::shared_ptr<BlockHold>& hold : holds) {
    if (hold->listener_.finished != nullptr) hold->listener_.finished(layer);
  }
}

void TieredStore::Impl::SealHolds(const BlockId& id, const Holds& holds, EntryId entry) {
  for (const std::shared_ptr<BlockHold>& hold : holds) {
    BlockRef sealed;
    bool ended = false;
    // By its entry where that is known: a block that is removed at this moment, or stored anew
    // under its id, must not take away what somebody reads.
    bool there = true;
    if (entry != kNoEntry) {
      ReferenceAgain(&hold->store_, entry, &sealed);
    } else {
      there = TryReference(&hold->store_, id, &sealed, Tier::kHost);
    }
    if (!there) {
      ended = hold->Fail(absl::AbortedError("the block was removed"));
    } else if (sealed.token_count() != hold->origin_.token_count) {
      ended = hold->Fail(absl::AbortedError("the block has another token count"));
    } else {
      ended = hold->End(std::move(sealed));
    }
    if (ended && hold->listener_.ended != nullptr) hold->listener_.ended();
  }
}

void TieredStore::Impl::FailHolds(const Holds& holds, const absl::Status& why) {
  for (const std::shared_ptr<BlockHold>& hold : holds) {
    if (hold->Fail(why) && hold->listener_.ended != nullptr) hold->listener_.ended();
  }
}

}  // namespace kvmill
