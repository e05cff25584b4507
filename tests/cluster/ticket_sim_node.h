// One node of the simulated tickets: a process with both state machines on a simulated loop, its
// store, and its calls to other processes.
#ifndef KVMILL_TESTS_CLUSTER_TICKET_SIM_NODE_H_
#define KVMILL_TESTS_CLUSTER_TICKET_SIM_NODE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "service/cluster/peer_health.h"
#include "service/cluster/ticket_redeem.h"
#include "service/cluster/ticket_table.h"
#include "tests/cluster/sim_loop.h"
#include "tests/cluster/sim_network.h"
#include "tests/cluster/ticket_sim.h"

namespace kvmill {

class TicketSimNode;

// A page as it is stored and travels.
struct SimPage {
  std::string bytes;
  std::uint64_t checksum = 0;
};
using SimPages = std::vector<SimPage>;  // Of one block, by layer.
std::uint64_t SimDigest(const SimPages& pages);

// What nodes share: the world, and where they say what they saw.
struct TicketSimWorld {
  SimEvents& events;
  SimNetwork& network;
  std::vector<std::unique_ptr<TicketSimNode>> nodes;
  TicketFault fault = TicketFault::kNone;
  std::function<void(const std::string&)> fail;
  // Digests of what each machine's engines sealed, by key.
  std::map<std::string, std::set<std::uint64_t>> sealed;
  std::uint64_t encodings = 0;  // No two assemblies encode alike.
  double duplicates = 0;        // Share of messages that come twice.
  double full = 0;              // Share of copies for which there is no memory.
  TicketSimReport* report = nullptr;
};

// The store of one process: blocks that are assembled, sealed, held and copied.
class TicketSimStore : public TicketHolds, public TicketCopies {
 public:
  TicketSimStore(TicketSimWorld& world, Loop& loop, std::string node)
      : world_(world), loop_(loop), node_(std::move(node)) {}

  // --- Engines ---
  // False when it is there or being assembled already.
  bool BeginAssembly(const BlockKey& key, std::size_t layer_count);
  // These do nothing when the block is not being assembled.
  void FinishLayer(const BlockKey& key, std::size_t layer);
  void Seal(const BlockKey& key);
  void AbandonAssembly(const BlockKey& key);
  // A sealed block leaves, unless it is held.
  void Evict(const BlockKey& key);
  const SimPages* Sealed(const BlockKey& key) const;

  // --- TicketHolds ---
  absl::StatusOr<HoldId> Hold(const Fingerprint& fingerprint,
                              const std::vector<TicketBlock>& blocks, Events* events) override;
  void Release(HoldId hold) override;
  SimPage ReadPage(HoldId hold, std::uint32_t block, std::size_t layer);
  // What a ticket is due its hold, to check that it is kept.
  void Promise(const TicketName& name, std::int64_t ttl_nanos, std::int64_t life_nanos);
  void Asked(const TicketName& name);
  void Pulled(HoldId hold, std::uint32_t block, const LayerSet& layers);
  bool Holds(const TicketName& name) const { return promised_.contains(name); }
  // How many tickets have ended by their deadline.
  std::function<std::uint64_t()> expired;
  // What is held for longer than it may; empty: nothing.
  std::string Overdue() const;

  // --- TicketCopies ---
  CopyId Begin(const Fingerprint& fingerprint, const TicketBlock& block, Done done) override;
  void Commit(CopyId copy, std::uint64_t digest, Done done) override;
  void Abandon(CopyId copy) override;
  // A page came. False: it is not what was asked for.
  bool Land(CopyId copy, std::size_t layer, const SimPage& page);
  void PullBegins(CopyId copy) { ++pulls_[copy]; }
  void PullEnds(CopyId copy) {
    if (--pulls_[copy] == 0) pulls_.erase(copy);
  }

  std::size_t holds() const { return held_.size(); }
  std::size_t copies() const { return copies_.size(); }

 private:
  struct Assembly {
    std::size_t layer_count = 0;
    LayerSet finished;
    bool sealed = false;
    SimPages pages;
  };
  struct Held {
    std::vector<TicketBlock> blocks;
    std::vector<std::shared_ptr<Assembly>> bound;  // Null: none has begun.
    std::vector<bool> over;                        // Sealed or given up.
    std::vector<LayerSet> pulled;
    Events* events = nullptr;
    bool asked = false, released = false;
    std::int64_t made_at = 0, progress_at = 0;
    std::int64_t ttl_nanos = 0, life_nanos = 0;
    TicketName name{};
  };
  struct Copy {
    TicketBlock block;
    SimPages pages;
    LayerSet here;
    bool begun = false;
  };

