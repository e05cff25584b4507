#include "service/event_journal.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::size_t kLookAtOnce = 256;
constexpr std::size_t kPartEvents = 512;
// That are passed over for one that is asked for, under the lock.
constexpr std::size_t kPassedOverMax = 8192;
constexpr std::uint32_t kPlacesAtOnce = 512;
constexpr std::size_t kForgottenAtOnce = 64;
// About what a mirror takes for a block.
constexpr std::uint64_t kMirrorBytes = 105;

BlockEvent StoredEvent(const BlockMirror::Entry& entry) {
  return {.kind = BlockEvent::Kind::kStored,
          .tier = entry.tier,
          .from = entry.tier,
          .token_count = entry.token_count,
          .namespace_id = entry.namespace_id,
          .key = entry.key(),
          .parent = entry.parent()};
}

}  // namespace

const char* BlockEventName(BlockEvent::Kind kind) {
  constexpr const char* kNames[kBlockEventKinds] = {"stored", "moved", "removed", "cleared"};
  return kNames[static_cast<std::size_t>(kind)];
}

void EventJournal::Start(const TieredStore& store) {
  MutexLock lock(mu_);
  store_ = &store;
}

void EventJournal::Stop(absl::Status why) {
  std::vector<std::function<void()>> wakes;
  std::thread thread;
  {
    MutexLock lock(mu_);
    if (!ended_.has_value()) {
      ended_ = why.ok() ? absl::UnavailableError("events have ended") : std::move(why);
    }
    for (const auto& [tenant, stream] : streams_) {
      for (const ReaderPtr& reader : stream->readers) {
        reader->waiting = false;
        wakes.push_back(reader->wake);
      }
    }
    thread = std::move(thread_);
  }
  active_.store(false, std::memory_order_release);
  for (const auto& wake : wakes) wake();
  {
    MutexLock lock(queue_mu_);
    stopping_ = true;
  }
  work_.NotifyAll();
  settled_.NotifyAll();
  if (thread.joinable()) thread.join();
}

// --- What the store says ---

void EventJournal::Stored(const BlockId& id, const BlockKey& parent) {
  if (active_.load(std::memory_order_acquire)) Push(Notice::Kind::kStored, id, parent);
}

void EventJournal::Removed(const BlockId& id) {
  if (active_.load(std::memory_order_acquire)) Push(Notice::Kind::kRemoved, id, BlockKey());
}

void EventJournal::Moved(const BlockId& id) {
  if (active_.load(std::memory_order_acquire)) Push(Notice::Kind::kMoved, id, BlockKey());
}

void EventJournal::Clearing(NamespaceId space) {
  MutexLock lock(queue_mu_);
  ++clearing_[space];
}

void EventJournal::Cleared(NamespaceId space) {
  {
    MutexLock lock(queue_mu_);
    const auto it = clearing_.find(space);
    KVMILL_CHECK(it != clearing_.end());
    if (--it->second == 0) clearing_.erase(it);
  }
  if (active_.load(std::memory_order_acquire)) {
    Push(Notice::Kind::kCleared, BlockId{space, 0, BlockKey()}, BlockKey());
  }
}

void EventJournal::Push(Notice::Kind kind, const BlockId& id, const BlockKey& parent) {
  {
    MutexLock lock(queue_mu_);
    // Cleared tells of all of them.
    if (kind == Notice::Kind::kRemoved && !clearing_.empty() &&
        clearing_.contains(id.namespace_id)) {
      return;
    }
    if (queue_.size() >= options_.queue_max) {
      ++skipped_;
      walk_due_ = true;  // There is work already.
      return;
    }
    queue_.push_back({kind, id, parent});
    if (queue_.size() > 1) return;
  }
  work_.NotifyOne();
}

// --- The thread ---

bool EventJournal::WaitForWork() {
  MutexLock lock(queue_mu_);
  while (!stopping_ && !walk_due_ && queue_.empty()) {
    idle_ = true;
    settled_.NotifyAll();
    // What nobody reads is looked for now and then.
    if (!work_.WaitFor(queue_mu_, options_.unread_max)) {
      idle_ = false;
      return !stopping_;
    }
  }
  idle_ = false;
  const auto until = std::chrono::steady_clock::now() + options_.gather;
  for (auto left = options_.gather; !stopping_ && left.count() > 0;) {
    work_.WaitFor(queue_mu_, left);
    left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  }
  return !stopping_;
}

