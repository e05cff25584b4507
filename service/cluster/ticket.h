// Tickets: a producer's promise of named blocks to one consumer, prefill to decode. What both sides
// say of them, and what the state machines of both (ticket_table.h, ticket_redeem.h) need of their
// stores and of each other.
//
// Life of a ticket. An engine names the blocks that its prefill is going to store, at the daemon
// where they are assembled (the producer), which holds them from then on: TicketTable. The ticket
// travels to the decode engine, which gives it to its own daemon (the consumer): TicketRedeem asks
// the producer what is finished, pulls finished layers into copies of the blocks, and seals a copy
// when the producer has sealed the block and every page is the one that it sealed. Then it
// acknowledges, and the producer lets go.
//
// A layer is finished when every head of it is written: its page has its final bytes, header and
// checksums included, though the block is not sealed yet.
#ifndef KVMILL_SERVICE_CLUSTER_TICKET_H_
#define KVMILL_SERVICE_CLUSTER_TICKET_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/layer_set.h"
#include "service/cluster/member.h"
#include "storage/core/block_key.h"
#include "storage/core/namespace.h"

namespace kvmill {

inline constexpr std::size_t kTicketBlocksMax = 4096;  // (block, layer group) pairs of one ticket.

// One tenant other than the daemons' own has at most a quarter of what tickets may have.
inline constexpr std::size_t kTicketShares = 4;

// 16 random bytes: who knows them, and is of the tenant whose blocks they are, may have the blocks.
using TicketSecret = std::array<std::uint8_t, 16>;

// Which ticket. The fingerprint is of its namespace, of which the tenant is part: who has another
// one's secret, and says a namespace of his own, names a ticket that there is not.
struct TicketName {
  TicketSecret secret{};
  Fingerprint fingerprint{};

  friend auto operator<=>(const TicketName&, const TicketName&) = default;
};
// NOT_FOUND, in the same words whether there never was one, or it has ended, or it is another
// tenant's.
absl::Status NoSuchTicketError();

// A block that is promised: one layer group of it, and what its writers say of it.
struct TicketBlock {
  BlockKey key;  // What it is stored under; of a tail its TailKey.
  std::uint8_t group = 0;
  std::uint16_t layer_count = 0;  // Of the group, 1 to kLayersMax.
  BlockKey parent;                // Empty for the first block of a sequence.
  std::uint32_t token_count = 0;
  std::uint32_t block_index = 0;
  BlockKey tail_key;  // Of a tail: the engine's key.

  friend bool operator==(const TicketBlock&, const TicketBlock&) = default;
};

// What became of a promised block at its producer. kSealed and kFailed are final.
enum class TicketBlockState : std::uint8_t {
  kOpen = 0,    // Not there yet, or being assembled.
  kSealed = 1,  // Every layer is finished, and `digest` is of all its pages.
  kFailed = 2,  // Given up by its writers: it will not come.
};
struct TicketBlockNews {
  std::uint32_t block = 0;  // Place in the ticket.
  TicketBlockState state = TicketBlockState::kOpen;
  LayerSet finished;         // All so far.
  std::uint64_t digest = 0;  // Of a sealed block: PagesDigest (storage/core/pages_digest.h).

  friend bool operator==(const TicketBlockNews&, const TicketBlockNews&) = default;
};

// An answer to Redeem: everything that changed since the version that the consumer had seen.
struct TicketNews {
  std::uint64_t version = 0;  // From 1.
  Fingerprint fingerprint{};
  std::vector<TicketBlock> blocks;  // When nothing had been seen: all of them, else none.
  std::vector<TicketBlockNews> changed;
};

// Whether it can be an answer to someone who had seen `seen`, and knows the `known` blocks (none
// when seen is 0): shapes and bounds, nothing more.
bool ValidNews(std::uint64_t seen, const std::vector<TicketBlock>& known, const TicketNews& news);

// How a ticket ended, as those are told who asked for news of it.
enum class TicketEnd : std::uint8_t {
  kUnsaid = 0,  // It is not known any more.
  kAcknowledged = 1,
  kRevoked = 2,   // By the engine, or with its session.
  kDeadline = 3,  // Its time was over.
};
// ABORTED, with the end in it, which EndOf finds.
absl::Status TicketEndedError(TicketEnd end);
TicketEnd EndOf(const absl::Status& status);

// --- At the producer: its store ---

// Blocks that are held: what there is of them stays, finished pages can be read, and whatever is
// stored later under these names is held from its beginning.
//
// Lives on the loop; calls its events there, never within a call that it got.
class TicketHolds {
 public:
  using HoldId = std::uint64_t;  // Never 0, never used again.

