#include "service/event_log.h"

#include <algorithm>
#include <utility>

namespace kvmill {
namespace {

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

void EventLog::Apply(NamespaceId space, const BlockKey& key, const BlockKey& parent,
                     const BlockState& block) {
  const std::uint32_t place = mirror_.Find(space, key);
  if (!block.whole) {
    if (place == BlockMirror::kNone) return;
    BlockEvent event = StoredEvent(mirror_.at(place));
    event.kind = BlockEvent::Kind::kRemoved;
    event.parent = BlockKey();
    mirror_.Erase(place);
    Add(std::move(event));
    return;
  }
  if (place == BlockMirror::kNone) {
    BlockMirror::Entry& entry = mirror_.Add(space, key, parent);
    entry.tier = block.tier;
    entry.token_count = block.token_count;
    entry.seen = true;
    Add(StoredEvent(entry));
    return;
  }
  BlockMirror::Entry& entry = mirror_.at(place);
  entry.seen = true;
  if (entry.tier == block.tier) return;
  BlockEvent event = StoredEvent(entry);
  event.kind = BlockEvent::Kind::kMoved;
  event.parent = BlockKey();
  event.tier = entry.tier = block.tier;
  Add(std::move(event));
}

void EventLog::Clear(NamespaceId space, const std::vector<std::uint32_t>& places) {
  for (const std::uint32_t place : places) mirror_.Erase(place);
  Add({.kind = BlockEvent::Kind::kCleared, .namespace_id = space});
}

void EventLog::Add(BlockEvent event) {
  if (!ready_) return;  // Its readers begin with what is there, or behind it.
  ++counts_.events[static_cast<std::size_t>(event.kind)];
  events_.push_back(std::move(event));
  ++last_;
  // Whoever reads a snapshot must find what came since, or it would get snapshots for ever.
  const std::size_t kept_max =
      catching_up_ == 0 ? events_max_ : std::max(events_max_, 2 * mirror_.size());
  for (std::size_t i = 0; i < kForgottenAtOnce && events_.size() > kept_max; ++i) {
    events_.pop_front();
  }
}

std::uint64_t EventLog::bytes() const {
  return mirror_.places() * kMirrorBytes + events_.size() * sizeof(BlockEvent);
}

// --- Readers ---

void EventLog::Remove(const EventReaderPtr& reader) {
  std::erase(readers, reader);
  SetCatchingUp(*reader, false);
  unread_since = std::chrono::steady_clock::now();
}

void EventLog::SetCatchingUp(EventReader& reader, bool is_so) {
  if (std::exchange(reader.catching_up, is_so) == is_so) return;
  is_so ? ++catching_up_ : --catching_up_;
}

bool EventLog::HasMore(const EventReader& reader) const {
  return ready_ && !(reader.state == EventReader::State::kLive && reader.position == last_);
}

bool EventLog::Next(EventReader& reader, EventPart* part) {
  using State = EventReader::State;
  if (!ready_) {
    reader.waiting = true;
    return false;
  }
  if (reader.state == State::kNew) {
    const std::optional<std::uint64_t> after = reader.from.sequence;
    if (reader.from.snapshot || (after.has_value() && (*after < kept_after() || *after > last_))) {
      reader.state = State::kSnapshotBegin;
    } else {
      reader.position = after.value_or(last_);
      reader.state = State::kLive;
      part->what = EventPart::What::kPosition;
      part->sequence = reader.position;
      return true;
    }
  }
  if (reader.state == State::kLive) {
    if (reader.position >= kept_after()) return NextEvents(reader, part);
    counts_.dropped += kept_after() - reader.position;
    reader.state = State::kSnapshotBegin;
  }
  NextOfSnapshot(reader, part);
  return true;
}

bool EventLog::NextEvents(EventReader& reader, EventPart* part) {
  const std::uint64_t first = kept_after() + 1;
  std::size_t passed_over = 0;
  while (reader.position < last_ && part->events.size() < kPartEvents &&
         passed_over < kPassedOverMax) {
    const BlockEvent& event = events_[static_cast<std::size_t>(reader.position + 1 - first)];
    ++reader.position;
    if (reader.from.only.has_value() && event.namespace_id != *reader.from.only) {
      ++passed_over;
    } else {
      part->events.push_back(event);
    }
  }
  part->sequence = reader.position;
  if (last_ - reader.position <= events_max_ / 2) SetCatchingUp(reader, false);
  if (!part->events.empty() || passed_over == kPassedOverMax) return true;
  reader.waiting = true;
  return false;
}

void EventLog::NextOfSnapshot(EventReader& reader, EventPart* part) {
  if (reader.state == EventReader::State::kSnapshotBegin) {
    reader.position = last_;
    reader.next_place = 0;
    part->what = EventPart::What::kSnapshotBegin;
    part->sequence = reader.position;
    reader.state = EventReader::State::kSnapshot;
    if (!reader.from.exact) {
      SetCatchingUp(reader, true);
      return;
    }
  } else {
    part->what = EventPart::What::kSnapshot;
    part->sequence = reader.position;
  }
  const std::uint32_t places_max = reader.from.exact ? BlockMirror::kNone : kPlacesAtOnce;
  for (std::uint32_t i = 0; i < places_max && reader.next_place < mirror_.places(); ++i) {
    const BlockMirror::Entry& entry = mirror_.at(reader.next_place++);
    if (!entry.used()) continue;
    if (reader.from.only.has_value() && entry.namespace_id != *reader.from.only) continue;
    part->events.push_back(StoredEvent(entry));
  }
  if (reader.next_place < mirror_.places()) return;
  reader.state = EventReader::State::kLive;
  if (!reader.from.exact) part->what = EventPart::What::kSnapshotEnd;
}

bool EventLog::SnapshotAtEnd(const EventReader& reader, std::vector<BlockEvent>* blocks) const {
  if (reader.state != EventReader::State::kLive || reader.position != last_) return false;
  for (std::uint32_t i = 0; i < mirror_.places(); ++i) {
    const BlockMirror::Entry& entry = mirror_.at(i);
    if (!entry.used()) continue;
    if (reader.from.only.has_value() && entry.namespace_id != *reader.from.only) continue;
    blocks->push_back(StoredEvent(entry));
  }
  return true;
}

}  // namespace kvmill
