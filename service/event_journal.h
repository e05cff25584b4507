// What happens to the blocks of this node, in order, for who keeps an index of them: routers.
//
// The store tells that something happened to a block (BlockWatcher); the ids wait in a bounded
// queue for a thread of this object, which gathers them for a moment, looks in the store what
// became of them, compares with what it told before (BlockMirror), and numbers the differences:
// these are the events. So an event is always a change, two of the same block are never out of
// order, and what is told is some ten milliseconds old. When the queue is full ids are dropped and
// the whole store is compared: readers see no gap.
//
// A block here is whole: every layer group of its namespace has it; its tier is the slowest over
// the groups of the fastest that has it, as Lookup says. Tails are blocks as well.
//
// Each tenant has a stream of its own, with its own numbers: one sees nothing of another. A tenant
// that nobody ever read costs nothing. The last events of a stream are kept for all readers
// together; a reader is a place in them. Who falls behind what is kept is given a snapshot instead,
// however slowly it reads, and the store waits for nobody. While one reads a snapshot more is kept,
// in proportion to the blocks, so that it reaches the present.
//
// A snapshot is read in steps while events go on: it says it is of sequence S, may have parts of
// what came later, and the events after S follow it. Events say what is so, not what to add: with
// all of them applied the reader has what the store has. A reader that asks for exact snapshots
// gets the whole at once, and each event once.
//
// Thread-safe. Decision 0047 says why it is so.
#ifndef KVMILL_SERVICE_EVENT_JOURNAL_H_
#define KVMILL_SERVICE_EVENT_JOURNAL_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "service/block_mirror.h"
#include "storage/block_watcher.h"
#include "storage/core/mutex.h"
#include "storage/tiered_store.h"

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

