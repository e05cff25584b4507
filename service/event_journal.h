// What happens to the blocks of this node, in order, for who keeps an index of them: routers.
//
// The store tells that something happened to a block (BlockWatcher); the thread of a StoreFollower
// looks what became of it, compares with what was told before (EventLog), and numbers the
// differences: these are the events. So an event is always a change, two of the same block are
// never out of order, and what is told is some ten milliseconds old. When too much happens at once
// the whole store is compared: readers see no gap.
//
// A block here is whole: every layer group of its namespace has it; its tier is the slowest over
// the groups of the fastest that has it, as Lookup says. Tails are blocks as well.
//
// Each tenant has a log of its own, with its own numbers: one sees nothing of another. A tenant
// that nobody ever read costs nothing. The last events of a log are kept for all readers together;
// a reader is a place in them. Who falls behind what is kept is given a snapshot instead, however
// slowly it reads, and the store waits for nobody. While one reads a snapshot more is kept, in
// proportion to the blocks, so that it reaches the present.
//
// A snapshot is read in steps while events go on: it says it is of sequence S, may have parts of
// what came later, and the events after S follow it. Events say what is so, not what to add: with
// all of them applied the reader has what the store has. A reader that asks for exact snapshots
// gets the whole at once, and each event once.
//
// Thread-safe. Decision 0047 says why it is so.
#ifndef KVMILL_SERVICE_EVENT_JOURNAL_H_
#define KVMILL_SERVICE_EVENT_JOURNAL_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "service/event_log.h"
#include "service/store_follower.h"
#include "storage/block_watcher.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

namespace kvmill {

// What the store told.
struct BlockNotice {
  enum class Kind : std::uint8_t { kStored, kMoved, kRemoved, kCleared };
  Kind kind = Kind::kMoved;
  BlockId id;
  BlockKey parent;
};

class EventJournal final : public BlockWatcher, private StoreAccount<BlockNotice> {
 public:
  struct Options {
    std::size_t queue_max = 16384;   // Ids: 144 bytes each, twice.
    std::size_t events_max = 65536;  // That are kept, of a tenant: about 144 bytes each.
    std::size_t readers_max = 256;
    // Of one tenant. So many of readers_max (up to half), and one of tenants_max, are kept for the
    // daemon's own.
    std::size_t tenant_readers_max = 64;
    std::string own_tenant = "default";
    std::size_t tenants_max = 16;  // That have readers, or had some lately.
    // A log is given up, with its memory, when nobody has read it for this long.
    std::chrono::milliseconds unread_max = std::chrono::minutes(5);
    // How long ids are gathered, so that a thread is not woken for each.
    std::chrono::milliseconds gather{10};
  };

  explicit EventJournal(Options options)
      : options_(std::move(options)),
        follower_({.queue_max = options_.queue_max,
                   .gather = options_.gather,
                   .idle_max = options_.unread_max},
                  *this) {}
  ~EventJournal() override { Stop(absl::OkStatus()); }

  // Of which this is the watcher. Once, before the first reader.
  void Start(const TieredStore& store);
  // Readers end with `why`, and the store is not used any more. Before the store is destroyed;
  // idempotent.
  void Stop(absl::Status why);

  // BlockWatcher. The calls do nothing as long as nobody reads; else they put the id into the
  // queue: a short lock, which nobody holds while working.
  void Watch(const BlockLook& look) override { look_ = &look; }
  void Stored(const BlockId& id, const BlockKey& parent) override;
  void Removed(const BlockId& id) override;
  void Moved(const BlockId& id) override;
  void Clearing(NamespaceId space) override;
  void Cleared(NamespaceId space) override;

  using From = EventsFrom;
  using Part = EventPart;
  using Reader = EventReader;
  using ReaderPtr = EventReaderPtr;
  // `wake` is called when there may be something after Next said that there is nothing: once, from
  // any thread, without a lock held; it may call Next. Also once when Stop or Revoke end the
  // reader, whatever Next said. RESOURCE_EXHAUSTED, naming the limit; ABORTED: something was
  // revoked since it was known who this is; what Stop said.
  absl::StatusOr<ReaderPtr> Open(const std::string& tenant, const From& from,
                                 std::function<void()> wake);
  // It is not woken any more, but a call of `wake` may be running.
  void Close(const ReaderPtr& reader);

  // Readers of these tenants that may be revoked end with ABORTED: whoever may still read comes
  // again.
  void Revoke(const std::set<std::string>& tenants);
  std::uint64_t revocations() const;

  // False: nothing now. One thread at a time for a reader. What Stop said, or ABORTED of Revoke, at
  // once, whatever it was not told yet.
  absl::StatusOr<bool> Next(Reader& reader, Part* part);
  // Next would say why the reader has ended.
  bool Ended(const Reader& reader) const;

  // For a reader that was told everything: all blocks, as of its position. False when it was not.
  bool SnapshotAtEnd(const Reader& reader, std::vector<BlockEvent>* blocks) const;

  struct Stats : EventLog::Counts {
    std::uint64_t readers = 0;
    std::uint64_t blocks = 0;   // In the mirrors.
    std::uint64_t bytes = 0;    // Of memory that mirrors and kept events take, about.
    std::uint64_t walks = 0;    // Of the whole store.
    std::uint64_t skipped = 0;  // Ids that found the queue full.
  };
  Stats stats() const;

  // Returns when everything that was told of before is in the logs. After the first Open.
  void WaitSettled() const { follower_.WaitSettled(); }

 private:
  void Push(BlockNotice::Kind kind, const BlockId& id, const BlockKey& parent);
  // Of the follower's thread.
  void Woken() override;  // Gives up what nobody reads.
  void Look(absl::Span<const BlockNotice> notices) override;
  void BeginWalk() override;
  void Found(const BlockId& id, const TieredStore::HeldBlock& block) override;
  void EndStep() override;
  bool SweepSome() override;
  void EndWalk() override { Wake(); }
  void LookAt(NamespaceId space, absl::Span<const BlockKey> keys,
              absl::Span<const BlockKey> parents);
  void LookAfterClear(NamespaceId space);
  void Wake();

  // Null: nobody reads that tenant.
  EventLogPtr LogOf(NamespaceId space) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckReaders(const std::string& tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<EventLogPtr> OpenLog(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const BlockLook* look_ = nullptr;  // Constant before the store is there.
  const TieredStore* store_ = nullptr;
  // There are logs. A stale no: told by the first walk.
  std::atomic<bool> active_{false};

  Mutex clearing_mu_;
  absl::flat_hash_map<NamespaceId, int> clearing_ ABSL_GUARDED_BY(clearing_mu_);

  mutable Mutex mu_;  // Before the follower's.
  bool started_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mu_);
  EventLog::Counts counts_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, EventLogPtr> logs_ ABSL_GUARDED_BY(mu_);
  // Where the numbers of a log that was given up go on, so that none has two meanings.
  std::map<std::string, std::uint64_t> retired_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<NamespaceId, std::string> tenants_ ABSL_GUARDED_BY(mu_);
  std::size_t readers_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t revocations_ ABSL_GUARDED_BY(mu_) = 0;

  // Of the follower's thread, in a walk.
  std::map<NamespaceId, std::vector<BlockKey>> step_;
  std::vector<EventLogPtr> unswept_;
  std::uint32_t swept_ = 0;  // Places of the last of them.

  StoreFollower<BlockNotice> follower_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENT_JOURNAL_H_
