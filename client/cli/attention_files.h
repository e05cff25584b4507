// Attention over a prompt's K and V in files: what tiles do to its outputs, and how fast it is.
#ifndef KVMILL_CLIENT_CLI_ATTENTION_FILES_H_
#define KVMILL_CLIENT_CLI_ATTENTION_FILES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/tile_format.h"

namespace kvmill::cli {

struct AttentionFilesOptions {
  std::string kv;       // Prefix of the 16-bit K and V (kv_files.h), fp16.
  std::string records;  // Prefix of their records: PREFIXL00.records, ...
  TileFormat format;    // Its head_dim comes from the files.
  std::uint32_t q_heads_per_kv_head = 8;
  std::uint32_t queries = 16;  // A layer, at positions spread over the last half of the tokens.
  std::uint32_t repetitions = 201;  // Of the timing; odd.
};

struct AttentionFilesResult {
  std::size_t layers = 0;
  std::uint32_t tokens = 0;  // That are in tiles; the tail is left out on both sides.
  double tiles_us = 0;       // Median of one query of one layer, all heads, one thread.
  double fp16_us = 0;        // The same over the 16-bit values.
  double ratio = 0;          // Median of fp16 / tiles within a repetition.
  double rel_error = 0;      // Outputs over tiles against fp64 on decoded tiles.
  double output_error = 0;   // Outputs over tiles against fp64 on the 16-bit values.
};

// Errors are relative Frobenius distances over all layers, queries and heads. Queries are Gaussian
// with unit variance, from a fixed seed: files hold no queries. INVALID_ARGUMENT naming the file
// when shapes and records do not fit, or when there is no full block.
absl::StatusOr<AttentionFilesResult> RunAttentionOnFiles(const AttentionFilesOptions& options);

}  // namespace kvmill::cli

#endif  // KVMILL_CLIENT_CLI_ATTENTION_FILES_H_
