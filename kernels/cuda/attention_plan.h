// How the work of an attention call over a ragged batch is divided among blocks of threads, on the
// device: lengths may change between the launches of a captured graph.
//
// A unit is what shares keys and values: a sequence, a KV head, and kUnitRows rows (a row is one
// query of one of the query heads of that KV head). Its work is its blocks of tokens. The works of
// all units lie one behind the other; worker w of W takes an equal run of them, so it finishes some
// units, and shares at most the first and the last with its neighbours. Shared units are merged by
// the worker that arrives last: nobody waits.
#ifndef KVMILL_KERNELS_CUDA_ATTENTION_PLAN_H_
#define KVMILL_KERNELS_CUDA_ATTENTION_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/device.h"

namespace kvmill {
namespace device {

constexpr int kUnitRows = 8;

// What the kernels know of the call.
struct AttentionParameters {
  AttentionShape shape;
  RecordLayout layout;
  const AttentionSequence* sequences;
  unsigned sequence_count;
  const void* query;
  void* output;
  VectorType query_type;
  VectorType output_type;
  float* log_sum_exp;
  bool in_quarters;       // See WarpMemory.
  std::size_t key_bytes;  // Of shared memory for the keys of a warp, for the values, ...
  std::size_t value_bytes;
  std::size_t key_scale_bytes;  // ... for the scales of keys if they lie apart, ...
  std::size_t warp_bytes;       // ... and for all.
  // The workspace.
  unsigned* arrivals;     // [workers]: of the unit that the worker shares with the next ones.
  unsigned* work_end;     // [sequences]: works of the sequences up to and with this one.
  unsigned* first_query;  // [sequences]: queries of the sequences before.
  float* parts;           // [workers][2][kUnitRows * (head_dim + 1)]: outputs, then log2-sum-exps.
};

struct Seen {
  std::uint64_t begin;
  std::uint64_t end;
};

// As SeenByQuery of kernels/attention_range.h, which says why.
KVMILL_DEVICE Seen SeenBy(const AttentionShape& shape, const AttentionSequence& s, unsigned query) {
  std::uint64_t begin = s.token_begin;
  std::uint64_t end = s.query_position + query + 1;
  if (shape.window != 0 && end > shape.window && end - shape.window > begin) {
    begin = end - shape.window;
  }
  if (end > s.token_end) end = s.token_end;
  if (begin > end) begin = end;
  return {begin, end};
}

// Of one sequence: which blocks of tokens any of its queries sees, and its units.
struct SequencePlan {
  unsigned first_block;
  unsigned blocks;  // At least 1, so that somebody writes the output of an empty sequence.
  unsigned row_groups;
  unsigned works;  // blocks * row_groups * kv_heads
};

KVMILL_DEVICE SequencePlan PlanOf(const AttentionShape& shape, const AttentionSequence& s) {
  SequencePlan plan{0, 1, 0, 0};
  if (s.query_count == 0) return plan;
  const unsigned sharing = shape.q_heads / shape.kv_heads;
  plan.row_groups = (s.query_count * sharing + kUnitRows - 1) / kUnitRows;
  const std::uint64_t begin = SeenBy(shape, s, 0).begin;
  const std::uint64_t end = SeenBy(shape, s, s.query_count - 1).end;
  if (begin < end) {
    const unsigned group = shape.format.group;
    plan.first_block = static_cast<unsigned>(begin / group);
    plan.blocks = static_cast<unsigned>((end + group - 1) / group) - plan.first_block;
  }
  plan.works = plan.blocks * plan.row_groups * shape.kv_heads;
  return plan;
}

// A worker's share of one unit.
struct Share {
  unsigned sequence;
  unsigned kv_head;
  unsigned row_group;
  unsigned block;                 // The first.
  unsigned block_end;             // One past the last.
  unsigned unit_begin, unit_end;  // The whole unit's place among the works.
};

// The share that begins at `position`, cut at `end`.
KVMILL_DEVICE Share ShareAt(const AttentionParameters& p, unsigned position, unsigned end) {
  unsigned low = 0;  // The first sequence whose works end behind the position.
  unsigned high = p.sequence_count - 1;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if (p.work_end[middle] > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const SequencePlan plan = PlanOf(p.shape, p.sequences[low]);
  const unsigned within = position - (p.work_end[low] - plan.works);
  const unsigned unit = within / plan.blocks;
  const unsigned block = within % plan.blocks;
  Share share;
  share.sequence = low;
  share.kv_head = unit / plan.row_groups;
  share.row_group = unit % plan.row_groups;
  share.unit_begin = position - block;
  share.unit_end = share.unit_begin + plan.blocks;
  const unsigned last = share.unit_end < end ? share.unit_end : end;
  share.block = plan.first_block + block;
  share.block_end = share.block + (last - position);
  return share;
}

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_ATTENTION_PLAN_H_