class EventJournal final : public BlockWatcher {
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
    // A stream is given up, with its memory, when nobody has read it for this long.
    std::chrono::milliseconds unread_max = std::chrono::minutes(5);
    // How long ids are gathered, so that a thread is not woken for each.
    std::chrono::milliseconds gather{10};
  };

  explicit EventJournal(Options options) : options_(options) {}
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

  // Where a reader begins.
  struct From {
    // After this event, if those that follow are kept; else with a snapshot. None: with what
    // happens from now on.
    std::optional<std::uint64_t> sequence;
    bool snapshot = false;  // With one in any case.
    bool exact = false;     // Snapshots are one part, kSnapshotBegin, as of its sequence.
    std::optional<NamespaceId> only;
    // Of a reader that Revoke may end: what revocations() was before it was known who it is.
    std::optional<std::uint64_t> revocations;
  };
  class Reader;
  using ReaderPtr = std::shared_ptr<Reader>;  // The journal's until Close, and the caller's.
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

  // What a reader is told next.
  struct Part {
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
  // False: nothing now. One thread at a time for a reader. What Stop said, or ABORTED of Revoke, at
  // once, whatever it was not told yet.
  absl::StatusOr<bool> Next(Reader& reader, Part* part);
  // Next would say why the reader has ended.
  bool Ended(const Reader& reader) const;

  // For a reader that was told everything: all blocks, as of its position. False when it was not.
  bool SnapshotAtEnd(const Reader& reader, std::vector<BlockEvent>* blocks) const;

  struct Stats {
    std::array<std::uint64_t, kBlockEventKinds> events{};  // By kind.
    std::uint64_t dropped = 0;  // Events that a reader was too slow for, summed over readers.
    std::uint64_t readers = 0;
    std::uint64_t blocks = 0;   // In the mirrors.
    std::uint64_t bytes = 0;    // Of memory that mirrors and kept events take, about.
    std::uint64_t walks = 0;    // Of the whole store.
    std::uint64_t skipped = 0;  // Ids that found the queue full.
  };
  Stats stats() const;

  // Returns when everything that was told of before is in the streams. After the first Open.
  void WaitSettled() const;

 private:
  struct Notice {
    enum class Kind : std::uint8_t { kStored, kMoved, kRemoved, kCleared };
    Kind kind = Kind::kMoved;
    BlockId id;
    BlockKey parent;
  };
  // A tenant's.
  struct Stream {
    bool ready = false;  // The mirror has what the store had at the first walk.
    BlockMirror mirror;
    std::deque<BlockEvent> events;
    std::uint64_t last = 0;  // Number of the newest; 0: there was none.
    std::vector<ReaderPtr> readers;
    std::size_t catching_up = 0;  // Readers that are in a snapshot, or far behind one.
    std::chrono::steady_clock::time_point unread_since;  // While it has no readers.

    std::uint64_t kept_after() const { return last - events.size(); }
  };
  using StreamPtr = std::shared_ptr<Stream>;  // The table's, and its readers'.

  void Push(Notice::Kind kind, const BlockId& id, const BlockKey& parent);
  void Work();
  bool WaitForWork();
  void WalkStore();
  void RetireUnread();
  void Drain();
  void Handle(absl::Span<const Notice> notices);
  void Look(NamespaceId space, absl::Span<const BlockKey> keys, absl::Span<const BlockKey> parents);
  void HandleCleared(NamespaceId space);
  void Wake();
  bool stopping() const;
  // Null: nobody reads that tenant.
  StreamPtr StreamOf(NamespaceId space) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Apply(Stream& stream, NamespaceId space, const BlockKey& key, const BlockKey& parent,
             const BlockState& block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Add(Stream& stream, BlockEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckReaders(const std::string& tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<StreamPtr> OpenStream(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool NextEvents(Reader& reader, Part* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NextOfSnapshot(Reader& reader, Part* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void SetCatchingUp(Reader& reader, bool is_so);

  const Options options_;
  const BlockLook* look_ = nullptr;  // Constant before the store is there.
  const TieredStore* store_ = nullptr;
  // There are streams. A stale no: told by the first walk.
  std::atomic<bool> active_{false};

  // Lock order: mu_, then queue_mu_.
  mutable Mutex queue_mu_;
  CondVar work_;
  mutable CondVar settled_;
  std::vector<Notice> queue_ ABSL_GUARDED_BY(queue_mu_);
  absl::flat_hash_map<NamespaceId, int> clearing_ ABSL_GUARDED_BY(queue_mu_);
  bool walk_due_ ABSL_GUARDED_BY(queue_mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(queue_mu_) = false;
  bool idle_ ABSL_GUARDED_BY(queue_mu_) = false;
  std::uint64_t walks_ ABSL_GUARDED_BY(queue_mu_) = 0;
  std::uint64_t skipped_ ABSL_GUARDED_BY(queue_mu_) = 0;

  mutable Mutex mu_;
  std::thread thread_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, StreamPtr> streams_ ABSL_GUARDED_BY(mu_);
  // Where the numbers of a stream that was given up go on, so that none has two meanings.
  std::map<std::string, std::uint64_t> retired_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<NamespaceId, std::string> tenants_ ABSL_GUARDED_BY(mu_);
  std::array<std::uint64_t, kBlockEventKinds> counts_ ABSL_GUARDED_BY(mu_){};
  std::uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
  std::size_t readers_ ABSL_GUARDED_BY(mu_) = 0;
  std::uint64_t revocations_ ABSL_GUARDED_BY(mu_) = 0;
};

// A place in a tenant's stream. Internal to EventJournal, which guards it.
class EventJournal::Reader {
 private:
  friend class EventJournal;
  enum class State : std::uint8_t { kNew, kSnapshotBegin, kSnapshot, kLive };

  From from;
  std::function<void()> wake;
  StreamPtr stream;
  State state = State::kNew;
  bool waiting = false;  // For a wake.
  bool closed = false;
  bool revoked = false;
  bool catching_up = false;      // Counted in the stream.
  std::uint64_t position = 0;    // The last event it was told, or its snapshot is of.
  std::uint32_t next_place = 0;  // Of the mirror, in a snapshot.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENT_JOURNAL_H_
