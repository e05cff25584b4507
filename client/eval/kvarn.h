// KVarN (Mueller et al., arXiv:2606.03458; docs/formats.md, "Algorithm"): through the kernels that
// kvmilld runs, and written once more in obvious loops with switches for the parts, so that each
// part can be taken away (ablations) or done better in the same format (refinements).
//
// With the default options the second writing gives the bits of EncodeTilesReference: tests compare
// codes, S, Z and T. Without the rotation, or without an axis, decoding is the same formula with
// the identity or with T = 1, and what needs not be stored is not counted.
#ifndef KVMILL_CLIENT_EVAL_KVARN_H_
#define KVMILL_CLIENT_EVAL_KVARN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "client/eval/quantizer.h"
#include "kernels/encode.h"
#include "kernels/refine.h"
#include "kernels/tile_format.h"

namespace kvmill::eval {

struct KvarnOptions {
  bool rotate = true;
  // Which axes the variance is normalized on; neither, or 0 iterations: not at all.
  bool token_axis = true;
  bool channel_axis = true;
  int iterations = kNormalizeIterations;
  float log_scale_min = -0.3f;  // The clamp of scales: values that are small all over stay so.

  // Refinements, after the normalization, row by row; a row keeps what has the smaller squared
  // error of decoded values. Same record, same decoder.
  bool clip_keys = false;    // The range of a row is also tried at 0.95, 0.9, ... 0.5 of its width.
  bool clip_values = false;  // "
  bool refit = false;        // Given codes, S and Z are those of least squares; given them, codes
                             // are the nearest; twice.
  bool refit_keys = false;   // The same for one half.
  bool refit_values = false;
  // Then, codes as they are, S and Z so that decoded values deviate from the row's mean as far as
  // the values do along them: what is nearest in squares is too small for that (a code's values
  // average to less than they are), and products with queries come out small.
  bool stretch = false;
};

// One half of one tile, as a record stores it. K: rows are channels, columns tokens; V: rows are
// tokens, columns channels.
struct KvarnHalf {
  bool raw = false;                   // A tile cannot hold it; the rest is then empty.
  std::vector<std::uint8_t> codes;    // [rows][columns].
  std::vector<std::uint16_t> scale;   // S, one a row; fp16 bits, as the next two.
  std::vector<std::uint16_t> zero;    // Z, one a row.
  std::vector<std::uint16_t> across;  // T, one a column.
};

// `block`: [tokens][head_dim], finite, in the model's frame. bits 1 to 8.
KvarnHalf EncodeKvarnHalf(Half half, absl::Span<const float> block, std::uint32_t tokens,
                          std::uint32_t head_dim, std::uint32_t bits, const KvarnOptions& options);

// EncodeTilesCpu, with kRefined EncodeRefinedTilesCpu, and DecodeTileToFloatCpu, the other half of
// each tile being zero. A half that a tile cannot hold is raw by itself, where kvmilld keeps both
// halves of such a head.
std::unique_ptr<Quantizer> MakeKvarn(const TileFormat& format,
                                     Algorithm algorithm = Algorithm::kKvarn);

std::unique_ptr<Quantizer> MakeKvarnWith(const TileFormat& format, const KvarnOptions& options);

}  // namespace kvmill::eval

#endif  // KVMILL_CLIENT_EVAL_KVARN_H_
