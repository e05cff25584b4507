// The consumer's side of tickets: brings promised blocks to this node while they are being stored
// elsewhere.
//
// For each ticket one question is out at the producer (TicketPeers::Redeem) until it has nothing
// new to say, and up to pulls_max pulls of finished layers. A copy of a block begins with its first
// finished layer and is sealed when the producer's seal and all pages are here, those that the
// producer sealed; otherwise it is discarded: when the block or the ticket was given up, when
// nobody answers for silence_nanos, at once when another process answers, at the deadline, or when
// nobody here wants the ticket any more. Then the producer, if there is one, is told, so that it
// lets go.
//
// What does not come is a miss. Several callers may redeem one ticket, the ranks of an engine: they
// share the work, and whoever comes within kRememberNanos after the end is told how it ended, as
// long as that is not pushed out by later ones.
//
// Where the ticket was made there is nothing to copy: the same, without copies and pulls.
//
// Many tickets of one producer take turns with their pulls, in the order in which they had to wait.
//
// Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_TICKET_REDEEM_H_
#define KVMILL_SERVICE_CLUSTER_TICKET_REDEEM_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/back_off.h"
#include "service/cluster/loop.h"
#include "service/cluster/peer_health.h"
#include "service/cluster/ticket.h"

namespace kvmill {

class TicketRedeem {
 public:
  static constexpr std::int64_t kRememberNanos = 60'000'000'000;
  static constexpr std::size_t kRememberMax = 1024;
  static constexpr std::size_t kRememberBlocksMax = 32 << 10;  // Of all these: 16 MiB.

  struct Options {
    std::size_t tickets_max = 1024;       // At work at a time.
    std::size_t pulls_max = 4;            // Of one ticket at a time,
    std::size_t pull_pages_max = 64;      //   of so many pages;
    std::size_t producer_pulls_max = 32;  //   and of all tickets of one producer.
    std::size_t begins_max = 16;          // Copies of one ticket that wait for memory.
    int tries_max = 3;                    // Of a block's pages that came damaged, or not at all.
    std::int64_t wait_nanos = 5'000'000'000;          // Of a question that has no answer yet.
    std::int64_t call_nanos = 2'000'000'000;          // Of a call, besides.
    std::int64_t silence_nanos = 10'000'000'000;      // After the producer's last answer.
    std::int64_t acknowledge_nanos = 30'000'000'000;  // For how long that is tried.
  };
  struct Request {
    TicketName name;     // Of the namespace that the caller thinks it is of.
    Member producer;     // Id, incarnation and address, as the ticket has them.
    std::string tenant;  // Who has a share of tickets_max; empty: the daemons' own, who has all.
    std::int64_t deadline_nanos = 0;
    bool here = false;  // The producer is this node: what it has finished and sealed is here.
  };

  enum class Fate {
    kOpen,    // Still on its way.
    kSealed,  // In the local store, as the producer sealed it.
    kExists,  // In the local store; somebody else stored it.
    kMissed,
  };
  // Why a block was missed; client/ticket.h has the same.
  enum class Miss {
    kNone,
    kGivenUp,
    kDamaged,
    kNoRoom,
    kProducerGone,
    kRevoked,
    kDeadline,
    kEnded,
    kRefused,
    kCallEnded,
  };
  struct Block {
    TicketBlock what;
    Fate fate = Fate::kOpen;
    Miss miss = Miss::kNone;
    LayerSet here;  // Pages that came and are right; all of a block that is in the store.
  };
  static_assert(sizeof(Block) * kRememberBlocksMax <= 16 << 20);
  // Blocks whose layers or fate changed, by place in the ticket. `blocks` is good within the call,
  // and not after a Cancel there.
  using Update = std::function<void(const std::vector<Block>& blocks,
                                    const std::vector<std::uint32_t>& changed)>;
  // OK: the ticket was redeemed, and every block has its fate, though it may be kMissed. NOT_FOUND:
  // there is no such ticket (any more). ABORTED: it was revoked, or its time was over.
  // FAILED_PRECONDITION: another process redeemed it.
  // PERMISSION_DENIED: it is for another node. UNAVAILABLE: the producer does not answer, or was
  // replaced by another process.
  // DATA_LOSS: its answers cannot be. DEADLINE_EXCEEDED. With an error, blocks that were sealed
  // before are in the store nevertheless; `blocks` says which.
  struct Outcome {
    absl::Status status;
    std::vector<Block> blocks;  // Each with a fate. Empty when the producer never said which.
  };
  using Done = std::function<void(const Outcome&)>;
  using CallerId = std::uint64_t;  // Never 0, never used again.

