#include "service/held_runs.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvmill {

void HeldRuns::Start(const TieredStore& store, Listener listener) {
  store_ = &store;
  listener_ = std::move(listener);
  follower_.PushWalk();
  follower_.Start(store);
}

void HeldRuns::Stop() { follower_.Stop(); }

void HeldRuns::BeginWalk() {
  swept_ = 0;
  MutexLock lock(table_mu_);
  table_.BeginSweep();
}

bool HeldRuns::SweepSome() {
  bool more = false;
  std::vector<HeldTable::Block> missed;
  {
    MutexLock lock(table_mu_);
    more = table_.SweepSome(&swept_, &missed);
  }
  DropMissed(missed);
  Tell();
  return more;
}

// Blocks that came while the store was walked may have been missed: they are looked at, by the
// entries that the table has of them.
void HeldRuns::DropMissed(const std::vector<HeldTable::Block>& missed) {
  std::vector<BlockId> there;
  for (const HeldTable::Block& block : missed) {
    BlockId id;
    std::uint64_t bytes = 0;
    if (store_->BlockAt(block.entry, &id, &bytes) &&
        KeyHash(SpaceOf(id.namespace_id).fingerprint, id.key) == block.key_hash) {
      there.push_back(id);
    } else {
      MutexLock lock(table_mu_);
      table_.Erase(block.key_hash);
    }
  }
  LookAt(there);
}

void HeldRuns::Look(absl::Span<const BlockId> ids) {
  LookAt(ids);
  Tell();
}

void HeldRuns::LookAt(absl::Span<const BlockId> ids) {
  std::vector<BlockKey> keys;
  for (std::size_t begin = 0; begin < ids.size();) {
    const NamespaceId space = ids[begin].namespace_id;
    keys.clear();
    std::size_t end = begin;
    for (; end < ids.size() && ids[end].namespace_id == space; ++end) keys.push_back(ids[end].key);
    if (SpaceOf(space).counts) {
      std::vector<TieredStore::HeldBlock> found(keys.size());
      store_->Inspect(space, keys, absl::MakeSpan(found));
      for (std::size_t i = 0; i < keys.size(); ++i) Enter(ids[begin + i], found[i]);
    }
    begin = end;
  }
}

void HeldRuns::Enter(const BlockId& id, const TieredStore::HeldBlock& block) {
  const Space& space = SpaceOf(id.namespace_id);
  if (!space.counts) return;
  const std::uint64_t key_hash = KeyHash(space.fingerprint, id.key);
  MutexLock lock(table_mu_);
  if (block.whole) {
    table_.Put(key_hash, block.link, block.entry);
  } else {
    table_.Erase(key_hash);
  }
}

void HeldRuns::Tell() {
  std::vector<Announcement> changes;
  std::vector<HeldTable::Left> left;
  {
    MutexLock lock(table_mu_);
    changes = table_.TakeChanges();
    left = table_.TakeLeft();
  }
  if (!(changes.empty() && left.empty()) && listener_) listener_(changes, left);
}

const HeldRuns::Space& HeldRuns::SpaceOf(NamespaceId id) {
  const auto [space, added] = spaces_.try_emplace(id);
  if (added) {
    const auto info = store_->FindNamespace(id);
    if (info.ok()) {
      space->second = {options_.tenants.Has(info->spec.tenant), info->fingerprint};
    } else {
      spaces_.erase(space);
      static const Space kUnknown;
      return kUnknown;
    }
  }
  return space->second;
}

RunSketch HeldRuns::SketchOf(std::uint64_t anchor_hash) const {
  MutexLock lock(table_mu_);
  return table_.SketchOf(anchor_hash);
}

std::optional<HeldTable::Place> HeldRuns::PlaceOf(const Fingerprint& fingerprint,
                                                  const BlockKey& key) const {
  const std::uint64_t key_hash = KeyHash(fingerprint, key);
  MutexLock lock(table_mu_);
  return table_.PlaceOf(key_hash);
}

