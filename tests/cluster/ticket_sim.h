// Simulated nodes that hand blocks to each other by tickets while everything goes wrong, and are
// then left in peace: the state machines of both sides (ticket_table.h, ticket_redeem.h) are the
// real ones; clocks, network, engines and stores are simulated.
//
// Always: no store has pages that the ticket's producer did not seal together, no page is read
// before it is finished, a held block is there, a hold is released once, no later than its ticket's
// deadline and no earlier without a reason; each redemption ends once and in time. In the end
// nothing is held, copied, asked or waited for. And in peace every block that was sealed is sealed
// at its consumer, the last layer soon after it was stored, and the producer lets go at once.
#ifndef KVMILL_TESTS_CLUSTER_TICKET_SIM_H_
#define KVMILL_TESTS_CLUSTER_TICKET_SIM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvmill {

// Mistakes that can be planted, to see whether the simulation finds them.
enum class TicketFault {
  kNone,
  kTrustsPages,        // Pages that come are not verified.
  kTrustsSeals,        // A copy is sealed whatever the producer's digest says.
  kSealsEarly,         // A block counts as sealed when its layers are finished.
  kReadsUnfinished,    // A layer counts as finished before it is.
  kLosesSeals,         // The store does not say that blocks were sealed.
  kImmortal,           // The producer's timers never run.
  kKeepsHolds,         // Releasing a hold does nothing.
  kEvictsHeld,         // Blocks leave the store though they are held.
  kLosesCalls,         // Calls without an answer never end.
  kNoAcknowledgement,  // Nobody acknowledges.
  kNoRevocation,       // Nobody revokes.
  kLeaksCopies,        // Copies that were given up stay.
};
std::optional<TicketFault> TicketFaultNamed(const std::string& name);
std::vector<std::string> TicketFaultNames();

struct TicketSimOptions {
  std::uint64_t seed = 1;
  bool trace = false;
  TicketFault fault = TicketFault::kNone;
};

struct TicketSimReport {
  std::string failure;  // What was wrong, and when; empty: nothing.
  std::uint64_t events = 0;
  std::uint64_t tickets = 0, redemptions = 0, blocks_promised = 0, blocks_sealed = 0;
  std::uint64_t acknowledged = 0, revoked = 0, expired = 0, damaged = 0;
};

TicketSimReport RunTicketSim(const TicketSimOptions& options);

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_TICKET_SIM_H_
