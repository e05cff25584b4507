#include "service/held_runs.h"

#include <algorithm>
#include <utility>

namespace kvmill {
namespace {

constexpr std::size_t kLookAtOnce = 256;

}  // namespace

void HeldRuns::Start(const TieredStore& store, Listener listener) {
  store_ = &store;
  listener_ = std::move(listener);
  thread_ = std::thread([this] { Work(); });
}

void HeldRuns::Stop() {
  {
    MutexLock lock(queue_mu_);
    stopping_ = true;
  }
  work_.NotifyAll();
  settled_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void HeldRuns::Changed(const BlockId& id) {
  {
    MutexLock lock(queue_mu_);
    if (queue_.size() >= options_.queue_max) {
      ++dropped_;
      overflowed_ = true;  // There is work already.
      return;
    }
    queue_.push_back(id);
    if (queue_.size() > 1) return;
  }
  work_.NotifyOne();
}

bool HeldRuns::WaitForWork() {
  MutexLock lock(queue_mu_);
  rounds_done_ = rounds_begun_;
  settled_.NotifyAll();
  while (!stopping_ && !overflowed_ && queue_.empty()) {
    idle_ = true;
    settled_.NotifyAll();
    work_.Wait(queue_mu_);
  }
  idle_ = false;
  const auto until = std::chrono::steady_clock::now() + options_.gather;
  for (auto left = options_.gather; !stopping_ && left.count() > 0;) {
    work_.WaitFor(queue_mu_, left);
    left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  }
  ++rounds_begun_;
  return !stopping_;
}

bool HeldRuns::stopping() const {
  MutexLock lock(queue_mu_);
  return stopping_;
}

void HeldRuns::Work() {
  while (WaitForWork()) {
    bool walk = false;
    {
      MutexLock lock(queue_mu_);
      walk = std::exchange(overflowed_, false);
      walks_ += walk;
    }
    if (walk) WalkStore();
    Drain();
  }
}

void HeldRuns::WalkStore() {
  {
    MutexLock lock(table_mu_);
    table_.BeginSweep();
  }
  TieredStore::WalkCursor cursor;
  // What a step finds is entered before anything that happened later is looked at.
  while (store_->Walk(&cursor, [this](const BlockId& id, const TieredStore::HeldBlock& block) {
    Enter(id, block);
  })) {
    Tell();
    Drain();
    if (stopping()) return;
  }
  std::size_t at = 0;
  for (bool more = true; more;) {
    std::vector<HeldTable::Block> missed;
    {
      MutexLock lock(table_mu_);
      more = table_.SweepSome(&at, &missed);
    }
    DropMissed(missed);
    Tell();
    Drain();
    if (stopping()) return;
  }
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
  Look(there);
}

void HeldRuns::Drain() {
  for (;;) {
    taken_.clear();
    {
      MutexLock lock(queue_mu_);
      taken_.swap(queue_);
    }
    if (taken_.empty()) return;
    for (std::size_t i = 0; i < taken_.size(); i += kLookAtOnce) {
      Look(absl::MakeConstSpan(taken_).subspan(i, kLookAtOnce));
      Tell();
    }
  }
}

void HeldRuns::Look(absl::Span<const BlockId> ids) {
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
  {
    MutexLock lock(table_mu_);
    changes = table_.TakeChanges();
  }
  if (!changes.empty() && listener_) listener_(changes);
}

const HeldRuns::Space& HeldRuns::SpaceOf(NamespaceId id) {
  const auto [space, added] = spaces_.try_emplace(id);
  if (added) {
    const auto info = store_->FindNamespace(id);
    if (info.ok()) {
      space->second = {info->spec.tenant == options_.tenant, info->fingerprint};
    } else {
      spaces_.erase(space);
      static const Space kUnknown;
      return kUnknown;
    }
  }
  return space->second;
}

std::uint8_t HeldRuns::CountOf(std::uint64_t anchor_hash) const {
  MutexLock lock(table_mu_);
  return table_.CountOf(anchor_hash);
}

std::optional<HeldTable::Place> HeldRuns::PlaceOf(const Fingerprint& fingerprint,
                                                  const BlockKey& key) const {
  const std::uint64_t key_hash = KeyHash(fingerprint, key);
  MutexLock lock(table_mu_);
  return table_.PlaceOf(key_hash);
}

HeldRuns::Run HeldRuns::RunOf(std::uint64_t anchor_hash, std::size_t blocks_max) const {
  std::vector<HeldTable::Block> blocks;
  {
    MutexLock lock(table_mu_);
    blocks = table_.BlocksOf(anchor_hash);
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const auto& a, const auto& b) { return a.place < b.place; });
  Run run;
  for (const HeldTable::Block& block : blocks) {
    if (run.blocks.size() == blocks_max) break;
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

HeldRuns::Stats HeldRuns::stats() const {
  Stats stats;
  {
    MutexLock lock(queue_mu_);
    stats.walks = walks_;
    stats.dropped = dropped_;
  }
  MutexLock lock(table_mu_);
  stats.blocks = table_.blocks();
  stats.waiting = table_.waiting();
  stats.runs = table_.runs();
  stats.bytes = table_.bytes();
  return stats;
}

bool HeldRuns::Settled() const { return stopping_ || (idle_ && queue_.empty() && !overflowed_); }

void HeldRuns::WaitSettled() const {
  MutexLock lock(queue_mu_);
  while (!Settled()) settled_.Wait(queue_mu_);
}

bool HeldRuns::CatchUp(std::chrono::nanoseconds limit) const {
  const auto until = std::chrono::steady_clock::now() + limit;
  MutexLock lock(queue_mu_);
  const std::uint64_t round = rounds_begun_ + 1;  // One that takes all that waits now.
  while (!Settled() && rounds_done_ < round) {
    const auto left = until - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    settled_.WaitFor(queue_mu_, left);
  }
  return true;
}

}  // namespace kvmill
