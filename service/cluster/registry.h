// What the cluster needs of etcd: entries that live as long as their owner's lease, writes that
// compare first, lists with a revision, and watches that say where history ends.
//
// One history: every change of any key has a revision, a number that rises by at least one with
// each. A registry that was restored from a backup, or from nothing, has another history: its
// cluster id differs, or its revision is lower than one that was seen before. Every answer carries
// both (`Header`); looking at them is the caller's task.
//
// Rules, for callers and for those who implement it (service/etcd, tests/cluster):
// - Called on the loop only, and calls back there only, never within the call that started it.
// - A call runs its `done` exactly once, with an answer or with an error, no later than
//   `deadline_nanos` of the loop's clock and what the loop takes to get there. After Cancel, or
//   once the registry is destroyed, it runs no more and is destroyed.
// - `done` may start calls and cancel others. It must not destroy the registry.
// - A write that failed may have been done nevertheless, or be done a little later, up to its
//   deadline; whoever needs to know lists, or writes again and reads `current`. A write that
//   compares (Put, Delete) is never done twice. Calls are not ordered among one another: who needs
//   an order waits for `done`.
// - Errors: UNAVAILABLE (nobody answers, or has no leader), DEADLINE_EXCEEDED, UNAUTHENTICATED and
//   PERMISSION_DENIED (credentials), NOT_FOUND (the lease is gone: KeepAlive, Revoke, Put),
//   INVALID_ARGUMENT (a bound below is broken), RESOURCE_EXHAUSTED (the registry is full), and any
//   other code for what a registry may come up with. Messages name the server.
#ifndef KVMILL_SERVICE_CLUSTER_REGISTRY_H_
#define KVMILL_SERVICE_CLUSTER_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvmill {

class Registry {
 public:
  using CallId = std::uint64_t;   // Of a call or a watch. Never 0, never used again.
  using LeaseId = std::int64_t;   // 0: none.
  using Revision = std::int64_t;  // From 1.

  static constexpr std::size_t kKeyBytesMax = 512;  // Of keys and prefixes; at least 1.
  static constexpr std::size_t kValueBytesMax = 16 << 10;
  static constexpr std::int64_t kLeaseSecondsMin = 1;  // Leases last whole seconds.
  static constexpr std::int64_t kLeaseSecondsMax = 3600;

  struct Header {
    std::uint64_t cluster_id = 0;
    // At which the answer was true. That of KeepAlive and of `started` may be older than revisions
    // that others have answered with; that of Put, Delete and List never is.
    Revision revision = 0;
  };

  // Counts from when the registry granted or renewed it, which is after the caller asked: who
  // counts from when it asked never thinks a lease alive that is not. It ends no earlier than
  // `seconds` after, and maybe some seconds later (a new leader gives every lease its whole time
  // again). With it its entries are deleted, which watches see as any other deletion.
  struct Lease {
    Header header;
    LeaseId id = 0;
    std::int64_t seconds = 0;  // Granted, or left after a renewal; may differ from what was asked.
  };

  struct Entry {
    std::string key;
    std::string value;
    Revision mod_revision = 0;  // Of its last change; never another entry's at the same key.
    LeaseId lease = 0;
  };

  struct Written {
    Header header;
    bool done = false;  // False: the key's mod_revision was not what was expected.
    // Done: what was written, or nothing after a deletion. Not done: the entry that is there, or
    // nothing when there is none.
    std::optional<Entry> current;
  };

  struct Listing {
    Header header;
    std::vector<Entry> entries;  // In ascending order of key; one state, that at header.revision.
  };

  struct Event {
    bool deleted = false;  // `entry` then has the key and, as mod_revision, that of the deletion.
    Entry entry;
  };

  // Runs `started` once, before anything else but an end; then `events` any number of times; and
  // in the end one of `compacted` and `broken`, after which nothing runs. Cancelled: no end either.
  struct WatchCalls {
    // The watch is in place. A header.revision below from_revision - 1 says that this server has
    // not seen the history that the caller has: it lags behind, or has another one.
    std::function<void(const Header&)> started;
    // Every change of a key with the prefix, at or after from_revision, in order, none twice, none
    // left out; all events of one revision in the same call. Never empty. To go on after a break,
    // watch from `events.back().entry.mod_revision + 1`.
    std::function<void(std::vector<Event> events)> events;
    // The history from from_revision up to `revision` is no longer kept: list, and watch from the
    // list's revision + 1.
    std::function<void(Revision revision)> compacted;
    // Anything else: UNAVAILABLE, DEADLINE_EXCEEDED for a server that was silent for too long, ...
    std::function<void(const absl::Status&)> broken;
  };

  template <typename Answer>
  using Done = std::function<void(absl::StatusOr<Answer>)>;

  virtual ~Registry() = default;

  // A lease of `seconds`, kLeaseSecondsMin to kLeaseSecondsMax. When it fails, one may have been
  // granted that nobody knows of; it ends by itself.
  virtual CallId Grant(std::int64_t seconds, std::int64_t deadline_nanos, Done<Lease> done) = 0;
  // Renews it once, for its whole time. NOT_FOUND: it ended, and its entries are gone.
  virtual CallId KeepAlive(LeaseId lease, std::int64_t deadline_nanos, Done<Lease> done) = 0;
  // Ends it, and deletes its entries. NOT_FOUND when it has ended already.
  virtual CallId Revoke(LeaseId lease, std::int64_t deadline_nanos, Done<Header> done) = 0;

  struct PutRequest {
    std::string key;
    std::string value;
    LeaseId lease = 0;      // Must be one: an entry without would never go.
    Revision expected = 0;  // The entry's mod_revision; 0: there is no entry.
  };
  // NOT_FOUND: the lease ended; nothing was written.
  virtual CallId Put(PutRequest request, std::int64_t deadline_nanos, Done<Written> done) = 0;
  // `expected` as above, not 0.
  virtual CallId Delete(std::string key, Revision expected, std::int64_t deadline_nanos,
                        Done<Written> done) = 0;

  // Every entry whose key begins with `prefix`, as the registry as a whole has agreed on: never
  // the stale view of a server that lags behind.
  virtual CallId List(std::string prefix, std::int64_t deadline_nanos, Done<Listing> done) = 0;

  // Watches keys that begin with `prefix`. A watch has no deadline but never lives on with a server
  // that is gone: when nothing was heard of it for `silence_nanos` (at least a second), not even an
  // answer to the registry's own questions, the watch is broken. It is not resumed: the caller
  // decides when and from where.
  virtual CallId Watch(std::string prefix, Revision from_revision, std::int64_t silence_nanos,
                       WatchCalls calls) = 0;

  // Nothing of the call or watch runs from now on. Nothing when it has ended. A write may still be
  // done.
  virtual void Cancel(CallId call) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REGISTRY_H_