  TicketRedeem(Loop& loop, TicketPeers& peers, TicketCopies& copies, PeerHealth& health,
               std::uint64_t seed, const Options& options)
      : loop_(loop),
        peers_(peers),
        copies_(copies),
        health_(health),
        seed_(seed),
        options_(options) {}
  ~TicketRedeem();
  TicketRedeem(const TicketRedeem&) = delete;
  TicketRedeem& operator=(const TicketRedeem&) = delete;

  // `update` (may be null) runs when something changed, at first with what came already, and `done`
  // once, by the deadline; neither within this call. They may start and cancel others.
  // RESOURCE_EXHAUSTED in `done` when tickets_max are at work, or the tenant's share of them.
  CallerId Start(Request request, Update update, Done done);
  // Nothing of it runs any more. The last caller of a ticket takes the work with it.
  void Cancel(CallerId caller);
  // Of the cluster. A ticket of a producer that was draining and has left, or that was restarted,
  // ends at once; of one that only vanished, which may serve on, when it was silent for too long.
  void SetMembers(const std::vector<Member>& members);

  // Fates of blocks so far, each once however many callers there were.
  struct Counts {
    std::uint64_t sealed = 0, exists = 0, missed = 0;
  };
  const Counts& counts() const { return counts_; }
  std::size_t running() const { return ops_.size(); }
  std::size_t callers() const { return callers_.size(); }
  std::size_t acknowledging() const { return acknowledgements_.size(); }

 private:
  enum class Phase { kIdle, kBeginning, kCopying, kCommitting, kOver };
  struct Work {
    Phase phase = Phase::kIdle;
    TicketCopies::CopyId copy = 0;
    TicketBlockState there = TicketBlockState::kOpen;
    std::uint64_t digest = 0;
    LayerSet finished;  // At the producer.
    LayerSet asked;     // On their way.
    int tries = 0;
  };
  struct Pull {
    TicketPeers::CallId call = 0;
    std::vector<TicketPeers::Piece> pieces;
  };
  struct Op {
    Request request;
    std::vector<CallerId> callers;
    std::uint64_t seen = 0;
    std::vector<Block> blocks;
    std::vector<Work> work;      // Of each block.
    std::size_t open = 0;        // Blocks without a fate.
    std::size_t begins = 0;      // Blocks in kBeginning.
    std::size_t there_open = 0;  // Blocks of which the producer may have news.
    TicketPeers::CallId question = 0;
    std::map<std::uint64_t, Pull> pulls;
    std::int64_t answered_at = 0;       // The last answer of any kind.
    std::int64_t pulls_fail_since = 0;  // 0: the last one did not.
    BackOff back_off;                   // Of questions,
    BackOff pull_back_off;              // and of pulls.
    Loop::TimerId retry = 0;            // 0: no question waits to be asked.
    Loop::TimerId pull_retry = 0;       // 0: pulls need not wait.
    Loop::TimerId tell = 0;             // 0: callers have been told.
    std::set<std::uint32_t> changed;
    bool waits = false;  // For its turn to pull.
    explicit Op(std::uint64_t seed)
        : back_off(10'000'000, 500'000'000, seed), pull_back_off(10'000'000, 500'000'000, ~seed) {}
  };
  using Ops = std::map<TicketName, Op>;
  using ProducerId = std::pair<std::string, std::string>;  // Id and incarnation.
  struct Turns {
    std::size_t pulls = 0;           // Under way.
    std::deque<TicketName> waiting;  // Tickets that have something to pull.
    Loop::TimerId timer = 0;         // 0: nobody was called.
  };
  struct Caller {
    TicketName name{};
    bool greeted = false;  // Was told of all blocks.
    Update update;
    Done done;
    Loop::TimerId timer = 0;
  };
  struct Remembered {
    Request request;
    Outcome outcome;
    std::int64_t until = 0;
  };
  struct Acknowledgement {
    explicit Acknowledgement(std::uint64_t seed) : back_off(50'000'000, 2'000'000'000, seed) {}
    TicketName name{};
    Member producer;
    std::int64_t until = 0;
    BackOff back_off;
    TicketPeers::CallId call = 0;
    Loop::TimerId timer = 0;
  };