bool EventJournal::stopping() const {
  MutexLock lock(queue_mu_);
  return stopping_;
}

void EventJournal::Work() {
  while (WaitForWork()) {
    RetireUnread();
    bool walk = false;
    {
      MutexLock lock(queue_mu_);
      walk = std::exchange(walk_due_, false);
      walks_ += walk;
    }
    if (walk) WalkStore();
    Drain();
  }
}

void EventJournal::RetireUnread() {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(mu_);
  for (auto it = streams_.begin(); it != streams_.end();) {
    const Stream& stream = *it->second;
    if (!stream.readers.empty() || now - stream.unread_since < options_.unread_max) {
      ++it;
      continue;
    }
    retired_[it->first] = stream.last;
    it = streams_.erase(it);
  }
  if (streams_.empty()) active_.store(false, std::memory_order_release);
}

// Whatever is looked up is applied before anything else is looked up, so the newest look of a block
// is the last that is applied.
void EventJournal::WalkStore() {
  std::vector<StreamPtr> streams;
  {
    MutexLock lock(mu_);
    for (const auto& [tenant, stream] : streams_) {
      streams.push_back(stream);
      for (std::uint32_t i = 0; i < stream->mirror.places(); ++i) {
        stream->mirror.at(i).seen = false;
      }
    }
  }
  TieredStore::WalkCursor cursor;
  std::map<NamespaceId, std::vector<BlockKey>> step;
  for (bool more = true; more;) {
    step.clear();
    more = store_->Walk(&cursor, [&step](const BlockId& id, const TieredStore::HeldBlock& block) {
      if (block.whole) step[id.namespace_id].push_back(id.key);
    });
    for (const auto& [space, keys] : step) Look(space, keys, {});
    Drain();
    if (stopping()) return;
  }
  // What is told of and was not found may have gone, or have come while the store was walked.
  for (const StreamPtr& stream : streams) {
    std::uint32_t place = 0;
    for (bool more = true; more;) {
      NamespaceId space = 0;
      std::vector<BlockKey> keys;
      {
        MutexLock lock(mu_);
        const BlockMirror& mirror = stream->mirror;
        for (; place < mirror.places() && keys.size() < kLookAtOnce; ++place) {
          const BlockMirror::Entry& entry = mirror.at(place);
          if (!entry.used() || entry.seen) continue;
          if (!keys.empty() && entry.namespace_id != space) break;
          space = entry.namespace_id;
          keys.push_back(entry.key());
        }
        more = place < mirror.places();
      }
      if (!keys.empty()) Look(space, keys, {});
      Drain();
      if (stopping()) return;
    }
    MutexLock lock(mu_);
    stream->ready = true;
  }
  Wake();
}

void EventJournal::Drain() {
  std::vector<Notice> taken;
  for (;;) {
    taken.clear();
    {
      MutexLock lock(queue_mu_);
      taken.swap(queue_);
    }
    if (taken.empty()) return;
    Handle(taken);
  }
}

void EventJournal::Handle(absl::Span<const Notice> notices) {
  std::vector<BlockKey> keys, parents;
  for (std::size_t begin = 0; begin < notices.size();) {
    const NamespaceId space = notices[begin].id.namespace_id;
    if (notices[begin].kind == Notice::Kind::kCleared) {
      HandleCleared(space);
      ++begin;
      continue;
    }
    keys.clear();
    parents.clear();
    std::size_t end = begin;
    for (; end < notices.size() && end - begin < kLookAtOnce; ++end) {
      const Notice& notice = notices[end];
      if (notice.kind == Notice::Kind::kCleared || notice.id.namespace_id != space) break;
      keys.push_back(notice.id.key);
      parents.push_back(notice.parent);
    }
    Look(space, keys, parents);
    begin = end;
  }
}

void EventJournal::Look(NamespaceId space, absl::Span<const BlockKey> keys,
                        absl::Span<const BlockKey> parents) {
  {
    MutexLock lock(mu_);
    if (StreamOf(space) == nullptr) return;
  }
  std::vector<BlockState> found(keys.size());
  look_->LookAt(space, keys, absl::MakeSpan(found));
  {
    MutexLock lock(mu_);
    const StreamPtr stream = StreamOf(space);
    if (stream == nullptr) return;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      Apply(*stream, space, keys[i], parents.empty() ? BlockKey() : parents[i], found[i]);
    }
  }
  Wake();
}

