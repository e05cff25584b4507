// AttentionCpu: cuts a call into units, hands them to the workers, merges.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "kernels/attention.h"
#include "kernels/attention_range.h"
#include "kernels/cpu/attention_unit.h"

namespace kvmill {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t Aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Enough units that workers finish at about the same time, and runs long enough that starting one
// (rotating queries, merging) is nothing beside it.
constexpr std::uint64_t kUnitsPerWorker = 6;
constexpr std::uint64_t kRunBlocksMin = 8;

// A piece is (sequence, KV head, rows): what one result belongs to. Its units are its runs.
struct SequencePlan {
  std::size_t first_query = 0;
  std::size_t first_piece = 0;
  std::size_t first_unit = 0;
  std::uint32_t row_pieces = 0;  // Pieces of one KV head.
  std::uint32_t runs = 0;        // Units of one piece.
  std::uint64_t block_begin = 0;
  std::uint64_t block_count = 0;
};

std::uint32_t Sharing(const AttentionShape& shape) { return shape.q_heads / shape.kv_heads; }

std::uint64_t RowsOf(const AttentionShape& shape, const AttentionSequence& s) {
  return std::uint64_t{s.query_count} * Sharing(shape);
}

// Of the sequence alone.
SequencePlan PlanSequence(const AttentionShape& shape, const AttentionSequence& s) {
  SequencePlan plan;
  plan.row_pieces =
      static_cast<std::uint32_t>((RowsOf(shape, s) + kUnitRowsMax - 1) / kUnitRowsMax);
  const TokenRange seen = SeenBySequence(shape, s);
  if (!seen.empty()) {
    const std::uint64_t group = shape.format.group;
    plan.block_begin = seen.begin / group;
    plan.block_count = (seen.end + group - 1) / group - plan.block_begin;
  }
  return plan;
}

struct Plan {
  std::uint64_t run_blocks = 0;
  std::size_t pieces = 0;
  std::size_t units = 0;
};

// Fills `plans` unless it is null.
Plan MakePlan(const AttentionArgs& args, std::uint32_t worker_count, SequencePlan* plans) {
  const AttentionShape& shape = args.shape;
  std::uint64_t work = 0;  // Blocks times pieces.
  std::uint64_t longest = 1;
  for (const AttentionSequence& s : args.sequences) {
    const SequencePlan p = PlanSequence(shape, s);
    work += p.block_count * p.row_pieces * shape.kv_heads;
    longest = std::max(longest, p.block_count);
  }
  Plan plan;
  const std::uint64_t units_wanted = worker_count == 1 ? 1 : kUnitsPerWorker * worker_count;
  plan.run_blocks = worker_count == 1
                        ? longest
                        : std::max(kRunBlocksMin, (work + units_wanted - 1) / units_wanted);
  std::size_t queries = 0;
  for (std::size_t i = 0; i < args.sequences.size(); ++i) {
    const AttentionSequence& s = args.sequences[i];
    SequencePlan p = PlanSequence(shape, s);
    p.first_query = queries;
    p.first_piece = plan.pieces;
    p.first_unit = plan.units;
    p.runs = static_cast<std::uint32_t>(
        std::max<std::uint64_t>(1, (p.block_count + plan.run_blocks - 1) / plan.run_blocks));
    const std::size_t pieces = std::size_t{p.row_pieces} * shape.kv_heads;
    plan.pieces += pieces;
    plan.units += pieces * p.runs;
    queries += s.query_count;
    if (plans != nullptr) plans[i] = p;
  }
  return plan;
}

// A partial result: [kUnitRowsMax][head_dim] outputs, then [kUnitRowsMax] log-sum-exps.
std::size_t PartialBytes(const TileFormat& format) {
  return Aligned(kUnitRowsMax * (std::size_t{format.head_dim} + 1) * sizeof(float));
}

struct Call {
  const AttentionArgs* args = nullptr;
  const TileMethod* method = nullptr;
  SequencePlan* sequences = nullptr;
  std::atomic<std::uint32_t>* unfinished = nullptr;  // [pieces]: runs that are not done.
  std::byte* partials = nullptr;                     // [units]
  std::byte* workspaces = nullptr;                   // [workers]
  std::size_t partial_bytes = 0;
  std::size_t workspace_bytes = 0;
  std::size_t units = 0;
  std::atomic<std::size_t>* next_unit = nullptr;

