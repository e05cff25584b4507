#include "service/event_journal.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kLookAtOnce = 256;

}  // namespace

void EventJournal::Start(const TieredStore& store) {
  MutexLock lock(mu_);
  store_ = &store;
}

void EventJournal::Stop(absl::Status why) {
  std::vector<std::function<void()>> wakes;
  {
    MutexLock lock(mu_);
    if (!ended_.has_value()) {
      ended_ = why.ok() ? absl::UnavailableError("events have ended") : std::move(why);
    }
    for (const auto& [tenant, log] : logs_) {
      for (const ReaderPtr& reader : log->readers) {
        reader->waiting = false;
        wakes.push_back(reader->wake);
      }
    }
  }
  active_.store(false, std::memory_order_release);
  for (const auto& wake : wakes) wake();
  follower_.Stop();  // Nobody starts it any more.
}

// --- What the store says ---

void EventJournal::Stored(const BlockId& id, const BlockKey& parent) {
  Push(BlockNotice::Kind::kStored, id, parent);
}

void EventJournal::Moved(const BlockId& id) { Push(BlockNotice::Kind::kMoved, id, BlockKey()); }

void EventJournal::Removed(const BlockId& id) {
  if (!active_.load(std::memory_order_acquire)) return;
  {
    MutexLock lock(clearing_mu_);
    // Cleared tells of all of them.
    if (!clearing_.empty() && clearing_.contains(id.namespace_id)) return;
  }
  Push(BlockNotice::Kind::kRemoved, id, BlockKey());
}

void EventJournal::Clearing(NamespaceId space) {
  MutexLock lock(clearing_mu_);
  ++clearing_[space];
}

void EventJournal::Cleared(NamespaceId space) {
  {
    MutexLock lock(clearing_mu_);
    const auto it = clearing_.find(space);
    KVMILL_CHECK(it != clearing_.end());
    if (--it->second == 0) clearing_.erase(it);
  }
  Push(BlockNotice::Kind::kCleared, BlockId{space, 0, BlockKey()}, BlockKey());
}

void EventJournal::Push(BlockNotice::Kind kind, const BlockId& id, const BlockKey& parent) {
  if (active_.load(std::memory_order_acquire)) follower_.Push({kind, id, parent});
}

// --- The thread ---

void EventJournal::Woken() {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(mu_);
  for (auto it = logs_.begin(); it != logs_.end();) {
    const EventLog& log = *it->second;
    if (!log.readers.empty() || now - log.unread_since < options_.unread_max) {
      ++it;
      continue;
    }
    retired_[it->first] = log.last();
    it = logs_.erase(it);
  }
  if (logs_.empty()) active_.store(false, std::memory_order_release);
}

void EventJournal::BeginWalk() {
  unswept_.clear();
  swept_ = 0;
  MutexLock lock(mu_);
  for (const auto& [tenant, log] : logs_) {
    unswept_.push_back(log);
    BlockMirror& mirror = log->mirror();
    for (std::uint32_t i = 0; i < mirror.places(); ++i) mirror.at(i).seen = false;
  }
}

void EventJournal::Found(const BlockId& id, const TieredStore::HeldBlock& block) {
  if (block.whole) step_[id.namespace_id].push_back(id.key);
}

void EventJournal::EndStep() {
  for (const auto& [space, keys] : step_) LookAt(space, keys, {});
  step_.clear();
}

// What is told of and was not found may have gone, or have come while the store was walked.
bool EventJournal::SweepSome() {
  if (unswept_.empty()) return false;
  NamespaceId space = 0;
  std::vector<BlockKey> keys;
  {
    MutexLock lock(mu_);
    EventLog& log = *unswept_.back();
    const BlockMirror& mirror = log.mirror();
    if (swept_ == mirror.places()) {
      log.SetReady();
      unswept_.pop_back();
      swept_ = 0;
      return !unswept_.empty();
    }
    for (; swept_ < mirror.places() && keys.size() < kLookAtOnce; ++swept_) {
      const BlockMirror::Entry& entry = mirror.at(swept_);
      if (!entry.used() || entry.seen) continue;
      if (!keys.empty() && entry.namespace_id != space) break;
      space = entry.namespace_id;
      keys.push_back(entry.key());
    }
  }
  if (!keys.empty()) LookAt(space, keys, {});
  return true;
}

