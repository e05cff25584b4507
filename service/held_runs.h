// What this node holds, by run, as its store has it: kept up to date in the background.
//
// The store tells of blocks that come and go (StoreObserver); the thread of a StoreFollower looks
// what became of them, enters it into a HeldTable and tells the listener which runs are others now.
// So what this says is some ten milliseconds old: who acts on it must be able to live with a miss.
// While the store is walked, at the start and when too much happened at once, old sketches stay.
//
// A block is held when all layer groups of its namespace are, in whatever tier. Only namespaces of
// tenants that are shared count: others' blocks are nobody's business in the cluster.
//
// Thread-safe. Decision 0028 says why it is so.
#ifndef KVMILL_SERVICE_HELD_RUNS_H_
#define KVMILL_SERVICE_HELD_RUNS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "service/cluster/held_table.h"
#include "service/cluster/peers.h"
#include "service/store_follower.h"
#include "service/tenants.h"
#include "storage/core/mutex.h"
#include "storage/store_observer.h"
#include "storage/tiered_store.h"

namespace kvmill {

class HeldRuns final : public StoreObserver, private StoreAccount<BlockId> {
 public:
  struct Options {
    SharedTenants tenants = {};
    std::size_t queue_max = 16384;  // Ids: 72 bytes each, twice.
    // How long ids are gathered, so that a thread is not woken for each.
    std::chrono::milliseconds gather{10};
  };
  // Runs that changed, each once; a count of 0: nothing is left. And which blocks left, those that
  // came back since included. One call after the other, on this
  // object's thread, with no lock held. The first calls tell of everything that there is.
  using Listener =
      std::function<void(absl::Span<const Announcement>, absl::Span<const HeldTable::Left>)>;

  explicit HeldRuns(Options options)
      : options_(std::move(options)),
        follower_({.queue_max = options_.queue_max, .gather = options_.gather}, *this) {}
  ~HeldRuns() override { Stop(); }

  // Begins with a walk of the store, of which this is the observer (or nothing is noticed later).
  // Once.
  void Start(const TieredStore& store, Listener listener);
  // The store is not used any more, and nobody is told. Before the store is destroyed; idempotent.
  void Stop();

  // Only puts the id into the queue: a short lock, which nobody holds while working.
  void Changed(const BlockId& id) override { follower_.Push(id); }

  // What is here of the anchor's run; a count of 0: nothing that others could find.
  RunSketch SketchOf(std::uint64_t anchor_hash) const;

  // The anchor of a block that is here; empty when it is not, or its run is not known.
  std::optional<HeldTable::Place> PlaceOf(const Fingerprint& fingerprint,
                                          const BlockKey& key) const;

  // The blocks of a run that are here.
  struct Run {
    Fingerprint fingerprint{};
    struct Block {
      BlockKey key;
      std::uint8_t place = 0;
      std::uint64_t bytes = 0;  // Of the pages of all its groups.
    };
    // By place: the first one is the anchor, unless that is gone or lies before. Sequences that
    // part within the run have several blocks at a place.
    std::vector<Block> blocks;
    bool more = false;  // There are others behind them.
  };
  // At most `blocks_max` of them, behind the block of that place and hash: by place, and by hash
  // within one. Asks the store, so not after Stop.
  Run RunOf(std::uint64_t anchor_hash, std::size_t blocks_max, std::uint8_t after_place = 0,
            std::uint64_t after_hash = 0) const;

  // Runs that were used more come before those that were used less: what counts is the block of
  // each that was used most. Asks the store, so not after Stop.
  void SortHottestFirst(std::vector<Announcement>* runs) const;

  struct Stats {
    std::uint64_t blocks = 0;   // Of which something is known.
    std::uint64_t waiting = 0;  // Of those: the anchor is not.
    std::uint64_t runs = 0;
    std::uint64_t bytes = 0;    // Of memory; without the queue.
    std::uint64_t walks = 0;    // Of the store, the first one included.
    std::uint64_t dropped = 0;  // Ids that found the queue full.
  };
  Stats stats() const;

  // Returns when everything that was told of before is entered, and the listener has heard of it.
  // Whole blocks of the store that are in no run: tails, blocks whose place nobody said, and those
  // of tenants that are not shared. Walks the store, on this thread; those found within `limit`.
  std::uint64_t CountOthers(std::chrono::nanoseconds limit) const;
  // Between Start and Stop. CatchUp does not wait for what comes meanwhile, and is false when it
  // was not within `limit`, as while a large store is walked.
  void WaitSettled() const { follower_.WaitSettled(); }
  bool CatchUp(std::chrono::nanoseconds limit) const { return follower_.CatchUp(limit); }

 private:
  struct Space {
    bool counts = false;
    Fingerprint fingerprint{};
  };

  void Look(absl::Span<const BlockId> ids) override;
  void BeginWalk() override;
  void Found(const BlockId& id, const TieredStore::HeldBlock& block) override { Enter(id, block); }
  void EndStep() override { Tell(); }
  bool SweepSome() override;

  void LookAt(absl::Span<const BlockId> ids);
  void DropMissed(const std::vector<HeldTable::Block>& missed);
  void Enter(const BlockId& id, const TieredStore::HeldBlock& block);
  void Tell();
  const Space& SpaceOf(NamespaceId id);

  const Options options_;
  const TieredStore* store_ = nullptr;
  Listener listener_;

  mutable Mutex table_mu_;
  HeldTable table_ ABSL_GUARDED_BY(table_mu_);

  // Of the thread.
  std::size_t swept_ = 0;  // Where the sweep of this walk is.
  absl::flat_hash_map<NamespaceId, Space> spaces_;

  StoreFollower<BlockId> follower_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_HELD_RUNS_H_