void EventJournal::HandleCleared(NamespaceId space) {
  // What came while it was cleared is still there, or again.
  struct Still {
    BlockKey key, parent;
    BlockState block;
  };
  std::vector<Still> still;
  std::vector<std::uint32_t> cleared;
  StreamPtr stream;
  {
    MutexLock lock(mu_);
    stream = StreamOf(space);
    if (stream == nullptr) return;
  }
  std::uint32_t place = 0;
  for (bool more = true; more;) {
    std::vector<BlockKey> keys;
    std::vector<std::uint32_t> looked;
    {
      MutexLock lock(mu_);
      for (; place < stream->mirror.places() && keys.size() < kLookAtOnce; ++place) {
        const BlockMirror::Entry& entry = stream->mirror.at(place);
        if (!entry.used() || entry.namespace_id != space) continue;
        keys.push_back(entry.key());
        looked.push_back(place);
      }
      more = place < stream->mirror.places();
    }
    std::vector<BlockState> found(keys.size());
    look_->LookAt(space, keys, absl::MakeSpan(found));
    MutexLock lock(mu_);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      cleared.push_back(looked[i]);
      if (!found[i].whole) continue;
      still.push_back({keys[i], stream->mirror.at(looked[i]).parent(), found[i]});
    }
  }
  if (cleared.empty()) return;
  {
    MutexLock lock(mu_);
    for (const std::uint32_t at : cleared) stream->mirror.Erase(at);
    Add(*stream, {.kind = BlockEvent::Kind::kCleared, .namespace_id = space});
    for (const Still& one : still) Apply(*stream, space, one.key, one.parent, one.block);
  }
  Wake();
}

EventJournal::StreamPtr EventJournal::StreamOf(NamespaceId space) {
  const auto [tenant, added] = tenants_.try_emplace(space);
  if (added) {
    const auto info = store_->FindNamespace(space);
    if (!info.ok()) {
      tenants_.erase(tenant);
      return nullptr;
    }
    tenant->second = info->spec.tenant;
  }
  const auto it = streams_.find(tenant->second);
  return it == streams_.end() ? nullptr : it->second;
}

void EventJournal::Apply(Stream& stream, NamespaceId space, const BlockKey& key,
                         const BlockKey& parent, const BlockState& block) {
  const std::uint32_t place = stream.mirror.Find(space, key);
  if (!block.whole) {
    if (place == BlockMirror::kNone) return;
    BlockEvent event = StoredEvent(stream.mirror.at(place));
    event.kind = BlockEvent::Kind::kRemoved;
    event.parent = BlockKey();
    stream.mirror.Erase(place);
    Add(stream, std::move(event));
    return;
  }
  if (place == BlockMirror::kNone) {
    BlockMirror::Entry& entry = stream.mirror.Add(space, key, parent);
    entry.tier = block.tier;
    entry.token_count = block.token_count;
    entry.seen = true;
    Add(stream, StoredEvent(entry));
    return;
  }
  BlockMirror::Entry& entry = stream.mirror.at(place);
  entry.seen = true;
  if (entry.tier == block.tier) return;
  BlockEvent event = StoredEvent(entry);
  event.kind = BlockEvent::Kind::kMoved;
  event.parent = BlockKey();
  event.tier = entry.tier = block.tier;
  Add(stream, std::move(event));
}

void EventJournal::Add(Stream& stream, BlockEvent event) {
  if (!stream.ready) return;  // Its readers begin with what is there, or behind it.
  ++counts_[static_cast<std::size_t>(event.kind)];
  stream.events.push_back(std::move(event));
  ++stream.last;
  // Whoever reads a snapshot must find what came since, or it would get snapshots for ever.
  const std::size_t kept_max = stream.catching_up == 0
                                   ? options_.events_max
                                   : std::max(options_.events_max, 2 * stream.mirror.size());
  for (std::size_t i = 0; i < kForgottenAtOnce && stream.events.size() > kept_max; ++i) {
    stream.events.pop_front();
  }
}

