// Methods and formats over the K and V of a model: one row per method, format, layer and head.
#ifndef KVMILL_CLIENT_EVAL_ERROR_STUDY_H_
#define KVMILL_CLIENT_EVAL_ERROR_STUDY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/kv_files.h"
#include "client/cli/npy.h"
#include "client/eval/measure.h"
#include "client/eval/methods.h"
#include "client/eval/statistics.h"

namespace kvmill::eval {

struct ErrorRow {
  std::string method;
  std::string format;           // "k4v2_g128".
  double bits_per_element = 0;  // Of K and V together, metadata included.
  std::uint32_t layer = 0, head = 0;
  std::uint32_t n = 0;  // Tokens.
  HalfError k, v;
  double attention_error = 0;
  bool given_queries = false;
  std::uint32_t raw_blocks = 0;  // Halves of blocks that stayed in 16 bits.
};

struct ErrorStudy {
  std::vector<const Method*> methods;
  std::vector<std::string> formats;  // Names, as ParseTileFormat takes them.
  std::uint32_t queries_per_head = 64;
  std::uint64_t seed = 1;                                             // Of made-up queries.
  std::function<void(std::size_t done, std::size_t total)> progress;  // May be empty.
};

// Tokens that are measured: whole tiles of the format with the largest group, so that all methods
// and formats see the same ones.
absl::StatusOr<std::uint32_t> MeasuredTokens(const ErrorStudy& study,
                                             const std::vector<cli::LayerTensors>& layers);

// Ordered by format, method, layer, head. `queries`: for each layer [tokens, query heads, head_dim]
// or nothing; query head i reads KV head i / (query heads / KV heads), and a query sees the
// measured tokens up to its own. Of all of them queries_per_head are taken, evenly over the tokens.
//
// Methods that do not have a format are left out with it; INVALID_ARGUMENT when nothing is left,
// for a bad format, shape, or value (NaN and infinity, naming layer, token, head and channel), and
// when the tokens do not fill a tile.
absl::StatusOr<std::vector<ErrorRow>> MeasureErrors(
    const ErrorStudy& study, const std::vector<cli::LayerTensors>& layers,
    const std::vector<std::optional<cli::Tensor>>& queries);

// A number of a row that figures show.
struct Metric {
  const char* name;   // As in JSON.
  const char* title;  // For people.
  double (*of)(const ErrorRow& row);
};
absl::Span<const Metric> Metrics();  // The first is attention_error.

// All layers and heads of one method and format.
struct MethodSummary {
  std::string method;
  std::string format;
  double bits_per_element = 0;  // Mean.
  std::vector<Spread> spreads;  // One a metric.
  // Against the first method of the rows, in the same format, head by head; of the first method
  // itself, all ties.
  std::vector<SignTest> signs;
  std::uint32_t raw_blocks = 0;
  // No other has a smaller median attention error with as few bits or fewer.
  bool best_at_its_bits = false;
};

// In the order of the rows' formats, then by bits per element.
std::vector<MethodSummary> Summarize(const std::vector<ErrorRow>& rows);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_ERROR_STUDY_H_
