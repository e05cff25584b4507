// What the readers of one tenant are told of its blocks: all that are here, the last events, which
// are numbered, and how far each reader is.
//
// Not thread-safe: EventJournal guards all of it, its readers included.
#ifndef KVMILL_SERVICE_EVENT_LOG_H_
#define KVMILL_SERVICE_EVENT_LOG_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "service/block_mirror.h"
#include "storage/block_watcher.h"
#include "storage/core/block_key.h"
#include "storage/core/tier.h"

namespace kvmill {

struct BlockEvent {
  enum class Kind : std::uint8_t {
    kStored = 0,   // It is here now, in `tier`.
    kMoved = 1,    // It was in `from` and is in `tier` now.
    kRemoved = 2,  // It was in `tier` and is gone.
    kCleared = 3,  // No block of the namespace is here.
  };
  Kind kind = Kind::kStored;
  Tier tier = Tier::kHost;
  Tier from = Tier::kHost;
  std::uint16_t token_count = 0;
  NamespaceId namespace_id = 0;
  BlockKey key;     // Empty of kCleared.
  BlockKey parent;  // Of kStored; empty when there is none or it is not known here.
};
inline constexpr std::size_t kBlockEventKinds = 4;
const char* BlockEventName(BlockEvent::Kind kind);

// Where a reader begins.
struct EventsFrom {
  // After this event, if those that follow are kept; else with a snapshot. None: with what happens
  // from now on.
  std::optional<std::uint64_t> sequence;
  bool snapshot = false;  // With one in any case.
  bool exact = false;     // Snapshots are one part, kSnapshotBegin, as of its sequence.
  std::optional<NamespaceId> only;
  // Of a reader that Revoke may end: what revocations() was before it was known who it is.
  std::optional<std::uint64_t> revocations;
};

// What a reader is told next.
struct EventPart {
  enum class What : std::uint8_t {
    kPosition,       // Where it begins: `sequence`.
    kSnapshotBegin,  // What it knew is void.
    kSnapshot,       // Some of the blocks that are here, as kStored.
    kSnapshotEnd,    // Those were all; as of `sequence`.
    kEvents,         // The last of them is `sequence`.
  };
  What what = What::kEvents;
  std::uint64_t sequence = 0;
  std::vector<BlockEvent> events;
};

class EventReader;
using EventReaderPtr =
    std::shared_ptr<EventReader>;  // The journal's until Close, and the caller's.

class EventLog {
 public:
  struct Counts {
    std::array<std::uint64_t, kBlockEventKinds> events{};  // By kind.
    std::uint64_t dropped = 0;  // Events that a reader was too slow for, summed over readers.
  };

  // At least `events_max` are kept. What is told is counted in `counts`. `last`: the number of the
  // event before the first.
  EventLog(std::size_t events_max, std::uint64_t last, Counts& counts)
      : events_max_(events_max), counts_(counts), last_(last) {}
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // What is so of a block now: an event, if it is something else than was told.
  void Apply(NamespaceId space, const BlockKey& key, const BlockKey& parent,
             const BlockState& block);
  // The blocks at these places, all that a namespace had, are gone.
  void Clear(NamespaceId space, const std::vector<std::uint32_t>& places);
  // Before this readers are told nothing: the mirror does not have yet all that was here.
  void SetReady() { ready_ = true; }
  bool ready() const { return ready_; }

  // For a reader of this log. False: nothing now, and it is waiting to be woken.
  bool Next(EventReader& reader, EventPart* part);
  // There is something for a reader that waits.
  bool HasMore(const EventReader& reader) const;
  // For a reader that was told everything: all blocks, as of its position. False when it was not.
  bool SnapshotAtEnd(const EventReader& reader, std::vector<BlockEvent>* blocks) const;
  void Remove(const EventReaderPtr& reader);

  BlockMirror& mirror() { return mirror_; }
  const BlockMirror& mirror() const { return mirror_; }
  std::uint64_t last() const { return last_; }
  std::uint64_t bytes() const;  // Of memory, about.

  std::vector<EventReaderPtr> readers;
  std::chrono::steady_clock::time_point unread_since;  // While it has no readers.

 private:
  void Add(BlockEvent event);
  std::uint64_t kept_after() const { return last_ - events_.size(); }
  bool NextEvents(EventReader& reader, EventPart* part);
  void NextOfSnapshot(EventReader& reader, EventPart* part);
  void SetCatchingUp(EventReader& reader, bool is_so);

  const std::size_t events_max_;
  Counts& counts_;
  bool ready_ = false;
  BlockMirror mirror_;
  std::deque<BlockEvent> events_;
  std::uint64_t last_;           // Number of the newest; 0: there was none.
  std::size_t catching_up_ = 0;  // Readers that are in a snapshot, or far behind one.
};
using EventLogPtr = std::shared_ptr<EventLog>;  // The journal's table's, and its readers'.

// A place in a tenant's events. Opaque to all but the journal and its logs.
class EventReader {
 private:
  friend class EventLog;
  friend class EventJournal;
  enum class State : std::uint8_t { kNew, kSnapshotBegin, kSnapshot, kLive };

  EventsFrom from;
  std::function<void()> wake;
  EventLogPtr log;
  State state = State::kNew;
  bool waiting = false;  // For a wake.
  bool closed = false;
  bool revoked = false;
  bool catching_up = false;      // Counted in the log.
  std::uint64_t position = 0;    // The last event it was told, or its snapshot is of.
  std::uint32_t next_place = 0;  // Of the mirror, in a snapshot.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENT_LOG_H_