  UnitResult Partial(std::size_t unit) const {
    auto* output = reinterpret_cast<float*>(partials + unit * partial_bytes);
    return {output, output + kUnitRowsMax * args->shape.format.head_dim};
  }
};

// The arrays of a call, one after the other from `base`, which may be null. Returns their size.
std::size_t LayOutCall(const AttentionArgs& args, const Plan& plan, std::uint32_t worker_count,
                       std::byte* base, Call* call) {
  std::size_t bytes = 0;
  const auto take = [&](std::size_t size) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += Aligned(size);
    return at;
  };
  call->partial_bytes = PartialBytes(args.shape.format);
  call->workspace_bytes = LayOut(args.shape.format, nullptr, nullptr);
  call->units = plan.units;
  call->next_unit = reinterpret_cast<std::atomic<std::size_t>*>(take(sizeof(*call->next_unit)));
  call->sequences =
      reinterpret_cast<SequencePlan*>(take(args.sequences.size() * sizeof(SequencePlan)));
  call->unfinished = reinterpret_cast<std::atomic<std::uint32_t>*>(
      take(plan.pieces * sizeof(std::atomic<std::uint32_t>)));
  call->partials = take(plan.units * call->partial_bytes);
  call->workspaces = take(worker_count * call->workspace_bytes);
  return bytes;
}

// Copies the rows of a piece to where the caller wants them.
void Deliver(const Call& call, const AttentionUnit& unit, const UnitResult& from) {
  const AttentionArgs& args = *call.args;
  const std::uint32_t sharing = Sharing(args.shape);
  const std::size_t dim = args.shape.format.head_dim;
  for (std::uint32_t r = 0; r < unit.row_count; ++r) {
    const std::uint32_t row = unit.first_row + r;
    const std::size_t to = (unit.first_query + row / sharing) * args.shape.q_heads +
                           unit.kv_head * sharing + row % sharing;
    const float* output = from.output + r * dim;
    if (args.output_type == VectorType::kFloat32) {
      std::memcpy(static_cast<float*>(args.output) + to * dim, output, dim * sizeof(float));
    } else {
      const DType dtype =
          args.output_type == VectorType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
      auto* halves = static_cast<std::uint16_t*>(args.output) + to * dim;
      for (std::size_t d = 0; d < dim; ++d) halves[d] = FromFloat(output[d], dtype);
    }
    if (args.log_sum_exp != nullptr) args.log_sum_exp[to] = from.log_sum_exp[r];
  }
}

// Merges the runs of a piece, two at a time, into the first.
void MergeRuns(const Call& call, std::size_t first_unit, std::uint32_t runs,
               const AttentionUnit& unit) {
  const UnitResult into = call.Partial(first_unit);
  for (std::uint32_t run = 1; run < runs; ++run) {
    const UnitResult next = call.Partial(first_unit + run);
    const AttentionPart parts[] = {{into.output, into.log_sum_exp},
                                   {next.output, next.log_sum_exp}};
    MergeAttention(parts, unit.row_count, call.args->shape.format.head_dim, into.output,
                   into.log_sum_exp);
  }
}

void DoUnit(const Call& call, std::size_t index, const UnitWorkspace& workspace) {
  const AttentionArgs& args = *call.args;
  const SequencePlan* const begin = call.sequences;
  const SequencePlan* const end = begin + args.sequences.size();
  // The last sequence that starts at or before the unit. Those without units start where the next
  // one does, which comes last.
  const SequencePlan* plan =
      std::upper_bound(begin, end, index,
                       [](std::size_t i, const SequencePlan& p) { return i < p.first_unit; }) -
      1;
  const std::size_t in_sequence = index - plan->first_unit;
  const std::size_t piece = in_sequence / plan->runs;
  const std::size_t run = in_sequence % plan->runs;
  AttentionUnit unit;
  unit.sequence = &args.sequences[static_cast<std::size_t>(plan - begin)];
  unit.kv_head = static_cast<std::uint32_t>(piece / plan->row_pieces);
  unit.first_row = static_cast<std::uint32_t>(piece % plan->row_pieces * kUnitRowsMax);
  unit.row_count = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kUnitRowsMax, RowsOf(args.shape, *unit.sequence) - unit.first_row));
  unit.first_query = plan->first_query;
  // Runs as equal as they can be.
  unit.block_begin = plan->block_begin + plan->block_count * run / plan->runs;
  unit.block_end = plan->block_begin + plan->block_count * (run + 1) / plan->runs;
  AttendUnit(args, unit, call.method, workspace, call.Partial(index));
  if (plan->runs == 1) {
    Deliver(call, unit, call.Partial(index));
    return;
  }
  // The last one to finish sees what all others wrote.
  std::atomic<std::uint32_t>& unfinished = call.unfinished[plan->first_piece + piece];
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  MergeRuns(call, index - run, plan->runs, unit);
  Deliver(call, unit, call.Partial(index - run));
}

