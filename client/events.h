// What happens to the blocks of a daemon, for who keeps an index of them: routers.
//
//     auto events = EventStream::Open({.address = "unix:/run/kvmill/kvmill.sock"}, {});
//     for (;;) {
//       absl::StatusOr<EventBatch> batch = (*events)->Next(absl::InfiniteDuration());
//       if (!batch.ok()) ...                       // It does not help to wait.
//       if (batch->snapshot_begin) index.Clear();
//       for (const WatchedEvent& event : batch->events) index.Apply(event);
//     }
//
// Connections that break, and daemons that restart, are this object's business: it connects again
// and goes on where it was; when the daemon has not kept what follows it begins with a snapshot,
// whose first batch says that what was known is void. docs/events.md has the guarantees.
#ifndef KVMILL_CLIENT_EVENTS_H_
#define KVMILL_CLIENT_EVENTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"
#include "storage/core/tier.h"

namespace kvmill {

class Connection;  // client/connection.h

// Where a reader is in the events of a tenant on a daemon.
struct EventPosition {
  std::string epoch;           // 16 bytes, of the daemon's incarnation.
  std::uint64_t sequence = 0;  // The last event it was told.

  friend bool operator==(const EventPosition&, const EventPosition&) = default;
};

struct WatchedNamespace {
  std::string name;
  Fingerprint fingerprint{};
  std::uint32_t block_tokens = 0;
  std::string model;
  std::string adapter_digest;
  std::string hash_scheme;
};

struct WatchedEvent {
  enum class Kind : std::uint8_t {
    kStored,   // It is here, in `tier`.
    kMoved,    // It was in `from` and is in `tier`.
    kRemoved,  // It was in `tier` and is gone.
    kCleared,  // Of the namespace nothing is here any more.
  };
  Kind kind = Kind::kStored;
  std::shared_ptr<const WatchedNamespace> ns;  // Shared by the events of a stream. Never null.
  BlockKey key;                                // Empty of kCleared.
  BlockKey parent;  // Of kStored: the block before it; empty when it has none or it is not known.
  std::uint32_t token_count = 0;  // Of kStored; less than block_tokens: a tail.
  Tier tier = Tier::kHost;
  Tier from = Tier::kHost;
};

struct EventBatch {
  // Before the events: what was known is void, and blocks that are here follow until snapshot_end.
  bool snapshot_begin = false;
  std::vector<WatchedEvent> events;
  bool snapshot_end = false;  // After the events: those were all.
  // Behind this batch, to begin with next time. None within a snapshot.
  std::optional<EventPosition> position;
};

// Has a connection of its own. Not thread-safe.
class EventStream {
 public:
  struct Options {
    std::string namespace_name;  // Only this one; empty: all of the tenant.
    // After this one; none: with a snapshot, or with what happens from now on.
    std::optional<EventPosition> after;
    bool snapshot = true;  // Without `after`.
    // Called when there may be something after Next said that there is nothing: once, from a thread
    // of the stream, without a lock held; it may call Next. Not after the destructor.
    std::function<void()> wake;
  };

  // `daemon`: where it is and who this is, as for a client. INVALID_ARGUMENT as Client::Create;
  // does not connect yet.
  static absl::StatusOr<std::unique_ptr<EventStream>> Open(const Client::Options& daemon,
                                                           Options options);
  ~EventStream();  // Waits until the call has ended.
  EventStream(const EventStream&) = delete;
  EventStream& operator=(const EventStream&) = delete;

  // The next ones, in order; an empty batch says where the stream begins. DEADLINE_EXCEEDED when
  // there are none in this time: ask again. What cannot be mended ends the stream, and is said
  // again by every later call: NOT_FOUND for a namespace that is unknown before anything was told
  // (later it is waited for: a daemon that restarted knows it once an engine opens it),
  // PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT, UNIMPLEMENTED (an older daemon), INTERNAL
  // (a reply that makes no sense).
  absl::StatusOr<EventBatch> Next(absl::Duration timeout);

  // While it waits to connect again: why the last call ended; OK otherwise.
  absl::Status trouble() const;

 private:
  class State;
  EventStream(std::unique_ptr<Connection> connection, Options options);
  std::unique_ptr<Connection> connection_;
  std::shared_ptr<State> state_;  // Its calls and timers hold it, too.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_EVENTS_H_