  class Events {
   public:
    virtual ~Events() = default;
    // So many layers are finished by now: all of them, not only the new ones.
    virtual void Finished(HoldId hold, std::uint32_t block, const LayerSet& layers) = 0;
    // One of these comes last, once.
    virtual void Sealed(HoldId hold, std::uint32_t block, std::uint64_t digest) = 0;
    virtual void Failed(HoldId hold, std::uint32_t block) = 0;
  };

  virtual ~TicketHolds() = default;
  // Tells `events` of the blocks that are there already, too. RESOURCE_EXHAUSTED when so much may
  // not be held, INVALID_ARGUMENT when the blocks do not fit the namespace.
  virtual absl::StatusOr<HoldId> Hold(const Fingerprint& fingerprint,
                                      const std::vector<TicketBlock>& blocks, Events* events) = 0;
  // Ends it: no event comes any more, and the blocks are as others are. Once. Pages that are being
  // read stay until they have been.
  virtual void Release(HoldId hold) = 0;
};

// --- At the consumer: its store ---

// Copies of blocks that come layer by layer. Nobody else sees one before it is sealed.
//
// Lives on the loop; calls back there, never within the call.
class TicketCopies {
 public:
  using CopyId = std::uint64_t;  // Never 0, never used again.
  using Done = std::function<void(absl::Status)>;

  virtual ~TicketCopies() = default;
  // Memory for a copy. ALREADY_EXISTS: the block is sealed here; whatever else is not OK: there
  // will be no copy. The id is good at once, for Abandon.
  virtual CopyId Begin(const Fingerprint& fingerprint, const TicketBlock& block, Done done) = 0;
  // Seals it when its pages are those that `digest` is of, each verified. The copy is over with
  // this call, whatever the answer: DATA_LOSS for other pages, ALREADY_EXISTS when somebody stored
  // the block meanwhile. No pull into it may be under way.
  virtual void Commit(CopyId copy, std::uint64_t digest, Done done) = 0;
  // Discards it, unless Commit was called, and runs no callback of it any more. Its memory stays
  // until pulls into it are over. Not when Begin has failed or Commit has answered.
  virtual void Abandon(CopyId copy) = 0;
};

// --- Between them ---

// A consumer's calls to producers. Rules as for Peers (peers.h): on the loop only, each call ends
// once and by its deadline, after Cancel it runs no more, and the process that answers is the one
// that `producer` names, else a ReplacedError. The consumer says who it is, incarnation included.
//
// NOT_FOUND and ABORTED (TicketEndedError): there is no such ticket, or not any more.
// FAILED_PRECONDITION and PERMISSION_DENIED: it is somebody else's.
class TicketPeers {
 public:
  using CallId = std::uint64_t;  // Never 0, never used again.
  template <typename Answer>
  using Done = std::function<void(absl::StatusOr<Answer>)>;

  // Layers of a block to pull, and the copy that they go to.
  struct Piece {
    TicketCopies::CopyId copy = 0;
    std::uint32_t block = 0;
    LayerSet layers;
  };
  struct Landed {
    LayerSet layers;       // In the copy now, each page verified.
    bool damaged = false;  // Something came that was not what was asked for, and was dropped.
  };

  virtual ~TicketPeers() = default;
  // Answers as soon as there is something newer than `seen`, and after `wait_nanos` anyway.
  virtual CallId Redeem(const Member& producer, const TicketName& name, std::uint64_t seen,
                        std::int64_t wait_nanos, std::int64_t deadline_nanos,
                        Done<TicketNews> done) = 0;
  // One answer a piece. When `done` runs nothing is written into the copies any more.
  virtual CallId Pull(const Member& producer, const TicketName& name, std::vector<Piece> pieces,
                      std::int64_t deadline_nanos, Done<std::vector<Landed>> done) = 0;
  // The consumer has what it wants, or wants no more.
  virtual CallId Acknowledge(const Member& producer, const TicketName& name,
                             std::int64_t deadline_nanos,
                             std::function<void(absl::Status)> done) = 0;
  virtual void Cancel(CallId call) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_CLUSTER_TICKET_H_
