// Tickets, for engines: a prompt's blocks go from the node that prefills to the node that decodes,
// layer by layer, while they are computed. Client::CreateTicket, RedeemTicket and RevokeTicket.
//
// The prefill engine names the blocks before it stores them and passes the ticket on, with the
// request. It stores as always: whole blocks or single layers, all heads or each rank its own. The
// decode engine redeems the ticket at its own daemon, which brings finished layers there. A block
// is seen there (by Lookup, Fetch, Map) when it is sealed, and it is sealed only with the bytes
// that the producer sealed; how either side cuts heads and layers between its ranks is its own
// business.
//
// A ticket ends when every block of it has its fate; when the prefill engine revokes it, or its
// session ends; when nobody redeems it any more; and when nothing of it made progress for
// TicketOptions::ttl. Nothing is held for it then, on either side. To an engine every failure is a
// miss: what is not sealed is recomputed.
#ifndef KVMILL_CLIENT_TICKET_H_
#define KVMILL_CLIENT_TICKET_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/core/block_key.h"

namespace kvmill {

// A block that will be stored, as StoreBlock names it.
struct PromisedBlock {
  BlockKey key;     // The engine's; of a tail, too.
  BlockKey parent;  // Empty for the first block of a sequence.
  std::uint32_t token_count = 0;
  std::uint32_t block_index = 0;
};

inline constexpr absl::Duration kTicketTtlMax = absl::Minutes(10);
inline constexpr absl::Duration kTicketLifeMax = absl::Hours(1);

struct TicketOptions {
  std::string consumer;                    // Node id of who may redeem it; empty: whoever has it.
  absl::Duration ttl = absl::Seconds(30);  // Without progress. 1 ms to kTicketTtlMax.
  absl::Duration life = absl::Minutes(5);  // With it. 1 ms to kTicketLifeMax.
};

enum class TicketFate : std::uint8_t {
  kOpen = 0,    // On its way.
  kSealed = 1,  // In the store, as the producer sealed it.
  kExists = 2,  // In the store; somebody else stored it.
  kMissed = 3,  // It will not come.
};

// Why. For logs and counters: to an engine they are the same.
enum class TicketMiss : std::uint8_t {
  kNone = 0,          // It was not missed.
  kGivenUp = 1,       // By its writers; or the producer could not hold it.
  kDamaged = 2,       // What came was not what the producer sealed, again and again.
  kNoRoom = 3,        // For a copy, at the node that redeems.
  kProducerGone = 4,  // It does not answer, or left the cluster.
  kRevoked = 5,       // The ticket was, or the session of who made it ended.
  kDeadline = 6,      // The ticket's time was over.
  kEnded = 7,         // The ticket had ended, which way nobody knows any more.
  kRefused = 8,       // The store of the node that redeems did not take it.
  kCallEnded = 9,     // The redeem did before: RedeemResult::status says why.
};
absl::string_view NameOf(TicketMiss miss);  // "given up"

// One layer group of a promised block, at the node where the ticket is redeemed.
struct RedeemedBlock {
  BlockKey key;  // What it is stored under: for Fetch, Map and Touch. Of a tail not the engine's.
  std::uint8_t group = 0;
  std::uint32_t block_index = 0;
  std::uint32_t token_count = 0;
  std::uint32_t layer_count = 0;  // Of the group.
  TicketFate fate = TicketFate::kOpen;
  TicketMiss miss = TicketMiss::kNone;     // Of one with kMissed.
  std::uint32_t layers_here = 0;           // That came, and are right.
  std::vector<std::uint64_t> layer_words;  // Which: bit i of word w stands for layer 64 w + i.

  bool HasLayer(std::uint32_t layer) const {
    return layer / 64 < layer_words.size() && (layer_words[layer / 64] >> layer % 64 & 1) != 0;
  }
};

// All blocks of the ticket, in its order (layer groups of a block next to each other), and the
// places of those that changed: at first all of them, then each as often as it did. (What a call
// that was cancelled, or out of time, left open is in its result alone.) On a thread of the
// library, one at a time.
using RedeemUpdate = std::function<void(absl::Span<const RedeemedBlock> blocks,
                                        absl::Span<const std::uint32_t> changed)>;

struct RedeemResult {
  // OK: the ticket was redeemed, which says nothing of its blocks. Else why it was not:
  //   NOT_FOUND            there is no such ticket (any more); also of one of another tenant, or of
  //                        a namespace that this daemon does not know
  //   ABORTED              it was revoked, or its time was over
  //   FAILED_PRECONDITION  it is of another namespace, another process redeemed it, or the daemon
  //                        is in no cluster
  //   PERMISSION_DENIED    it is for another node; or nodes do not share this tenant's blocks
  //   RESOURCE_EXHAUSTED   the daemon redeems as many as it may
  //   UNAVAILABLE          the producer does not answer, was restarted or left; or the daemon
  //   CANCELLED            CancelRedeem, or the client's end
  //   DEADLINE_EXCEEDED    the call's time was over
  absl::Status status;
  // Whatever the status: each has its fate, and what is kSealed or kExists stays. Empty when it was
  // never told which there are.
  std::vector<RedeemedBlock> blocks;
  std::size_t missed = 0;  // Of them.
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TICKET_H_