void EventJournal::Look(absl::Span<const BlockNotice> notices) {
  std::vector<BlockKey> keys, parents;
  for (std::size_t begin = 0; begin < notices.size();) {
    const NamespaceId space = notices[begin].id.namespace_id;
    if (notices[begin].kind == BlockNotice::Kind::kCleared) {
      LookAfterClear(space);
      ++begin;
      continue;
    }
    keys.clear();
    parents.clear();
    std::size_t end = begin;
    for (; end < notices.size(); ++end) {
      const BlockNotice& notice = notices[end];
      if (notice.kind == BlockNotice::Kind::kCleared || notice.id.namespace_id != space) break;
      keys.push_back(notice.id.key);
      parents.push_back(notice.parent);
    }
    LookAt(space, keys, parents);
    begin = end;
  }
}

void EventJournal::LookAt(NamespaceId space, absl::Span<const BlockKey> keys,
                          absl::Span<const BlockKey> parents) {
  {
    MutexLock lock(mu_);
    if (LogOf(space) == nullptr) return;
  }
  std::vector<BlockState> found(keys.size());
  look_->LookAt(space, keys, absl::MakeSpan(found));
  {
    MutexLock lock(mu_);
    const EventLogPtr log = LogOf(space);
    if (log == nullptr) return;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      log->Apply(space, keys[i], parents.empty() ? BlockKey() : parents[i], found[i]);
    }
  }
  Wake();
}

void EventJournal::LookAfterClear(NamespaceId space) {
  // What came while it was cleared is still there, or again.
  struct Still {
    BlockKey key, parent;
    BlockState block;
  };
  std::vector<Still> still;
  std::vector<std::uint32_t> cleared;
  EventLogPtr log;
  {
    MutexLock lock(mu_);
    log = LogOf(space);
    if (log == nullptr) return;
  }
  std::uint32_t place = 0;
  for (bool more = true; more;) {
    std::vector<BlockKey> keys;
    std::vector<std::uint32_t> looked;
    {
      MutexLock lock(mu_);
      for (; place < log->mirror().places() && keys.size() < kLookAtOnce; ++place) {
        const BlockMirror::Entry& entry = log->mirror().at(place);
        if (!entry.used() || entry.namespace_id != space) continue;
        keys.push_back(entry.key());
        looked.push_back(place);
      }
      more = place < log->mirror().places();
    }
    std::vector<BlockState> found(keys.size());
    look_->LookAt(space, keys, absl::MakeSpan(found));
    MutexLock lock(mu_);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      cleared.push_back(looked[i]);
      if (!found[i].whole) continue;
      still.push_back({keys[i], log->mirror().at(looked[i]).parent(), found[i]});
    }
  }
  if (cleared.empty()) return;
  {
    MutexLock lock(mu_);
    log->Clear(space, cleared);
    for (const Still& one : still) log->Apply(space, one.key, one.parent, one.block);
  }
  Wake();
}

EventLogPtr EventJournal::LogOf(NamespaceId space) {
  const auto [tenant, added] = tenants_.try_emplace(space);
  if (added) {
    const auto info = store_->FindNamespace(space);
    if (!info.ok()) {
      tenants_.erase(tenant);
      return nullptr;
    }
    tenant->second = info->spec.tenant;
  }
  const auto it = logs_.find(tenant->second);
  return it == logs_.end() ? nullptr : it->second;
}

void EventJournal::Wake() {
  std::vector<std::function<void()>> wakes;
  {
    MutexLock lock(mu_);
    for (const auto& [tenant, log] : logs_) {
      for (const ReaderPtr& reader : log->readers) {
        if (!reader->waiting || !log->HasMore(*reader)) continue;
        reader->waiting = false;
        wakes.push_back(reader->wake);
      }
    }
  }
  for (const auto& wake : wakes) wake();
}

// --- Readers ---

absl::StatusOr<EventLogPtr> EventJournal::OpenLog(const std::string& tenant) {
  const auto known = logs_.find(tenant);
  if (known != logs_.end()) return known->second;
  // One is kept for the daemon's own.
  const bool is_own = tenant == options_.own_tenant;
  const std::size_t tenants_max = is_own || logs_.contains(options_.own_tenant)
                                      ? options_.tenants_max
                                      : options_.tenants_max - 1;
  if (logs_.size() >= tenants_max) {
    auto unread = logs_.begin();
    while (unread != logs_.end() &&
           (!unread->second->readers.empty() || unread->first == options_.own_tenant)) {
      ++unread;
    }
    if (unread == logs_.end()) {
      return absl::ResourceExhaustedError(absl::StrCat("events of ", logs_.size(),
                                                       " tenants are read: at most ", tenants_max,
                                                       " at once; retry later"));
    }
    retired_[unread->first] = unread->second->last();
    logs_.erase(unread);
  }
  const auto retired = retired_.find(tenant);
  // What happened between is not known: nobody may go on where the old one ended.
  const std::uint64_t last = retired == retired_.end() ? 0 : retired->second + 1;
  const EventLogPtr log = std::make_shared<EventLog>(options_.events_max, last, counts_);
  logs_[tenant] = log;
  active_.store(true, std::memory_order_release);
  follower_.PushWalk();
  return log;
}

