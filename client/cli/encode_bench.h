// Speed of the encoder on this machine, next to what bounds it.
#ifndef KVMILL_CLIENT_CLI_ENCODE_BENCH_H_
#define KVMILL_CLIENT_CLI_ENCODE_BENCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/refine.h"
#include "kernels/tile_format.h"
#include "storage/device/device.h"

namespace kvmill::cli {

struct EncodeBenchOptions {
  TileFormat format;
  Algorithm algorithm = Algorithm::kKvarn;  // On the host.
  std::uint32_t threads = 1;
  std::uint32_t repetitions = 15;  // Odd, so that the median is a measurement.
  // Of 16-bit values on a device, all at different places: more than any cache holds.
  std::size_t device_bytes = std::size_t{1} << 30;
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

// The same through a device: device_bytes of tiles in one call, from enqueuing to the end. There
// us_per_tile is the device's time divided by the tiles, memcpy a copy within its memory, bound_us
// the bytes of a tile and its record at that speed; `threads` means nothing. INTERNAL when a tile
// comes out wrong; the errors of the device.
absl::StatusOr<EncodeBenchResult> RunEncodeBenchOn(Device& device,
                                                   const EncodeBenchOptions& options);

// One thread of the reference encoder, in GB a second.
double MeasureReferenceEncoder(const TileFormat& format);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_ENCODE_BENCH_H_
