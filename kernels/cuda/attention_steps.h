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

constexpr int kRawTokens = 16;  // Of raw rows, worked on together.

// Of a block of threads.
template <int kDim>
constexpr int kAttentionWarps = kDim > 128 ? 2 : 4;

// The memory of one warp. `keys` and `values` hold the halves of a record, or kRawTokens rows of
// each. Where a device has too little shared memory for halves, records are worked on in quarters:
// the keys of half the channels, of the other ones, the values of 64 tokens, of the other ones. The
// first and third lie in `keys`, the others in `values`, scales apart.
template <int kDim>
struct WarpMemory {
  VectorPlanes<kDim>* planes;  // q * S of one tile.
  std::byte* keys;
  std::byte* values;
  std::byte* key_scales;
  std::byte* value_scales;
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
    return Find(step.block + kAttentionWarps<kDim>);
  }

  KVMILL_DEVICE DType TypeOf(const Step& step, bool values) const {
    if (!step.tail) return p_.shape.raw.dtype;
    const TailHead& tail = sequence_.tail[share_.kv_head];
    return values ? tail.v.dtype : tail.k.dtype;
  }

  // What a step begins with: to `keys` (first) or to `values`. The halves of a record or of raw
  // rows; of a record in quarters those of the keys.
  KVMILL_DEVICE void Load(const Step& step, bool second) const {
    if (!step.tile) {
      LoadRows(step, second);
    } else if (p_.in_quarters) {
      LoadQuarter(step, false, second);
    } else {
      const std::size_t first = second ? p_.layout.v_codes : 0;
      const std::size_t end = second ? p_.layout.bytes : p_.layout.v_codes;
      Copy(step.data + first, end - first, second ? memory_.values : memory_.keys);
    }
  }

  // Half of the codes of a record's keys or values, and with the first half the scales.
  KVMILL_DEVICE void LoadQuarter(const Step& step, bool values, bool second) const {
    const RecordLayout& l = p_.layout;
    const std::size_t codes = values ? l.v_codes : l.k_codes;
    const std::size_t scales = values ? l.v_channel : l.k_scale;
    const std::size_t end = values ? l.bytes : l.v_codes;
    // Of values the first 64 tokens, which may be all.
    const std::size_t half = values && group_ == 64 ? scales - codes : (scales - codes) / 2;
    if (second) {
      Copy(step.data + codes + half, scales - codes - half, memory_.values);
    } else {
      Copy(step.data + codes, half, memory_.keys);
      Copy(step.data + scales, end - scales, values ? memory_.value_scales : memory_.key_scales);
    }
  }

 private:
  KVMILL_DEVICE static void Copy(const std::byte* from, std::size_t bytes, std::byte* to) {
    const unsigned lane = LaneIndex();
    const auto count = static_cast<unsigned>(bytes);
    if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
      for (unsigned i = 16 * lane; i < count; i += 16 * 32) CpAsync16(to + i, from + i);
    } else {
      for (unsigned i = lane; i < count; i += 32) to[i] = from[i];
    }
  }

  KVMILL_DEVICE void LoadRows(const Step& step, bool values) const {
    const unsigned lane = LaneIndex();
    std::byte* const to = values ? memory_.values : memory_.keys;
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

  KVMILL_DEVICE unsigned Clip(std::uint64_t token, unsigned block) const {
    const std::uint64_t first = std::uint64_t{block} * group_;
    if (token <= first) return 0;
    return token - first < group_ ? static_cast<unsigned>(token - first) : group_;
  }

  // The first block from `block` on, in steps of the warps, that any row sees.
  KVMILL_DEVICE Step Find(unsigned block) const {
    for (; block < share_.block_end; block += kAttentionWarps<kDim>) {
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
