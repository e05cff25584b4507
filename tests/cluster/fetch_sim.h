// A simulated cluster that stores, finds, pulls, copies and evicts blocks while everything goes
// wrong, and is then left in peace: membership, views, copies and the fetch path, from
// announcements to verified bytes, are the real ones; clocks, network, etcd and stores are
// simulated.
//
// Always: no store has wrong bytes, no view has two incarnations of one id, views of one set of
// members agree, a new view moved nothing that it did not have to, and members that vanish from
// the registry together stay in view for their grace, no node copies faster than it may, and nobody
// hands over for longer than told to. In the end, when everything has been in order
// for kConverge (fetch_sim.cc): all see the members that the registry has, which are all that run.
// And after the longest pause: no operation is open, nothing is untold, what nodes were told of
// each other is true, every block that any node has is found and fetched by every other, nobody is
// believed to have what it does not have, and a prompt makes no more calls than it has runs, but
// those that tell apart prompts that part within a run. All that somebody has is kept by as many
// nodes as the cluster has copies for. In some seeds a node dies then, and its copies are made up
// for in the time that the rate predicts; another hands over and leaves, and nothing is lost
// (fetch_sim_copies.h).
#ifndef KVMILL_TESTS_CLUSTER_FETCH_SIM_H_
#define KVMILL_TESTS_CLUSTER_FETCH_SIM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvmill {

// Mistakes that can be planted, to see whether the simulation finds them.
enum class FetchFault {
  kNone,
  kTrustsBytes,       // Pulled blocks are kept unverified.
  kForgetsViews,      // The announcer never hears of another view.
  kNeverWithdraws,    // Evicted blocks stay announced.
  kImmortalPointers,  // Pointers live for ever.
  kLosesCalls,        // Calls without an answer never end.
  kModulo,            // Homes are the hash modulo the number of members.
  kOneHistory,        // Another history of the registry is not noticed.
  kLosesEvents,       // Some events of a watch are not heard.
  kNoGrace,           // Members that vanish together are gone at once.
  kIgnoresRate,       // Copies come three times as fast.
  kLacksCopies,       // Homes keep a copy less.
  kForgetsHomes,      // Homes go on to copy by their first view.
  kHastyHome,         // Who leaves is told at once that all is safe.
  kWrongDigests,      // One digest is never what it should be.
  kCountsPlaces,      // As many places of a run are taken for the same blocks.
  kGuesses,           // Homes say of blocks that they cannot tell apart that they are there.
};
std::optional<FetchFault> FetchFaultNamed(const std::string& name);
std::vector<std::string> FetchFaultNames();

struct FetchSimOptions {
  std::uint64_t seed = 1;
  std::size_t nodes = 0;  // 0: drawn from the seed, 2 to 14.
  bool trace = false;
  FetchFault fault = FetchFault::kNone;
};

struct FetchSimReport {
  std::string failure;  // What was wrong, and when; empty: nothing.
  std::uint64_t events = 0;
  std::uint64_t lookups = 0, blocks_asked = 0, blocks_found = 0, blocks_refused = 0;
  std::uint64_t calls = 0, hedges = 0, views = 0;
};

FetchSimReport RunFetchSim(const FetchSimOptions& options);

}  // namespace kvmill

#endif  // KVMILL_TESTS_CLUSTER_FETCH_SIM_H_
