// Copies to this node what it should keep as a home: in the background, at a bounded rate, from
// whoever was announced to have it.
//
// A cluster with R copies has every run of blocks on R + 1 nodes: on the first R homes of its
// anchor, and on one more: its holder, or when all who hold it are among those homes, the home of
// rank R. Each home decides that alone, from what it was told (PointerTable), so nothing has to be
// remembered or agreed on: after a restart announcements come again, and when a node is lost the
// next view shows to the homes of the others what they lack. What one home decides on stale news is
// a copy too many, or one that comes with the next announcement.
//
// It copies, too, whatever R is: runs that a node which leaves hands over, when no node that stays
// has them; and runs that many ask for (HotRuns).
//
// Each node that leaves has a queue of its own, and is served in turn with the others: one that is
// slow, or does not answer, keeps waiting only for itself.
//
// Whether another node has blocks that are missing here is told by sketches (RunSketch). Where they
// cannot tell, because sequences part within the run, and where they say yes, the other's blocks
// are listed and compared one by one. That nothing was missing then is remembered for a while,
// until blocks of the run leave this node. A run that was long to list rests in proportion before
// its next list: many prompts that begin alike are one run, and it changes with each of them. Of a
// run that many ask for only the beginning is copied,
// where all sequences are one: the rest is of one prompt each.
//
// A block that was evicted here, that a quota has no room for, or whose tenant is not shared here,
// is left alone for a while, or a full node would copy all day what it has no room for. Nothing
// here verifies blocks: Peers::Pull does. Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_REPLICATOR_H_
#define KVMILL_SERVICE_CLUSTER_REPLICATOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"
#include "service/cluster/pointer_table.h"
#include "service/cluster/rate_limit.h"
#include "service/cluster/recent.h"

namespace kvmill {

class Replicator {
 public:
  static constexpr std::size_t kJobsMax = 4;           // Peers that are copied from at once.
  static constexpr std::size_t kQueueMax = 1 << 14;    // Runs that wait; more come with a sweep.
  static constexpr std::size_t kLeaverMin = 1024;      // For each that leaves, however many wait.
  static constexpr std::size_t kSweepSlice = 4096;     // Anchors that a tick looks at.
  static constexpr std::size_t kTriesMax = 8;          // Of a run, before it waits for a sweep.
  static constexpr std::size_t kRestingMax = 1 << 16;  // Blocks that rest, and comparisons.

  struct Options {
    std::string self_id;
    std::size_t copies = 0;  // R: at most kRanks - 2.
    RateLimit::Options rate;
    std::uint64_t call_bytes = 16 << 20;  // Of one Pull, unless a single block is more.
    std::int64_t tick_nanos = 50'000'000;
    // All that was announced is looked at again so often.
    std::int64_t sweep_nanos = 60'000'000'000;
    std::int64_t list_nanos = 1'000'000'000;
    std::int64_t pull_nanos = 10'000'000'000;
    std::int64_t rest_nanos = 600'000'000'000;  // After an eviction, and of a comparison.
    // What is here of a run.
    std::function<RunSketch(std::uint64_t anchor_hash)> held;
    // Bytes of a block that is here, whole, as they travelled; 0: it is not.
    std::function<std::uint64_t(const Fingerprint&, const BlockKey&)> bytes;
  };
  struct Stats {
    std::uint64_t copied_blocks = 0, copied_bytes = 0;  // That are here, verified.
    std::uint64_t failed_blocks = 0;                    // That were asked for and did not come.
  };

  // `pointers` has what was announced to this node, by itself, too.
  Replicator(Loop& loop, Peers& peers, PeerHealth& health, const PointerTable& pointers,
             Options options);
  ~Replicator();
  Replicator(const Replicator&) = delete;
  Replicator& operator=(const Replicator&) = delete;

  // Looks at all that was announced.
  void SetView(std::shared_ptr<const ClusterView> view);
  // Who leaves, as members say it, which is sooner than there is a view. What they have does not
  // count.
  void SetMembers(const std::vector<Member>& members);
  // This node leaves: it promises nothing any more.
  void Leave() { leaves_ = true; }
  // `pointers` has heard this.
  void Announced(const std::vector<Announcement>& announcements);
  // Many ask for a run.
  void Hot(std::uint64_t anchor_hash);
  // From now on.
  void SetRate(std::uint64_t bytes_per_second);
  // A block of a run has left this node.
  void Evicted(std::uint64_t anchor_hash, std::uint64_t key_hash);
  // Peers::HandOver, for the home: `pointers` has heard it.
  std::vector<std::uint8_t> HandedOver(const Member& from,
                                       const std::vector<Announcement>& announcements);

  const Stats& stats() const { return stats_; }
  std::size_t queued() const { return items_.size(); }  // Runs that wait or are being copied.
  std::size_t jobs() const { return jobs_.size(); }
  const RateLimit& rate() const { return limit_; }

