#include "service/ticket_holds.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/status_macros.h"

namespace kvmill {

std::string ShareOf(const TieredStore::NamespaceInfo& space) {
  return space.spec.tenant == kDefaultTenant ? "" : space.spec.tenant;
}

absl::StatusOr<StoredTicketBlock> InStore(const TieredStore& store,
                                          const TieredStore::NamespaceInfo& space,
                                          const TicketBlock& block) {
  if (block.group >= space.spec.groups.size() ||
      block.layer_count != space.spec.groups[block.group].layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block ", block.key.ToHex(), " of a ticket: layer group ", int{block.group}, " with ",
        block.layer_count, " layers is none of namespace \"", space.name, "\""));
  }
  StoredTicketBlock stored;
  stored.id = {space.id, block.group, block.key};
  stored.origin.parent = block.parent;
  stored.origin.token_count = block.token_count;
  stored.origin.block_index = block.block_index;
  stored.origin.tail_key = block.tail_key;
  KVMILL_ASSIGN_OR_RETURN(stored.page_bytes, store.PlainPageBytes(stored.id, stored.origin));
  stored.bytes = std::uint64_t{stored.page_bytes} * block.layer_count;
  return stored;
}

absl::StatusOr<TicketHolds::HoldId> StoreTicketHolds::Hold(const Fingerprint& fingerprint,
                                                           const std::vector<TicketBlock>& blocks,
                                                           Events* events) {
  KVMILL_ASSIGN_OR_RETURN(const TieredStore::NamespaceInfo space,
                          shared_.Find(store_, fingerprint));
  Held held;
  held.events = events;
  held.tenant = ShareOf(space);
  std::vector<StoredTicketBlock> stored;
  for (const TicketBlock& block : blocks) {
    KVMILL_ASSIGN_OR_RETURN(stored.emplace_back(), InStore(store_, space, block));
    held.blocks.emplace_back().layer_count = block.layer_count;
    held.bytes += stored.back().bytes;
  }
  KVMILL_RETURN_IF_ERROR(bytes_.Take(held.tenant, held.bytes));
  const HoldId id = next_++;
  const auto wanted = held.wanted;
  held_.emplace(id, std::move(held));
  // What the listeners say before Placed ran is seen there.
  workers_.Post([this, &store = store_, mail = mail_, id, wanted, stored = std::move(stored)] {
    std::vector<absl::StatusOr<HoldPtr>> holds;
    for (std::uint32_t i = 0; i < stored.size(); ++i) {
      if (!wanted->load(std::memory_order_relaxed)) return;  // Released: nobody waits for Placed.
      const auto look = [this, mail, id, i] { mail->Post([this, id, i] { Look(id, i); }); };
      holds.push_back(store.Hold(stored[i].id, stored[i].origin, FetchPath::kInline,
                                 {[look](std::uint32_t) { look(); }, look}));
    }
    mail->Post([this, id, holds = std::move(holds)] { Placed(id, holds); });
  });
  return id;
}

void StoreTicketHolds::Placed(HoldId id, const std::vector<absl::StatusOr<HoldPtr>>& holds) {
  const auto found = held_.find(id);
  if (found == held_.end()) return;  // Released meanwhile.
  for (std::size_t i = 0; i < holds.size(); ++i) {
    if (holds[i].ok()) found->second.blocks[i].hold = *holds[i];
  }
  found->second.placed = true;
  const std::vector<std::function<void()>> when_held = std::move(found->second.when_held);
  for (std::uint32_t i = 0; i < holds.size(); ++i) {
    if (holds[i].ok()) {
      Look(id, i);
    } else if (const auto held = held_.find(id); held != held_.end()) {
      held->second.blocks[i].over = true;
      held->second.events->Failed(id, i);
    }
  }
  for (const auto& done : when_held) done();
}

void StoreTicketHolds::Look(HoldId id, std::uint32_t i) {
  const auto found = held_.find(id);
  if (found == held_.end()) return;
  Held& held = found->second;
  Block& block = held.blocks[i];
  if (block.hold == nullptr || block.over) return;
  // The state first: a sealed block has all its pages then.
  const BlockHold::State state = block.hold->state();
  Events* const events = held.events;
  if (state == BlockHold::State::kSealed || state == BlockHold::State::kFailed) {
    block.over = true;
    if (state == BlockHold::State::kFailed) return events->Failed(id, i);
    block.told = LayerSet::First(block.layer_count);
    return events->Sealed(id, i, block.hold->digest());
  }
  LayerSet finished = block.told;
  for (std::uint32_t layer = 0; layer < block.layer_count; ++layer) {
    if (!finished.Has(layer) && !block.hold->Page(layer).empty()) finished.Add(layer);
  }
  if (finished == block.told) return;
  block.told = finished;
  events->Finished(id, i, finished);
}

void StoreTicketHolds::WhenHeld(std::function<void()> done) {
  const auto last = held_.find(next_ - 1);
  if (last == held_.end() || last->second.placed) return mail_->Post(std::move(done));
  last->second.when_held.push_back(std::move(done));
}

void StoreTicketHolds::Release(HoldId id) {
  auto node = held_.extract(id);
  if (node.empty()) return;
  bytes_.GiveBack(node.mapped().tenant, node.mapped().bytes);
  node.mapped().wanted->store(false, std::memory_order_relaxed);
  for (auto& done : node.mapped().when_held) mail_->Post(std::move(done));
}

absl::Status StoreTicketHolds::Read(HoldId id, std::uint32_t i, const LayerSet& layers,
                                    std::vector<Page>* pages) const {
  const auto found = held_.find(id);
  if (found == held_.end() || i >= found->second.blocks.size() ||
      found->second.blocks[i].hold == nullptr) {
    return absl::NotFoundError("the block is not held");
  }
  const HoldPtr& hold = found->second.blocks[i].hold;
  for (std::uint32_t layer = 0; layer < layers.end(); ++layer) {
    if (!layers.Has(layer)) continue;
    const absl::Span<const std::byte> bytes = hold->Page(layer);
    if (bytes.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", layer, " of block ", hold->id().key.ToHex(), " is not finished"));
    }
    pages->push_back({hold, bytes});
  }
  return absl::OkStatus();
}

}  // namespace kvmill
