// Finds who has the blocks of a prompt: this node, the node that the router named (the hint), or
// whoever the homes of their anchors are or know of.
//
// Each run of up to 32 blocks has a list of nodes to ask: the hint, then ranks 0 to copies + 1 of
// its anchor, which covers one node that joined or left. Runs that ask one node ask it with one
// call, so a prompt of 256 blocks calls at most eight homes. A run goes on to its next node when
// the answer leaves blocks open, when the call failed, and, without giving up on it, when it takes
// longer than that node used to (a hedge). Nodes that PeerHealth has paused are passed over.
//
// A home may know of nodes that have something of a run and not whether it is what is looked for
// (Pointer::perhaps). Those are asked next, all at once: a second round trip, of runs in which
// sequences part.
//
// An answer is what somebody said: it is good for choosing where to pull from, and only bytes that
// were verified count (remote_fetch.h). Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_REMOTE_LOOKUP_H_
#define KVMILL_SERVICE_CLUSTER_REMOTE_LOOKUP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/peers.h"

namespace kvmill {

class RemoteLookup {
 public:
  // Calls whose lookup has ended without them; more are cancelled.
  static constexpr std::size_t kStragglersMax = 1024;

  using OpId = std::uint64_t;  // Never 0, never used again.

  struct Options {
    std::string self_id;
    std::size_t copies = 0;                 // R: at most kRanks - 2.
    std::int64_t call_nanos = 200'000'000;  // Of one call; a lookup does not wait for it.
    // What this node has and, as a home, knows; as it answers peers. At once.
    std::function<RunAnswer(const Fingerprint&, const RunQuery&)> local;
  };

  struct Request {
    Fingerprint fingerprint{};
    std::vector<RunQuery> runs;
    std::string hint;  // Member::id; empty, or nobody in the view: none.
    // Asks all whom it may, although all blocks have a source.
    bool everybody = false;
    // With `everybody`: those are all members, at once, best ranks first.
    bool all_members = false;
    std::int64_t deadline_nanos = 0;
  };

  // One who has blocks of a run.
  struct Source {
    Member member;
    bool self = false;
    bool told = false;  // Said so itself; otherwise a home did, and it may be out of date.
    std::uint32_t blocks = 0;
  };
  struct Run {
    std::uint32_t covered = 0;    // Bits of keys for which there is a source.
    std::vector<Source> sources;  // In the order in which they were found; those who told first.
  };

  RemoteLookup(Loop& loop, Peers& peers, PeerHealth& health, Options options);
  // Ends what runs without a word.
  ~RemoteLookup();
  RemoteLookup(const RemoteLookup&) = delete;
  RemoteLookup& operator=(const RemoteLookup&) = delete;

  // Lookups that begin from now on use it. Until there is one, only this node is asked.
  void SetView(std::shared_ptr<const ClusterView> view) { view_ = std::move(view); }
  // Of calls from now on.
  void SetCallNanos(std::int64_t nanos) { options_.call_nanos = nanos; }

  // `done` runs once, on the loop, not within this call and not after the deadline, with one entry
  // for each run: there is no error, only blocks without a source. It may start others.
  OpId Start(Request request, std::function<void(std::vector<Run>)> done);
  // `done` does not run. Nothing when it has.
  void Cancel(OpId op);
  // All that run end now, with what is known.
  void CompleteAll();

  std::size_t running() const { return ops_.size(); }
  std::size_t calls() const { return calls_.size(); }  // That are out.
  // Since the start: calls, and those of them that were hedges.
  std::uint64_t calls_started() const { return calls_started_; }
  std::uint64_t hedges_started() const { return hedges_started_; }

 private:
  using CallNumber = std::uint64_t;
  // Outlives its lookup, so that a peer that others overtake is known for what it is in the end.
  struct Call {
    OpId op = 0;  // 0: ended; nobody waits for the answer.
    Member member;
    Peers::CallId id = 0;
    std::vector<std::size_t> runs;
    std::vector<RunQuery> queries;
    std::int64_t started = 0;
    Loop::TimerId hedge = 0;
  };
  struct OpRun {
    RunQuery query;
    Run found;
    std::vector<MemberIndex> candidates;
    std::size_t next = 0;     // Candidate.
    std::size_t at_once = 0;  // Of them, those from `next` on that are asked together.
    std::size_t open = 0;     // Calls that will tell.
  };
  struct Op {
    OpId id = 0;
    Fingerprint fingerprint{};
    bool everybody = false;
    std::shared_ptr<const ClusterView> view;
    std::vector<OpRun> runs;
    Loop::TimerId timer = 0;
    std::set<CallNumber> calls;
    std::function<void(std::vector<Run>)> done;
  };

  void AskLocal(Op* op);
  void ListCandidates(Op* op, const std::string& hint, bool all_members);
  void Advance(Op* op, const std::vector<std::size_t>& runs, bool hedge);
  void Ask(Op* op, MemberIndex peer, std::vector<std::size_t> runs);
  void Hedge(CallNumber number);
  void Answered(CallNumber number, const absl::StatusOr<std::vector<RunAnswer>>& answers);
  void Take(const Op& op, OpRun* run, const Member& from, bool self, const RunAnswer& answer);
  // Has a node asked next, unless it was already.
  static void AskSoon(OpRun* run, MemberIndex peer);
  static bool Settled(const Op& op, const OpRun& run);
  bool Finished(const Op& op) const;
  void Complete(OpId id);
  void End(Op* op);

  Loop& loop_;
  Peers& peers_;
  PeerHealth& health_;
  Options options_;
  std::shared_ptr<const ClusterView> view_;
  OpId next_ = 1;
  std::map<OpId, Op> ops_;
  CallNumber next_call_ = 1;
  std::map<CallNumber, Call> calls_;
  std::size_t stragglers_ = 0;  // Of calls_: those whose lookup has ended.
  std::uint64_t calls_started_ = 0, hedges_started_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_REMOTE_LOOKUP_H_
