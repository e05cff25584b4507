// Speed of the encoder on this machine, next to what bounds it.
#ifndef KVMILL_CLIENT_CLI_ENCODE_BENCH_H_
#define KVMILL_CLIENT_CLI_ENCODE_BENCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tile_format.h"

namespace kvmill::cli {

struct EncodeBenchOptions {
  TileFormat format;
  std::uint32_t threads = 1;
  std::uint32_t repetitions = 15;  // Odd, so that the median is a measurement.
};

struct EncodeBenchResult {
  // Microseconds that one thread needs for one tile (K and V), per repetition, ascending.
  std::vector<double> us_per_tile;
  double median_us = 0;
  double gb_per_s = 0;            // 16-bit input of all threads, at the median. 1 GB = 1e9 bytes.
  double reference_gb_per_s = 0;  // One thread of the reference encoder.
  double memcpy_gb_per_s = 0;     // As many threads copying 64 MiB each, counted once.
  double bound_us = 0;            // The passes of the normalization alone (kernels/encode_bound.h).
};

// Encodes Gaussian tiles, 2 MiB of them a thread, over and over.
EncodeBenchResult RunEncodeBench(const EncodeBenchOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_ENCODE_BENCH_H_
