// The methods that can be evaluated, by name.
#ifndef KVMILL_CLIENT_EVAL_METHODS_H_
#define KVMILL_CLIENT_EVAL_METHODS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/eval/quantizer.h"
#include "kernels/tile_format.h"

namespace kvmill::eval {

struct Method {
  absl::string_view name;     // "kivi-g32".
  absl::string_view set;      // "baselines", "ablations" or "refinements"; empty: kvarn itself.
  absl::string_view summary;  // Half a line.
  std::unique_ptr<Quantizer> (*make)(const TileFormat& format);
  bool two_bit_keys = false;  // Only with formats that have 2-bit keys.
};

// The formats that methods are asked for: those of tiles, and the same with 3-bit values
// (k3v3_g128), which no tile has. INVALID_ARGUMENT as ParseTileFormat.
absl::StatusOr<TileFormat> ParseStudyFormat(absl::string_view name, std::uint32_t head_dim);
inline bool HasTiles(const TileFormat& format) { return format.value_bits != 3; }

// Every method, in the order of the documentation.
absl::Span<const Method> AllMethods();

// Names of methods and of sets ("baselines": all of a set, in order) to methods, each once.
// INVALID_ARGUMENT naming what is unknown, and everything that is known.
absl::StatusOr<std::vector<const Method*>> FindMethods(absl::Span<const std::string> names);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_METHODS_H_
