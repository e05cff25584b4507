// The scratch of the cpu encoder.
#ifndef KVMILL_KERNELS_CPU_WORKSPACE_H_
#define KVMILL_KERNELS_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/tile_format.h"

namespace kvmill {

inline constexpr std::size_t kAxisMax = kHeadDimMax;  // The longer of the two axes of a tile.
static_assert(kGroupMax <= kAxisMax);

// Tokens that are worked on together: 16 rows of a tile stay in the L1 cache between the two passes
// over them.
inline constexpr std::size_t kBlockTokens = 16;

// One axis of a tile (channels or tokens) during normalization. The current tile is never computed:
// its value at (t, d) is tile[t][d] * token.weight[t] * channel.weight[d].
struct AxisState {
  alignas(64) float scale[kAxisMax];        // s: what the axis is divided by.
  alignas(64) float weight[kAxisMax];       // 1 / s.
  alignas(64) float deviation[kAxisMax];    // Sample standard deviation of the current tile.
  alignas(64) float sum[kAxisMax];          // Sum of (value - pivot), without this axis' weight.
  alignas(64) float sum_squares[kAxisMax];  // Of the same.
  alignas(64) float pivot[kAxisMax];        // Close to the mean, so that the sums do not cancel.
  alignas(64) float best_scale[kAxisMax];   // Of the iterate that is kept.
};

// What is rounded to fp16 and what came out, for one half of a tile.
struct AbsorbedScales {
  alignas(64) float step[kAxisMax];           // The scale of a row before its s is absorbed.
  alignas(64) float step_inverse[kAxisMax];   // 1 / step.
  alignas(64) float scale[kAxisMax];          // S.
  alignas(64) float zero[kAxisMax];           // Z.
  alignas(64) float stored_scale[kAxisMax];   // S as fp16 holds it.
  alignas(64) float stored_zero[kAxisMax];    // Z as fp16 holds it.
  alignas(64) float across[kAxisMax];         // T, times a unit (see AbsorbAcross).
  alignas(64) float stored_across[kAxisMax];  // The same of T as fp16 holds it.
  alignas(64) float low[kAxisMax];            // The smallest value of a row.
  alignas(64) float high[kAxisMax];           // The largest.
};

// Rows while they are refined (kernels/refine.h). `steps` of a value: (x / T - zero) / scale, the
// code it would have if codes were not whole numbers.
struct RefinedRows {
  alignas(64) float scale[kAxisMax];          // S.
  alignas(64) float zero[kAxisMax];           // Z.
  alignas(64) float scale_inverse[kAxisMax];  // 1 / S; 0 where there is no S.
  alignas(64) float zero_steps[kAxisMax];     // Z / S; "
  // With weights T^2, for the scale and zero above: of steps.
  alignas(64) float mean[kAxisMax];
  alignas(64) float variance[kAxisMax];
  // Sums with weights T^2, q being codes and u steps.
  alignas(64) float q[kAxisMax];
  alignas(64) float qq[kAxisMax];
  alignas(64) float qu[kAxisMax];
  alignas(64) float u[kAxisMax];
  alignas(64) float uu[kAxisMax];
  alignas(64) float weight[kAxisMax];  // T^2, of columns.
  float weight_inverse;                // 1 / the sum of these.
  // Values: the same sums of a block of rows, before lanes are added up.
  alignas(64) float lanes[5][kBlockTokens * 16];
};

struct EncodeWorkspace {
  AxisState channel;
  AxisState token;
  AbsorbedScales absorbed;
  RefinedRows refined;
  alignas(64) float next_scale[kAxisMax];
  alignas(64) std::uint8_t codes[kAxisMax];  // One row of codes before packing.
  // Keys: word w of channel d holds the packed codes of its tokens 32/bits * w and on.
  // [words][channels]
  alignas(64) std::uint32_t words[kGroupMax * 4 / 32 * kHeadDimMax];
  alignas(64) float tile[1];  // [group][head_dim], rotated; the rest of the scratch.
};

constexpr std::size_t EncodeWorkspaceBytes(const TileFormat& format) {
  return offsetof(EncodeWorkspace, tile) +
         std::size_t{format.group} * format.head_dim * sizeof(float);
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_WORKSPACE_H_
