// Speed and error of attention over tiles on this machine, next to 16-bit attention and to what
// memory can deliver.
#ifndef KVMILL_CLIENT_CLI_ATTENTION_BENCH_H_
#define KVMILL_CLIENT_CLI_ATTENTION_BENCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tile_format.h"
#include "storage/device/device.h"

namespace kvmill::cli {

struct AttentionBenchOptions {
  TileFormat format;
  std::uint64_t context = 32768;  // Tokens of the one sequence that decodes.
  std::uint32_t q_heads = 64;
  std::uint32_t kv_heads = 8;
  std::uint32_t threads = 1;
  std::uint32_t repetitions = 21;  // Odd, so that the median is a measurement.
  // Of records on a device, all at different places: more than any cache holds.
  std::size_t device_bytes = std::size_t{1} << 30;
};

struct AttentionBenchResult {
  // Per repetition, ascending: microseconds of one query token of one layer, over tiles and over
  // fp16, and fp16 divided by tiles within a repetition.
  std::vector<double> tiles_us, fp16_us, ratio;
  // The same in processor time per thread: what the machine does beside this hardly counts. And the
  // reads of the same repetitions, in GB a second of processor time per thread, times threads.
  std::vector<double> tiles_cpu_us, fp16_cpu_us, ratio_cpu, read_cpu_gb_per_s;
  double tiles_gb_per_s = 0;  // Record bytes at the median. 1 GB = 1e9 bytes.
  double fp16_gb_per_s = 0;   // 16-bit bytes at the median.
  double read_gb_per_s = 0;   // As many threads reading memory, the median of the same repetitions.
  double rel_error = 0;       // Over all outputs, against fp64 on the decoded tiles.
  double rel_error_fp16 = 0;  // The 16-bit attention, against fp64 on its own rows.
  std::uint32_t layers = 0;   // Distinct K and V that the repetitions go round.
};

// One sequence of `context` tokens, one query, as a decoding step of one layer does it. Every
// repetition takes the next layer, and the layers together are larger than a cache, so that K and V
// come from memory, as they do when a model's layers take turns. INVALID_ARGUMENT if the heads do
// not divide.
absl::StatusOr<AttentionBenchResult> RunAttentionBench(const AttentionBenchOptions& options);

// The same through a device, where one layer of one sequence would be over before the device is
// busy: one call attends to a batch of sequences, device_bytes of records together, and times are
// divided by their number, which `layers` has. `read` is what a copy within the device's memory
// reads and writes; there is no processor time; `threads` means nothing.
absl::StatusOr<AttentionBenchResult> RunAttentionBenchOn(Device& device,
                                                         const AttentionBenchOptions& options);

// INVALID_ARGUMENT if the heads do not divide.
absl::Status CheckHeads(const AttentionBenchOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_ATTENTION_BENCH_H_
