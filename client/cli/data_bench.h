// Speed of Store, Fetch and Map against a running daemon.
#ifndef KVMILL_CLIENT_CLI_DATA_BENCH_H_
#define KVMILL_CLIENT_CLI_DATA_BENCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvmill::cli {

struct DataBenchOptions {
  std::uint64_t bytes = std::uint64_t{1} << 20;  // Of a block's pages, about.
  std::uint32_t count = 500;                     // Blocks, in each of the two measurements.
  std::uint32_t blocks = 1;                      // Of one call; a store has one.
  std::uint32_t depth = 4;    // Calls at once of a client, where the rate is measured.
  std::uint32_t clients = 1;  // With a connection each, there.
  bool map = false;      // Fetch: map the blocks and read them in place. Store: from shared pages.
  bool records = false;  // Store: tiles, not 16-bit values.
};

struct DataBenchResult {
  double gb_per_s = 0;      // Of pages, with all clients,
  double raw_gb_per_s = 0;  //   and of the 16-bit values in them.
  // By the number of clients: powers of two up to all of them, measured in turns; medians.
  std::map<std::uint32_t, double> clients_gb_per_s;
  std::vector<double> us;  // Of single calls, ascending.
  double empty_rpc_p50_us = 0;
  std::string transport;         // "grpc", "shm" (map), or what UCX negotiated.
  std::uint64_t page_bytes = 0;  // Of one block.
  std::uint64_t raw_bytes = 0;
};

using ClientFactory = std::function<absl::StatusOr<std::unique_ptr<Client>>()>;

// Stores blocks of Gaussian values under a name of its own, one call a block, and removes them.
// With `map` the daemon reads the values where the client has them.
absl::StatusOr<DataBenchResult> RunStoreBench(const ClientFactory& connect,
                                              const DataBenchOptions& options);
// The same with fetching, of up to 16 different blocks or as many as a call has, into memory that
// the caller has; or with mapping. There a single call is Map alone; for the rate a call maps,
// loads one word of every cache line of every page, and checks that what it read was right.
absl::StatusOr<DataBenchResult> RunFetchBench(const ClientFactory& connect,
                                              const DataBenchOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_DATA_BENCH_H_