void EventJournal::Wake() {
  std::vector<std::function<void()>> wakes;
  {
    MutexLock lock(mu_);
    for (const auto& [tenant, stream] : streams_) {
      for (const ReaderPtr& reader : stream->readers) {
        if (!reader->waiting || !stream->ready) continue;
        if (reader->state == Reader::State::kLive && reader->position == stream->last) continue;
        reader->waiting = false;
        wakes.push_back(reader->wake);
      }
    }
  }
  for (const auto& wake : wakes) wake();
}

// --- Readers ---

absl::StatusOr<EventJournal::StreamPtr> EventJournal::OpenStream(const std::string& tenant) {
  const auto known = streams_.find(tenant);
  if (known != streams_.end()) return known->second;
  // One is kept for the daemon's own.
  const bool is_own = tenant == options_.own_tenant;
  const std::size_t tenants_max = is_own || streams_.contains(options_.own_tenant)
                                      ? options_.tenants_max
                                      : options_.tenants_max - 1;
  if (streams_.size() >= tenants_max) {
    auto unread = streams_.begin();
    while (unread != streams_.end() &&
           (!unread->second->readers.empty() || unread->first == options_.own_tenant)) {
      ++unread;
    }
    if (unread == streams_.end()) {
      return absl::ResourceExhaustedError(absl::StrCat("events of ", streams_.size(),
                                                       " tenants are read: at most ", tenants_max,
                                                       " at once; retry later"));
    }
    retired_[unread->first] = unread->second->last;
    streams_.erase(unread);
  }
  const StreamPtr stream = std::make_shared<Stream>();
  const auto retired = retired_.find(tenant);
  // What happened between is not known: nobody may go on where the old one ended.
  if (retired != retired_.end()) stream->last = retired->second + 1;
  streams_[tenant] = stream;
  active_.store(true, std::memory_order_release);
  {
    MutexLock lock(queue_mu_);
    walk_due_ = true;
  }
  work_.NotifyOne();
  return stream;
}

