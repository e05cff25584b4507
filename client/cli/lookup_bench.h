// Speed of the block index: one core, in this process.
#ifndef KVMILL_CLIENT_CLI_LOOKUP_BENCH_H_
#define KVMILL_CLIENT_CLI_LOOKUP_BENCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvmill::cli {

struct LookupBenchOptions {
  std::uint32_t keys = 1000000;     // Blocks in the index.
  std::uint32_t batch = 64;         // Keys of one lookup: a prompt.
  std::uint32_t repetitions = 7;    // Odd.
  std::uint32_t lookups = 4000000;  // Keys looked up in one repetition.
};

struct LookupBenchResult {
  std::vector<double> keys_per_s;  // One a repetition, ascending.
  double metadata_bytes_per_key = 0;
};

// RESOURCE_EXHAUSTED when the index does not fit; INTERNAL when it forgot a key.
absl::StatusOr<LookupBenchResult> RunLookupBench(const LookupBenchOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_LOOKUP_BENCH_H_