void Work(void* context, std::uint32_t worker) {
  const Call& call = *static_cast<const Call*>(context);
  UnitWorkspace workspace;
  LayOut(call.args->shape.format, call.workspaces + worker * call.workspace_bytes, &workspace);
  if (call.method != nullptr) call.method->open();
  for (;;) {
    const std::size_t unit = call.next_unit->fetch_add(1, std::memory_order_relaxed);
    if (unit >= call.units) break;
    DoUnit(call, unit, workspace);
  }
  if (call.method != nullptr) call.method->close();
}

}  // namespace

std::size_t LayOut(const TileFormat& format, std::byte* base, UnitWorkspace* workspace) {
  const std::size_t dim = format.head_dim;
  const std::size_t axis = std::max<std::size_t>(dim, format.group);
  std::size_t bytes = 0;
  const auto take = [&](std::size_t size) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += Aligned(size);
    return at;
  };
  const auto floats = [&](std::size_t count) {
    return reinterpret_cast<float*>(take(count * sizeof(float)));
  };
  UnitWorkspace w;
  w.query_of_raw = floats(kUnitRowsMax * dim);
  w.query_of_tiles = floats(kUnitRowsMax * dim);
  w.from_raw = floats(kUnitRowsMax * dim);
  w.from_tiles = floats(kUnitRowsMax * dim);
  w.folded = floats(kUnitRowsMax * axis);
  w.product = floats(kUnitRowsMax * axis);
  w.softmax.total = floats(kUnitRowsMax * 16);
  w.softmax.largest = floats(kUnitRowsMax);
  w.bias = floats(kUnitRowsMax);
  w.softmax.correction = floats(kUnitRowsMax);
  w.scales = floats(6 * axis);
  w.converted = reinterpret_cast<float*>(take(kConvertedBytes));
  w.gathered = take(RawBytes(format, format.group));
  w.keys = take(format.key_bits == 3 ? dim * format.group / 2 : 0);
  w.scratch = take(kTileScratchBytes);
  w.raw_query = take(kRawQueryBytes);
  if (workspace != nullptr) *workspace = w;
  return bytes;
}

std::size_t AttentionScratchBytes(const AttentionArgs& args, std::uint32_t worker_count) {
  Call call;
  return LayOutCall(args, MakePlan(args, worker_count, nullptr), worker_count, nullptr, &call);
}

void AttentionCpu(const AttentionArgs& args, const AttentionWorkers& workers,
                  absl::Span<std::byte> scratch) {
  if (!LevelHasVectors()) {  // No vectors: the reference is as good.
    AttentionReference(args);
    return;
  }
  Call call;
  call.args = &args;
  call.method = ChosenTileMethod();
  const Plan plan = MakePlan(args, workers.count, nullptr);
  LayOutCall(args, plan, workers.count, scratch.data(), &call);
  new (call.next_unit) std::atomic<std::size_t>(0);
  for (std::size_t i = 0; i < args.sequences.size(); ++i) new (call.sequences + i) SequencePlan;
  MakePlan(args, workers.count, call.sequences);
  for (std::size_t i = 0; i < args.sequences.size(); ++i) {
    const SequencePlan& s = call.sequences[i];
    for (std::size_t p = 0; p < std::size_t{s.row_pieces} * args.shape.kv_heads; ++p) {
      new (call.unfinished + s.first_piece + p) std::atomic<std::uint32_t>(s.runs);
    }
  }
  if (workers.run != nullptr) {
    workers.run(workers.self, &Work, &call);
  } else {
    for (std::uint32_t w = 0; w < workers.count; ++w) Work(&call, w);
  }
}

}  // namespace kvmill