absl::Status EventJournal::CheckReaders(const std::string& tenant) const {
  const auto readers_of = [this](const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto log = logs_.find(name);
    return log == logs_.end() ? std::size_t{0} : log->second->readers.size();
  };
  const std::size_t own = readers_of(tenant);
  if (own >= options_.tenant_readers_max) {
    return absl::ResourceExhaustedError(absl::StrCat(own,
                                                     " callers of this tenant watch events: at "
                                                     "most ",
                                                     options_.tenant_readers_max, "; retry later"));
  }
  if (tenant == options_.own_tenant) return absl::OkStatus();
  const std::size_t others = readers_ - readers_of(options_.own_tenant);
  const std::size_t others_max =
      options_.readers_max - std::min(options_.tenant_readers_max, options_.readers_max / 2);
  if (others < others_max) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(others, " callers watch events: at most ", others_max, "; retry later"));
}

absl::StatusOr<EventJournal::ReaderPtr> EventJournal::Open(const std::string& tenant,
                                                           const From& from,
                                                           std::function<void()> wake) {
  MutexLock lock(mu_);
  if (ended_.has_value()) return *ended_;
  if (from.revocations.has_value() && *from.revocations != revocations_) {
    return absl::AbortedError("the tenants changed meanwhile; try again");
  }
  KVMILL_RETURN_IF_ERROR(CheckReaders(tenant));
  KVMILL_ASSIGN_OR_RETURN(EventLogPtr log, OpenLog(tenant));
  if (!std::exchange(started_, true)) follower_.Start(*store_);
  ReaderPtr reader = std::make_shared<Reader>();
  reader->from = from;
  reader->wake = std::move(wake);
  reader->log = std::move(log);
  reader->log->readers.push_back(reader);
  ++readers_;
  return reader;
}

void EventJournal::Close(const ReaderPtr& reader) {
  MutexLock lock(mu_);
  if (std::exchange(reader->closed, true)) return;
  reader->log->Remove(reader);
  reader->wake = nullptr;  // It may hold the reader's owner.
  --readers_;
}

void EventJournal::Revoke(const std::set<std::string>& tenants) {
  std::vector<std::function<void()>> wakes;
  {
    MutexLock lock(mu_);
    ++revocations_;
    for (const std::string& tenant : tenants) {
      const auto log = logs_.find(tenant);
      if (log == logs_.end()) continue;
      for (const ReaderPtr& reader : log->second->readers) {
        if (!reader->from.revocations.has_value()) continue;
        reader->revoked = true;
        reader->waiting = false;
        wakes.push_back(reader->wake);
      }
    }
  }
  for (const auto& wake : wakes) wake();
}

std::uint64_t EventJournal::revocations() const {
  MutexLock lock(mu_);
  return revocations_;
}

bool EventJournal::Ended(const Reader& reader) const {
  MutexLock lock(mu_);
  return ended_.has_value() || reader.revoked;
}

absl::StatusOr<bool> EventJournal::Next(Reader& reader, Part* part) {
  *part = Part();
  MutexLock lock(mu_);
  if (ended_.has_value()) return *ended_;
  if (reader.revoked) {
    return absl::AbortedError("who may read the events of this tenant has changed: come again");
  }
  return reader.log->Next(reader, part);
}

bool EventJournal::SnapshotAtEnd(const Reader& reader, std::vector<BlockEvent>* blocks) const {
  blocks->clear();
  MutexLock lock(mu_);
  return reader.log->SnapshotAtEnd(reader, blocks);
}

EventJournal::Stats EventJournal::stats() const {
  const StoreFollower<BlockNotice>::Stats follower = follower_.stats();
  Stats stats;
  stats.walks = follower.walks;
  stats.skipped = follower.dropped;
  MutexLock lock(mu_);
  static_cast<EventLog::Counts&>(stats) = counts_;
  stats.readers = readers_;
  for (const auto& [tenant, log] : logs_) {
    stats.blocks += log->mirror().size();
    stats.bytes += log->bytes();
  }
  return stats;
}

}  // namespace kvmill