HeldRuns::Run HeldRuns::RunOf(std::uint64_t anchor_hash, std::size_t blocks_max,
                              std::uint8_t after_place, std::uint64_t after_hash) const {
  std::vector<HeldTable::Block> blocks;
  {
    MutexLock lock(table_mu_);
    blocks = table_.BlocksOf(anchor_hash);
  }
  std::erase_if(blocks, [&](const HeldTable::Block& block) {
    return std::pair(block.place, block.key_hash) <= std::pair(after_place, after_hash);
  });
  const auto before = [](const HeldTable::Block& a, const HeldTable::Block& b) {
    return std::pair(a.place, a.key_hash) < std::pair(b.place, b.key_hash);
  };
  // A run of many prompts that begin alike has a hundred thousand blocks, and a page is a hundred:
  // only that many are sorted. Some more, since the store may not have them any more.
  const std::size_t sorted = std::min(blocks.size(), blocks_max + blocks_max / 8 + 8);
  std::partial_sort(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(sorted),
                    blocks.end(), before);
  Run run;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    run.more = run.blocks.size() == blocks_max;
    if (run.more) break;
    if (i == sorted) {
      std::sort(blocks.begin() + static_cast<std::ptrdiff_t>(i), blocks.end(), before);
    }
    const HeldTable::Block& block = blocks[i];
    BlockId id;
    Run::Block found{.key = {}, .place = block.place};
    if (!store_->BlockAt(block.entry, &id, &found.bytes)) continue;
    Fingerprint fingerprint = run.fingerprint;
    if (run.blocks.empty()) {
      const auto info = store_->FindNamespace(id.namespace_id);
      if (info.ok()) fingerprint = info->fingerprint;
    }
    // The entry may be another block's by now.
    if (KeyHash(fingerprint, id.key) != block.key_hash) continue;
    run.fingerprint = fingerprint;
    found.key = id.key;
    run.blocks.push_back(std::move(found));
  }
  return run;
}

void HeldRuns::SortHottestFirst(std::vector<Announcement>* runs) const {
  std::vector<std::pair<std::uint8_t, Announcement>> by_uses;
  by_uses.reserve(runs->size());
  for (const Announcement& run : *runs) {
    std::vector<HeldTable::Block> blocks;
    {
      MutexLock lock(table_mu_);
      blocks = table_.BlocksOf(run.anchor_hash);
    }
    std::uint8_t uses = 0;
    // The entry may be another block's by now: then it goes a little too early.
    for (const HeldTable::Block& block : blocks) {
      uses = std::max(uses, store_->UsesAt(block.entry));
    }
    by_uses.emplace_back(uses, run);
  }
  std::stable_sort(by_uses.begin(), by_uses.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (std::size_t i = 0; i < runs->size(); ++i) (*runs)[i] = by_uses[i].second;
}

std::uint64_t HeldRuns::CountOthers(std::chrono::nanoseconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  std::uint64_t whole = 0;
  TieredStore::WalkCursor cursor;
  while (store_->Walk(&cursor, [&whole](const BlockId&, const TieredStore::HeldBlock& block) {
    whole += block.whole;
  })) {
    if (std::chrono::steady_clock::now() >= end) break;
  }
  const Stats held = stats();
  return whole - std::min<std::uint64_t>(whole, held.blocks - held.waiting);
}

HeldRuns::Stats HeldRuns::stats() const {
  const StoreFollower<BlockId>::Stats follower = follower_.stats();
  Stats stats;
  stats.walks = follower.walks;
  stats.dropped = follower.dropped;
  MutexLock lock(table_mu_);
  stats.blocks = table_.blocks();
  stats.waiting = table_.waiting();
  stats.runs = table_.runs();
  stats.bytes = table_.bytes();
  return stats;
}

}  // namespace kvmill