  void Ask(const TicketName& name, Op* op);
  void AskLater(const TicketName& name, Op* op, std::int64_t nanos);
  void Answered(const TicketName& name, const absl::StatusOr<TicketNews>& news);
  // Whether it says more than was known.
  bool Learn(const TicketName& name, Op* op, const TicketNews& news);
  // A call failed. True when that was the end of the ticket.
  bool IsTheEnd(const TicketName& name, std::int64_t failing_since, const absl::Status& status);
  // Begins copies and pulls what it can; ends the op when every block has its fate.
  void Advance(const TicketName& name, Op* op);
  void Begin(const TicketName& name, Op* op, std::uint32_t block);
  void CommitIfWhole(const TicketName& name, Op* op, std::uint32_t block);
  void Committed(const TicketName& name, std::uint32_t block, const absl::Status& status);
  // Whether there was something to pull. Without `turn` it may have to wait for one.
  bool StartPull(const TicketName& name, Op* op, bool turn);
  void PullEnded(const Member& producer);
  void TakeTurns(const ProducerId& producer);
  void Landed(const TicketName& name, std::uint64_t pull,
              const absl::StatusOr<std::vector<TicketPeers::Landed>>& landed);
  void Decide(const TicketName& name, Op* op, std::uint32_t block, Fate fate,
              Miss why = Miss::kNone);
  void Count(Fate fate);
  void NoteChange(const TicketName& name, Op* op, std::uint32_t block);
  void Tell(const TicketName& name);
  // Discards what is not sealed and tells everybody.
  void End(const TicketName& name, const absl::Status& status, bool acknowledge);
  absl::Status CheckShare(const std::string& tenant) const;
  void Late(CallerId caller);
  void Complete(CallerId caller, const Outcome& outcome);
  void CompleteSoon(CallerId caller, Outcome outcome);
  // Takes the caller from its ticket, and the work with it when it was the last.
  void Leave(CallerId caller, const TicketName& name);
  void Remember(const Request& request, const Outcome& outcome);
  void Acknowledge(const Request& request);
  void TryAcknowledge(std::uint64_t id);
  void Acknowledged(std::uint64_t id, const absl::Status& status);

  Loop& loop_;
  TicketPeers& peers_;
  TicketCopies& copies_;
  PeerHealth& health_;
  std::uint64_t seed_;
  const Options options_;
  Ops ops_;
  CallerId next_caller_ = 1;
  std::map<CallerId, Caller> callers_;
  std::uint64_t next_pull_ = 1;
  Counts counts_;
  std::map<ProducerId, Turns> turns_;
  std::set<ProducerId> draining_;      // Members, as they last were.
  std::deque<Remembered> remembered_;  // Oldest first.
  std::size_t remembered_blocks_ = 0;
  std::uint64_t next_acknowledgement_ = 1;
  std::map<std::uint64_t, Acknowledgement> acknowledgements_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_TICKET_REDEEM_H_
