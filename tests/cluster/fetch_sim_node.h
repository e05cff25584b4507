// One node of the simulated cluster: a store that survives its processes or does not, and a process
// with the real parts of membership, views and the fetch path on a simulated loop.
#ifndef KVMILL_TESTS_CLUSTER_FETCH_SIM_NODE_H_
#define KVMILL_TESTS_CLUSTER_FETCH_SIM_NODE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "service/cluster/announcer.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/handover.h"
#include "service/cluster/hot_runs.h"
#include "service/cluster/membership.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/pointer_table.h"
#include "service/cluster/remote_fetch.h"
#include "service/cluster/remote_lookup.h"
#include "service/cluster/replicator.h"
#include "tests/cluster/fetch_sim.h"
#include "tests/cluster/sim_faulty_registry.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sim_metered_peers.h"
#include "tests/cluster/sim_peers.h"

namespace kvmill {

// Block `index` of prompt `prompt`: what it is called and what it holds. Prompts 0 to 2 have their
// first 5 blocks in common, 3 and 4 their first 20: they part within a run.
BlockKey SimKey(std::size_t prompt, std::size_t index);
// How many prompts begin with the first block of this one.
std::size_t SimPromptsLike(std::size_t prompt);
std::string SimBytes(const BlockKey& key);
std::vector<BlockKey> SimKeys(std::size_t prompt, std::size_t count);

inline constexpr std::int64_t kSimPointerLife = 20 * kSimSecond;
inline constexpr std::uint64_t kSimBlockBytes = 1 << 20;  // As far as rates are concerned.
inline constexpr std::int64_t kSimLeaseSeconds = 4;
inline constexpr std::int64_t kSimGraceSeconds = 8;

// What nodes share: the world, and where they say what they saw.
struct FetchSimWorld {
  SimEvents& events;
  SimNetwork& network;
  SimHosts& hosts;
  SimEtcd& etcd;
  FetchFault fault = FetchFault::kNone;
  std::size_t copies = 0;  // R
  // Whether a node has a block.
  std::function<bool(const std::string& id, const BlockKey& key)> has;
  bool peace = false;  // Lookups find out nothing but the truth.
  std::function<void(const std::string&)> fail;
  // The node of that machine has another view.
  std::function<void(std::size_t machine, const ClusterView* old, const ClusterView& view)> viewed;
  FetchSimReport* report = nullptr;
};

class FetchSimNode : public SimPeerService {
 public:
  FetchSimNode(FetchSimWorld& world, std::size_t machine);
  ~FetchSimNode() override;

  const Member& member() const { return member_; }
  bool running() const { return process_ != nullptr; }
  bool stopped() const { return running() && process_->loop.stopped(); }
  // Hands over, or has: this process will not serve again.
  bool leaves() const { return running() && process_->handover_deadline != 0; }

  void Start(bool same_incarnation);
  void Kill(bool lose_store);
  void Stop() { process_->loop.Stop(); }
  void Continue() { process_->loop.Continue(); }
  // Drains, or serves again.
  void SetState(MemberState state);
  // Drains and hands over what it has; `done` runs in this process, not after `limit`.
  void HandOver(std::int64_t limit, std::function<void(const Handover::Report&)> done);

  // What it sees of the cluster: null before it saw anything.
  const ClusterView* view() const { return running() ? process_->view.get() : nullptr; }
  const MembershipSnapshot& snapshot() const { return *process_->membership.snapshot(); }

  // The engine's: stores the first `count` blocks of a prompt, or drops the last block of a run.
  void Store(std::size_t prompt, std::size_t count);
  void EvictOne(std::size_t prompt, std::size_t run);
  // How many of the first blocks of a run are here.
  std::size_t Leading(std::size_t prompt, std::size_t run) const;
  // All that is here of a run, whichever prompts its blocks belong to.
  RunSketch SketchOf(std::size_t prompt, std::size_t run) const;
  // Who has some of a run, as this node was told.
  std::vector<PointerTable::Holder> Told(std::size_t prompt, std::size_t run) const;
  bool Has(const BlockKey& key) const;

  // Looks for the first `count` blocks of a prompt, pulls those that are elsewhere, and says which
  // are here then.
  void Read(std::size_t prompt, std::size_t count, const std::string& hint, std::int64_t timeout,
            std::function<void(std::vector<bool> here)> done);

  // Empty, or what is not as it should be now: operations past their time; and, when `at_rest`,
  // anything that still goes on or was never told.
  std::string Check(bool at_rest) const;

  // Peers call.
  std::vector<RunAnswer> OnLocate(const Member& from, const Fingerprint& fingerprint,
                                  const std::vector<RunQuery>& queries) override;
  std::vector<Block> OnPull(const Fingerprint& fingerprint,
                            const std::vector<BlockKey>& keys) override;
  void OnAnnounce(const Member& from, const std::vector<Announcement>& announcements) override;
  std::vector<HeldRun> OnListRuns(const std::vector<RunList>& lists) override;
  std::vector<std::uint8_t> OnHandOver(const Member& from,
                                       const std::vector<Announcement>& announcements) override;
  std::uint64_t OnCompare(const Member& from, const Digests& digests) override;
  absl::Status Keep(const Fingerprint& fingerprint, const BlockKey& key,
                    const Block& block) override;

  const Replicator& replicator() const { return process_->replicator; }
  // Ranges of digests that differed between this process and its homes.
  std::uint64_t differed() const { return process_->announcer.differed(); }
  std::uint64_t calls_started() const { return process_->lookup.calls_started(); }
  std::uint64_t hedges_started() const { return process_->lookup.hedges_started(); }

 private:
  struct Reading {
    std::int64_t deadline = 0;
    std::vector<std::vector<BlockKey>> runs;
    std::size_t open = 0;
    std::function<void()> done;
  };
  struct Process {
    Process(FetchSimNode* node, const Member& self);
    ~Process();
    SimLoop loop;
    SimPeers peers;
    PeerHealth health;
    PointerTable pointers;
    Announcer announcer;
    RemoteLookup lookup;
    RemoteFetch fetch;
    HotRuns hot;
    SimMeteredPeers metered;
    Replicator replicator;
    Handover handover;
    std::int64_t handover_deadline = 0;
    ViewKeeper keeper;
    SimFaultyRegistry registry;
    Membership membership;
    std::shared_ptr<const ClusterView> view;
    std::uint64_t members_version = 0;  // Of the snapshot that the last view was asked for.
    std::map<std::uint64_t, Reading> readings;
    std::uint64_t next_reading = 1;
  };

  // By place and hash, with the prompt that they are kept under.
  std::vector<std::pair<std::size_t, BlockKey>> BlocksOf(std::size_t prompt, std::size_t run) const;
  std::string& Slot(const BlockKey& key);
  void OnMembers(const MembershipSnapshot& snapshot);
  void OnView(const std::shared_ptr<const ClusterView>& view);
  void Announce(std::size_t prompt, std::size_t run);
  void Looked(std::uint64_t id, const std::vector<RemoteLookup::Run>& found);
  void Ended(std::uint64_t id);

  FetchSimWorld& world_;
  const std::size_t machine_;
  Member member_;
  std::uint64_t lives_ = 0;
  std::map<std::size_t, std::vector<std::string>> store_;  // By prompt; empty: not here.
  std::unique_ptr<Process> process_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_FETCH_SIM_NODE_H_