 private:
  // Why a run is copied.
  enum class Reason : std::uint8_t { kHome, kHot, kHandedOver };
  using Leaver = std::uint32_t;  // A node that hands over, by a number; 0: none.
  struct Item {
    Reason reason = Reason::kHome;
    std::uint8_t tries = 0;
    bool moved = false;  // To the queue of another leaver than the first one.
    Leaver leaver = 0;   // Who hands it over.
    // The list that was begun, or the last one: whose it is, what they said to have when it began,
    // where it goes on and what came of it.
    std::uint64_t source = 0, said = 0;
    std::uint8_t after_place = 0;
    std::uint64_t after_hash = 0;  // 0: from the beginning.
    std::uint64_t listed = 0;      // Blocks.
    bool missed = false;           // Some did not come;
    bool rests = false;            //   some rest.
    std::uint64_t serial = 0;      // Of its place in a queue; 0: it is in a job.
  };
  // Runs that wait. A place whose serial is not the item's is stale, and passed over.
  struct Place {
    std::uint64_t anchor_hash = 0;
    std::uint64_t serial = 0;
  };
  using Queue = std::deque<Place>;
  struct Source {
    bool later = false;  // There is one, and not now.
    std::optional<MemberIndex> member;
  };
  using JobId = std::uint64_t;
  struct Job {
    Member source;
    std::vector<RunList> lists;         // What was asked for.
    std::vector<std::uint64_t> hashes;  // Of it, what is not done.
    std::vector<HeldRun> runs;          // As listed, the next one last.
    std::size_t next = 0;               // Block of that run.
    std::vector<BlockKey> pulled;       // By the call that is out.
    std::uint64_t charged = 0;
    Peers::CallId call = 0;
    bool waits = false;  // For the rate.
  };

  void Tick();
  void Sweep();
  bool Add(std::uint64_t anchor_hash, Reason reason, Leaver leaver = 0);
  bool Keeps(std::uint64_t anchor_hash, const std::vector<PointerTable::Holder>& holders) const;
  // Whether the holder has blocks that are missing in `held`, what is here; or may have, and it was
  // not compared lately.
  bool Lacks(std::uint64_t anchor_hash, const RunSketch& held, const PointerTable::Holder& holder,
             Reason reason) const;
  // It rests: not to be copied now.
  bool Rests(std::uint64_t key_hash) const;
  Source SourceOf(std::uint64_t anchor_hash, const Item& item) const;
  // Its last list was long, and lately.
  bool ListRests(std::uint64_t anchor_hash, const Item& item) const;
  bool Busy(const Member& member) const;
  bool Stays(const PointerTable::Holder& holder) const;
  const PointerTable::Holder* HolderIn(const std::vector<PointerTable::Holder>& holders,
                                       const Member& member) const;

  Leaver LeaverOf(const Member& member);
  // Gives a run its place, at the end of its queue.
  void Push(std::uint64_t anchor_hash);
  void StartJobs();
  // Whether one was.
  bool StartJobs(Queue* queue, std::size_t pops, bool ordered);
  void StartJob(const Member& source, std::vector<std::uint64_t> hashes);
  // All of a run that its source listed was looked at. False: the list has no end, of a source that
  // did not say to have that many.
  bool Looked(Job* job);
  // So many first places of the run that was listed are copied.
  std::size_t PlacesOf(const Job& job, const HeldRun& run) const;
  void Listed(JobId id, const absl::StatusOr<std::vector<HeldRun>>& runs);
  void Advance(JobId id);
  void Pulled(JobId id, const absl::StatusOr<std::vector<absl::Status>>& statuses);
  void Done(Job* job, std::uint64_t anchor_hash);
  // Ends a job; what it had left is tried again.
  void EndJob(JobId id, std::optional<PeerHealth::Fault> fault);
  void WaitForRate();

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  const PointerTable& pointers_;
  const Options options_;
  RateLimit limit_;
  std::shared_ptr<const ClusterView> view_;
  std::map<std::string, std::string> leaving_;  // Incarnations of nodes that leave, by id.
  bool leaves_ = false;
  absl::flat_hash_map<std::uint64_t, Item> items_;
  // Of items_, those that are in no job: what is handed over goes first, in the order in which the
  // node that leaves wants it.
  std::map<Leaver, Queue> urgent_;
  Queue queue_;
  std::map<std::string, Leaver> leavers_;  // By node id; those in the view.
  Leaver next_leaver_ = 1;
  Leaver last_served_ = 0;
  std::uint64_t next_serial_ = 1;
  JobId next_job_ = 1;
  std::map<JobId, Job> jobs_;
  std::size_t sweep_ = 0;     // Anchors below this place are still to be looked at.
  bool sweep_again_ = false;  // Some did not fit into the queue.
  std::int64_t next_sweep_ = 0;
  // When blocks left: by their hash, and of runs by their anchor's.
  Recent<std::int64_t> resting_{kRestingMax}, evicted_{kRestingMax};
  Recent<std::int64_t> list_rests_{kRestingMax};  // Until when: runs, by their anchor's hash.
  struct Comparison {
    std::int64_t at = 0;
    bool whole = false;  // All is here; otherwise some of it rests.
  };
  Recent<Comparison> compared_{kRestingMax};  // By CompareWord.
  std::int64_t full_until_ = 0;               // There was no room.
  std::uint64_t block_bytes_ = 0;             // Of the last block that came.
  Stats stats_;
  Loop::TimerId timer_ = 0;
  Loop::TimerId rate_timer_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REPLICATOR_H_
