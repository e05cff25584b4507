// The producer's side of tickets: what this node has promised, to whom, and until when it holds it.
//
// The hold of a ticket ends once: when the consumer acknowledges, when its owner revokes it or goes
// away, or at the deadline, which is `ttl_nanos` after the last progress and never later than
// `life_nanos` after the ticket was made. Progress is a layer that was finished, a seal, and a page
// that is pulled for the first time; questions are none, so a consumer that only asks holds
// nothing.
//
// A ticket belongs to the first consumer process that redeems it: the same one may redeem it any
// number of times and is told the same things, another one is refused. (ticket.h says the rest.)
//
// Lives on the loop.
#ifndef KVMILL_SERVICE_CLUSTER_TICKET_TABLE_H_
#define KVMILL_SERVICE_CLUSTER_TICKET_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/loop.h"
#include "service/cluster/ticket.h"

namespace kvmill {

class TicketTable : private TicketHolds::Events {
 public:
  struct Options {
    std::size_t tickets_max = 4096;
    std::size_t blocks_max = 64 << 10;  // Of all tickets together.
    std::int64_t ttl_nanos_max = 600'000'000'000;
    std::int64_t life_nanos_max = 3'600'000'000'000;
    std::int64_t wait_nanos_max = 10'000'000'000;  // Of one Redeem.
  };
  struct Request {
    Fingerprint fingerprint{};
    std::string tenant;  // Who has a share of the limits; empty: the daemons' own, who has all.
    std::vector<TicketBlock> blocks;
    std::string consumer;                       // Member::id of who may redeem it; empty: anyone.
    std::string owner;                          // See RevokeAll.
    std::int64_t ttl_nanos = 30'000'000'000;    // Without progress.
    std::int64_t life_nanos = 300'000'000'000;  // With it.
  };
  // A consumer process.
  struct Consumer {
    std::string id;           // Member::id
    std::string incarnation;  // Member::incarnation

    friend bool operator==(const Consumer&, const Consumer&) = default;
  };
  using End = TicketEnd;
  struct Counts {
    std::uint64_t created = 0, acknowledged = 0, revoked = 0, expired = 0;
  };
  using WaitId = std::uint64_t;  // Never 0, never used again.
  using News = std::function<void(absl::StatusOr<TicketNews>)>;

  // `random` makes secrets that nobody can guess.
  TicketTable(Loop& loop, TicketHolds& holds, std::function<TicketSecret()> random,
              const Options& options)
      : loop_(loop), holds_(holds), random_(std::move(random)), options_(options) {}
  ~TicketTable() override;
  TicketTable(const TicketTable&) = delete;
  TicketTable& operator=(const TicketTable&) = delete;

  // INVALID_ARGUMENT names what is not within its limit, RESOURCE_EXHAUSTED which of the limits of
  // all tickets, or of a tenant's share of them, is reached; or what TicketHolds::Hold said.
  absl::StatusOr<TicketName> Create(Request request);
  // The namespace of the ticket with this secret, whoever's it is.
  std::optional<Fingerprint> NamespaceOf(const TicketSecret& secret) const;
  // NoSuchTicketError, as everything below. Whoever waits for news is told ABORTED.
  absl::Status Revoke(const TicketName& name);
  // All tickets of an owner that is gone; not those without one.
  void RevokeAll(const std::string& owner);

  // `done` runs once: within this call when there is something newer than `seen`, or an error;
  // else when there is, at `wait_nanos` from now, or when another Redeem of this ticket comes, with
  // what there is then; ABORTED when the ticket ends meanwhile. 0 when it has run already.
  WaitId Redeem(const TicketName& name, const Consumer& consumer, std::uint64_t seen,
                std::int64_t wait_nanos, News done);
  // `done` does not run any more.
  void CancelWait(WaitId wait);

  // Whether this consumer may have these layers now, and where they are held.
  absl::StatusOr<TicketHolds::HoldId> Read(const TicketName& name, const Consumer& consumer,
                                           std::uint32_t block, const LayerSet& layers);
  // NOT_FOUND when it has ended already: to the consumer the same as OK.
  absl::Status Acknowledge(const TicketName& name, const Consumer& consumer);

  std::size_t size() const { return tickets_.size(); }
  std::size_t blocks() const { return blocks_; }
  std::size_t waiting() const { return waits_.size(); }
  const Counts& counts() const { return counts_; }

 private:
  struct Block {
    TicketBlock what;
    std::uint64_t changed_at = 0;  // The version with which it last changed; 0: it never did.
    TicketBlockState state = TicketBlockState::kOpen;
    LayerSet finished, pulled;
    std::uint64_t digest = 0;
  };
  struct Ticket {
    std::string tenant;
    std::vector<Block> blocks;
    std::string wanted;  // The consumer's id; empty: anyone.
    std::string owner;
    Consumer consumer;  // Id empty: nobody redeemed it yet.
    std::int64_t ttl_nanos = 0;
    std::int64_t ends_at = 0;  // The maximum.
    std::int64_t progress_at = 0;
    std::uint64_t version = 1;
    TicketHolds::HoldId hold = 0;
    Loop::TimerId timer = 0;
    WaitId wait = 0;  // 0: nobody waits.
  };
  struct Wait {
    TicketName name{};
    std::uint64_t seen = 0;
    Loop::TimerId timer = 0;
    News done;
  };
  using Tickets = std::map<TicketName, Ticket>;

  void Finished(TicketHolds::HoldId hold, std::uint32_t block, const LayerSet& layers) override;
  void Sealed(TicketHolds::HoldId hold, std::uint32_t block, std::uint64_t digest) override;
  void Failed(TicketHolds::HoldId hold, std::uint32_t block) override;

  absl::Status Check(const Request& request) const;
  absl::Status CheckShare(const Request& request) const;
  absl::StatusOr<Tickets::iterator> Find(const TicketName& name, const Consumer& consumer);
  Ticket* OfHold(TicketHolds::HoldId hold);
  void Changed(Ticket* ticket, Block* block);
  void Progress(Ticket* ticket);
  void Due(const TicketName& name);
  void Answer(WaitId wait);
  void Finish(Tickets::iterator ticket, End why);
  TicketNews NewsOf(const TicketName& name, std::uint64_t seen) const;

  Loop& loop_;
  TicketHolds& holds_;
  const std::function<TicketSecret()> random_;
  const Options options_;
  Tickets tickets_;
  std::map<TicketHolds::HoldId, TicketName> by_hold_;
  std::map<WaitId, Wait> waits_;
  WaitId next_wait_ = 1;
  std::size_t blocks_ = 0;
  struct Share {
    std::size_t tickets = 0, blocks = 0;
  };
  std::map<std::string, Share> shares_;  // By tenant, of those that have one.
  Counts counts_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_TICKET_TABLE_H_
