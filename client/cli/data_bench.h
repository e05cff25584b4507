// Speed of Store and Fetch of one client against a running daemon.
#ifndef KVMILL_CLIENT_CLI_DATA_BENCH_H_
#define KVMILL_CLIENT_CLI_DATA_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvmill::cli {

struct DataBenchOptions {
  std::uint64_t bytes = std::uint64_t{1} << 20;  // Of a block's pages, about.
  std::uint32_t count = 500;                     // Blocks, in each of the two measurements.
  std::uint32_t depth = 4;                       // Calls at once, where the rate is measured.
  bool records = false;                          // Store: tiles, not 16-bit values.
};

struct DataBenchResult {
  double gb_per_s = 0;      // Of pages,
  double raw_gb_per_s = 0;  //   and of the 16-bit values in them.
  std::vector<double> us;   // Of single calls, ascending.
  double empty_rpc_p50_us = 0;
  std::string transport;         // "grpc", or what UCX negotiated.
  std::uint64_t page_bytes = 0;  // Of one block.
  std::uint64_t raw_bytes = 0;
};

// Stores blocks of Gaussian values under a name of its own, one call a block, and removes them.
absl::StatusOr<DataBenchResult> RunStoreBench(Client& client, const DataBenchOptions& options);
// The same with fetching, of up to 16 different blocks, into memory that the caller has.
absl::StatusOr<DataBenchResult> RunFetchBench(Client& client, const DataBenchOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_DATA_BENCH_H_
