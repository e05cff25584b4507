// Which blocks of tokens one warp of decode attention works on, and how their keys and values come
// into its shared memory.
#ifndef KVMILL_KERNELS_CUDA_ATTENTION_STEPS_H_
#define KVMILL_KERNELS_CUDA_ATTENTION_STEPS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/attention_codes.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile_registers.h"

namespace kvmill {
namespace device {

constexpr int kAttentionWarps = 4;  // Of a block of threads.
constexpr int kRawTokens = 16;      // Of raw rows, worked on together.

// The memory of one warp: `keys` and `values` hold the halves of a record or kRawTokens raw rows.
template <int kDim>
struct WarpMemory {
  VectorPlanes<kDim>* planes;  // q * S of one tile.
  std::byte* keys;
  std::byte* values;
};

template <int kDim>
constexpr unsigned kRawPitch = 2 * kDim + 16;  // Bytes between staged raw rows: other banks.

template <int kDim>
class AttentionSteps {
 public:
  // A whole tile, or kRawTokens raw rows. The same in all lanes.
  struct Step {
    bool valid;
    bool tile;
    bool tail;
    unsigned block;
    unsigned first;  // Token of the block; 0 for tiles.
    unsigned limit;  // Tokens of the block that somebody sees end here.
    const std::byte* data;
  };

  KVMILL_DEVICE AttentionSteps(const AttentionParameters& p, const Share& share,
                               const WarpMemory<kDim>& memory)
      : p_(p),
        sequence_(p.sequences[share.sequence]),
        share_(share),
        memory_(memory),
        group_(p.shape.format.group),
        seen_{0, 0} {
    const unsigned sharing = p.shape.q_heads / p.shape.kv_heads;
    const unsigned row = share.row_group * kUnitRows + LaneIndex() / 4;
    if (row < sequence_.query_count * sharing) seen_ = SeenBy(p.shape, sequence_, row / sharing);
  }

  // What the row of this lane (lane / 4) sees of a block, as tokens of the block: begin and end.
  KVMILL_DEVICE unsigned Begin(unsigned block) const { return Clip(seen_.begin, block); }
  KVMILL_DEVICE unsigned End(unsigned block) const { return Clip(seen_.end, block); }

  KVMILL_DEVICE Step First() const { return Find(share_.block + WarpIndex()); }

  KVMILL_DEVICE Step After(const Step& step) const {
    if (!step.tile && step.first + kRawTokens < step.limit) {
      Step next = step;
      next.first += kRawTokens;
      return next;
    }
    return Find(step.block + kAttentionWarps);
  }

  KVMILL_DEVICE DType TypeOf(const Step& step, bool values) const {
    if (!step.tail) return p_.shape.raw.dtype;
    const TailHead& tail = sequence_.tail[share_.kv_head];
    return values ? tail.v.dtype : tail.k.dtype;
  }

  KVMILL_DEVICE void LoadHalf(const Step& step, bool values) const {
    const unsigned lane = LaneIndex();
    std::byte* const to = values ? memory_.values : memory_.keys;
    if (step.tile) {
      const std::size_t first = values ? p_.layout.v_codes : 0;
      const auto bytes =
          static_cast<unsigned>((values ? p_.layout.bytes : p_.layout.v_codes) - first);
      const std::byte* const from = step.data + first;
      if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
        for (unsigned i = 16 * lane; i < bytes; i += 16 * 32) CpAsync16(to + i, from + i);
      } else {
        for (unsigned i = lane; i < bytes; i += 32) to[i] = from[i];
      }
      return;
    }
    constexpr unsigned kPieces = kDim / 8;  // Of a row.
    for (unsigned i = lane; i < kRawTokens * kPieces; i += 32) {
      const unsigned token = step.first + i / kPieces;
      std::byte* const at = to + i / kPieces * kRawPitch<kDim> + i % kPieces * 16;
      if (token >= step.limit) {  // There may be no such row.
        Store16(at, Vector16{{0, 0, 0, 0}});
        continue;
      }
      const std::byte* row;
      std::ptrdiff_t stride = 2;
      if (step.tail) {
        const TailHead& tail = sequence_.tail[share_.kv_head];
        const HeadPages& pages = values ? tail.v : tail.k;
        row = TokenRow(pages, (step.block - sequence_.block_count) * group_ + token);
        stride = pages.channel_stride_bytes;
      } else {
        row = step.data + (values ? p_.shape.raw.value_offset_bytes : 0) +
              static_cast<std::ptrdiff_t>(token) * p_.shape.raw.token_stride_bytes;
      }
      row += static_cast<std::ptrdiff_t>(i % kPieces * 8) * stride;
      if (stride == 2 && reinterpret_cast<std::uintptr_t>(row) % 16 == 0) {
        CpAsync16(at, row);
      } else {
        std::uint16_t eight[8];
        LoadEight(row, stride, eight);
        Vector16 v;
        KVMILL_UNROLL
        for (int j = 0; j < 4; ++j) {
          v.word[j] = eight[2 * j] | static_cast<std::uint32_t>(eight[2 * j + 1]) << 16;
        }
        Store16(at, v);
      }
    }
  }

 private:
  KVMILL_DEVICE unsigned Clip(std::uint64_t token, unsigned block) const {
    const std::uint64_t first = std::uint64_t{block} * group_;
    if (token <= first) return 0;
    return token - first < group_ ? static_cast<unsigned>(token - first) : group_;
  }

  // The first block from `block` on, in steps of the warps, that any row sees.
  KVMILL_DEVICE Step Find(unsigned block) const {
    for (; block < share_.block_end; block += kAttentionWarps) {
      const unsigned begin = Clip(seen_.begin, block);
      const unsigned end = Clip(seen_.end, block);
      const bool sees = begin < end;
      const unsigned limit = ReduceMax(kAllLanes, sees ? end : 0);
      const unsigned first = ReduceMin(kAllLanes, sees ? begin : group_);
      if (limit == 0) continue;
      Step step{true, false, true, block, first / kRawTokens * kRawTokens, limit, nullptr};
      if (block < sequence_.block_count) {
        const AttentionBlock& entry =
            sequence_.blocks[std::size_t{block} * p_.shape.kv_heads + share_.kv_head];
        step.tail = false;
        step.tile = entry.kind == BlockKind::kTile;
        step.data = entry.data;
        if (step.tile) step.first = 0;
      }
      return step;
    }
    return Step{false, false, false, 0, 0, 0, nullptr};
  }

  const AttentionParameters& p_;
  const AttentionSequence& sequence_;
  const Share& share_;
  const WarpMemory<kDim> memory_;
  const unsigned group_;
  Seen seen_;  // By the row of this lane.
};

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_ATTENTION_STEPS_H_