absl::Status EventJournal::CheckReaders(const std::string& tenant) const {
  const auto readers_of = [this](const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto stream = streams_.find(name);
    return stream == streams_.end() ? std::size_t{0} : stream->second->readers.size();
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
  KVMILL_ASSIGN_OR_RETURN(StreamPtr stream, OpenStream(tenant));
  if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  ReaderPtr reader = std::make_shared<Reader>();
  reader->from = from;
  reader->wake = std::move(wake);
  reader->stream = std::move(stream);
  reader->stream->readers.push_back(reader);
  ++readers_;
  return reader;
}

void EventJournal::Close(const ReaderPtr& reader) {
  MutexLock lock(mu_);
  if (std::exchange(reader->closed, true)) return;
  std::erase(reader->stream->readers, reader);
  SetCatchingUp(*reader, false);
  reader->stream->unread_since = std::chrono::steady_clock::now();
  reader->wake = nullptr;  // It may hold the reader's owner.
  --readers_;
}

void EventJournal::Revoke(const std::set<std::string>& tenants) {
  std::vector<std::function<void()>> wakes;
  {
    MutexLock lock(mu_);
    ++revocations_;
    for (const std::string& tenant : tenants) {
      const auto stream = streams_.find(tenant);
      if (stream == streams_.end()) continue;
      for (const ReaderPtr& reader : stream->second->readers) {
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

void EventJournal::SetCatchingUp(Reader& reader, bool is_so) {
  if (std::exchange(reader.catching_up, is_so) == is_so) return;
  is_so ? ++reader.stream->catching_up : --reader.stream->catching_up;
}

absl::StatusOr<bool> EventJournal::Next(Reader& reader, Part* part) {
  *part = Part();
  MutexLock lock(mu_);
  if (ended_.has_value()) return *ended_;
  if (reader.revoked) {
    return absl::AbortedError("who may read the events of this tenant has changed: come again");
  }
  const Stream& stream = *reader.stream;
  if (!stream.ready) {
    reader.waiting = true;
    return false;
  }
  if (reader.state == Reader::State::kNew) {
    const std::optional<std::uint64_t> after = reader.from.sequence;
    if (reader.from.snapshot ||
        (after.has_value() && (*after < stream.kept_after() || *after > stream.last))) {
      reader.state = Reader::State::kSnapshotBegin;
    } else {
      reader.position = after.value_or(stream.last);
      reader.state = Reader::State::kLive;
      part->what = Part::What::kPosition;
      part->sequence = reader.position;
      return true;
    }
  }
  if (reader.state == Reader::State::kLive) {
    if (reader.position >= stream.kept_after()) return NextEvents(reader, part);
    dropped_ += stream.kept_after() - reader.position;
    reader.state = Reader::State::kSnapshotBegin;
  }
  NextOfSnapshot(reader, part);
  return true;
}

bool EventJournal::NextEvents(Reader& reader, Part* part) {
  const Stream& stream = *reader.stream;
  const std::uint64_t first = stream.kept_after() + 1;
  std::size_t passed_over = 0;
  while (reader.position < stream.last && part->events.size() < kPartEvents &&
         passed_over < kPassedOverMax) {
    const BlockEvent& event = stream.events[static_cast<std::size_t>(reader.position + 1 - first)];
    ++reader.position;
    if (reader.from.only.has_value() && event.namespace_id != *reader.from.only) {
      ++passed_over;
    } else {
      part->events.push_back(event);
    }
  }
  part->sequence = reader.position;
  if (stream.last - reader.position <= options_.events_max / 2) SetCatchingUp(reader, false);
  if (!part->events.empty() || passed_over == kPassedOverMax) return true;
  reader.waiting = true;
  return false;
}

void EventJournal::NextOfSnapshot(Reader& reader, Part* part) {
  const Stream& stream = *reader.stream;
  const BlockMirror& mirror = stream.mirror;
  if (reader.state == Reader::State::kSnapshotBegin) {
    reader.position = stream.last;
    reader.next_place = 0;
    part->what = Part::What::kSnapshotBegin;
    part->sequence = reader.position;
    reader.state = Reader::State::kSnapshot;
    if (!reader.from.exact) {
      SetCatchingUp(reader, true);
      return;
    }
  } else {
    part->what = Part::What::kSnapshot;
    part->sequence = reader.position;
  }
  const std::uint32_t places_max = reader.from.exact ? BlockMirror::kNone : kPlacesAtOnce;
  for (std::uint32_t i = 0; i < places_max && reader.next_place < mirror.places(); ++i) {
    const BlockMirror::Entry& entry = mirror.at(reader.next_place++);
    if (!entry.used()) continue;
    if (reader.from.only.has_value() && entry.namespace_id != *reader.from.only) continue;
    part->events.push_back(StoredEvent(entry));
  }
  if (reader.next_place < mirror.places()) return;
  reader.state = Reader::State::kLive;
  if (!reader.from.exact) part->what = Part::What::kSnapshotEnd;
}

bool EventJournal::SnapshotAtEnd(const Reader& reader, std::vector<BlockEvent>* blocks) const {
  blocks->clear();
  MutexLock lock(mu_);
  const Stream& stream = *reader.stream;
  if (reader.state != Reader::State::kLive || reader.position != stream.last) return false;
  for (std::uint32_t i = 0; i < stream.mirror.places(); ++i) {
    const BlockMirror::Entry& entry = stream.mirror.at(i);
    if (!entry.used()) continue;
    if (reader.from.only.has_value() && entry.namespace_id != *reader.from.only) continue;
    blocks->push_back(StoredEvent(entry));
  }
  return true;
}

EventJournal::Stats EventJournal::stats() const {
  Stats stats;
  {
    MutexLock lock(queue_mu_);
    stats.walks = walks_;
    stats.skipped = skipped_;
  }
  MutexLock lock(mu_);
  stats.events = counts_;
  stats.dropped = dropped_;
  stats.readers = readers_;
  for (const auto& [tenant, stream] : streams_) {
    stats.blocks += stream->mirror.size();
    stats.bytes +=
        stream->mirror.places() * kMirrorBytes + stream->events.size() * sizeof(BlockEvent);
  }
  return stats;
}

void EventJournal::WaitSettled() const {
  MutexLock lock(queue_mu_);
  while (!stopping_ && !(idle_ && queue_.empty() && !walk_due_)) settled_.Wait(queue_mu_);
}

}  // namespace kvmill
