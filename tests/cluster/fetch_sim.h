// A simulated cluster that stores, finds, pulls and evicts blocks while everything goes wrong, and
// is then left in peace: the fetch path under test is the real one, from announcements to verified
// bytes; clocks, network, stores and how nodes learn of each other are simulated.
//
// After every event: no store has wrong bytes, views of one set of members agree, a new view moved
// nothing that it did not have to. In the end, when everything has been in order for long enough:
// no operation is open, nothing is untold, every block that any node has is found and fetched by
// every other, and a prompt asks no more homes than it has runs.
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
  kOldMembersWin,     // Lists of members are taken in any order.
};
std::optional<FetchFault> FetchFaultNamed(const std::string& name);
std::vector<std::string> FetchFaultNames();

struct FetchSimOptions {
  std::uint64_t seed = 1;
  std::size_t nodes = 0;  // 0: drawn from the seed, 2 to 12.
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