  // Runs `tell` on the loop for every hold that is bound to the assembly; the last word when `end`.
  void TellHolds(const std::shared_ptr<Assembly>& assembly, bool end,
                 const std::function<void(HoldId, std::uint32_t)>& tell);
  void Tell(HoldId hold, std::uint32_t block, const std::function<void(Held&)>& tell);
  void TellFinished(HoldId hold, std::uint32_t block, const LayerSet& layers, std::uint64_t digest);
  void TellSealed(HoldId hold, std::uint32_t block, std::uint64_t digest);
  bool IsHeld(const std::string& key) const;

  TicketSimWorld& world_;
  Loop& loop_;
  const std::string node_;
  std::map<std::string, std::shared_ptr<Assembly>> assemblies_;
  std::map<std::string, SimPages> sealed_;
  HoldId next_hold_ = 1;
  std::map<HoldId, Held> held_;
  std::map<TicketName, HoldId> promised_;
  std::uint64_t expired_ = 0;
  CopyId next_copy_ = 1;
  std::map<CopyId, Copy> copies_;
  std::map<CopyId, Done> committing_;
  std::map<CopyId, int> pulls_;
};

// The calls of one process. Messages may be lost, late, or come twice.
class TicketSimPeers : public TicketPeers {
 public:
  TicketSimPeers(TicketSimWorld& world, Loop& loop, TicketSimStore& store, std::size_t machine,
                 TicketTable::Consumer self)
      : world_(world), loop_(loop), store_(store), machine_(machine), self_(std::move(self)) {}
  ~TicketSimPeers() override;

  CallId Redeem(const Member& producer, const TicketName& name, std::uint64_t seen,
                std::int64_t wait_nanos, std::int64_t deadline_nanos,
                Done<TicketNews> done) override;
  CallId Pull(const Member& producer, const TicketName& name, std::vector<Piece> pieces,
              std::int64_t deadline_nanos, Done<std::vector<Landed>> done) override;
  CallId Acknowledge(const Member& producer, const TicketName& name, std::int64_t deadline_nanos,
                     std::function<void(absl::Status)> done) override;
  void Cancel(CallId call) override;

  std::size_t open() const { return calls_.size(); }

 private:
  using Fail = std::function<void(const absl::Status&)>;
  // Runs at the caller when the call still is open.
  using Reply = std::function<void(std::function<void()>)>;
  struct Call {
    Loop::TimerId timer = 0;
    std::function<void()> over;  // Runs when the call ends in whatever way.
  };

  CallId Start(const Member& producer, std::int64_t deadline_nanos, Fail fail,
               std::function<void()> over, std::function<void(TicketSimNode&, const Reply&)> serve);
  void End(CallId id, const std::function<void()>& run);
  void Send(std::size_t from, std::size_t to, const std::function<void()>& arrive);

  TicketSimWorld& world_;
  Loop& loop_;
  TicketSimStore& store_;
  const std::size_t machine_;
  const TicketTable::Consumer self_;
  CallId next_ = 1;
  std::map<CallId, Call> calls_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

class TicketSimNode {
 public:
  TicketSimNode(TicketSimWorld& world, std::size_t machine);
  ~TicketSimNode();

  struct Process {
    Process(TicketSimNode* node, std::uint64_t seed);
    // On which timers can be made not to run.
    class TableLoop : public Loop {
     public:
      TableLoop(Loop& loop, bool timers) : loop_(loop), timers_(timers) {}
      const Clock& clock() const override { return loop_.clock(); }
      void Post(std::function<void()> task) override { loop_.Post(std::move(task)); }
      TimerId At(std::int64_t deadline, std::function<void()> task) override {
        return timers_ ? loop_.At(deadline, std::move(task)) : 0;
      }
      void Cancel(TimerId timer) override { loop_.Cancel(timer); }

     private:
      Loop& loop_;
      const bool timers_;
    };
    SimLoop loop;
    TableLoop table_loop;
    TicketSimStore store;
    TicketSimPeers peers;
    PeerHealth health;
    std::uint64_t secrets;
    TicketTable table;
    TicketRedeem redeem;
    std::shared_ptr<bool> alive = std::make_shared<bool>(true);
  };

  const Member& member() const { return member_; }
  bool running() const { return process_ != nullptr; }
  bool stopped() const { return running() && process_->loop.stopped(); }
  Process& process() { return *process_; }

  void Start();
  void Kill();
  void Stop() { process_->loop.Stop(); }
  void Continue() { process_->loop.Continue(); }

  // Anything that still goes on; empty: nothing.
  std::string Unfinished() const;

  double lies = 0;  // Share of its answers in which something is not true.

 private:
  friend struct Process;
  TicketSimWorld& world_;
  const std::size_t machine_;
  Member member_;
  std::uint64_t lives_ = 0;
  std::unique_ptr<Process> process_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_TICKET_SIM_NODE_H_
