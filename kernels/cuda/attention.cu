// Decode attention over tiles and raw rows: one kernel for lengths of any mixture, split over
// workers; a small one before it that adds up the lengths.
//
// Grid: a block of kAttentionWarps warps per worker; the warps take turns with the blocks of tokens
// of the worker's units, each with its own running maximum, and meet at the end of a unit. Shared
// memory: the queries and their planes, and per warp the planes of a tile and one record. Bound:
// the bytes of the records; docs/perf.md, "CUDA".
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/attention_warp.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda_formats.h"

namespace kvmill {
namespace device {
namespace {

template <int kDim>
constexpr unsigned kAttentionThreads = 32 * kAttentionWarps<kDim>;
constexpr unsigned kPlanThreads = 256;

// Sums of the works and of the queries over the sequences.
KVMILL_KERNEL(kPlanThreads, 1)
PlanKernel(AttentionParameters p) {
  KVMILL_DYNAMIC_SHARED(unsigned, sums);  // [2][kPlanThreads]
  const unsigned thread = ThreadIndex();
  unsigned works_before = 0;
  unsigned queries_before = 0;
  for (unsigned first = 0; first < p.sequence_count; first += kPlanThreads) {
    const bool has = first + thread < p.sequence_count;
    unsigned works = 0;
    unsigned queries = 0;
    if (has) {
      const AttentionSequence& s = p.sequences[first + thread];
      works = PlanOf(p.shape, s).works;
      queries = s.query_count;
    }
    const unsigned own_queries = queries;
    for (unsigned step = 1; step < kPlanThreads; step *= 2) {
      sums[thread] = works;
      sums[kPlanThreads + thread] = queries;
      SyncThreads();
      if (thread >= step) {
        works += sums[thread - step];
        queries += sums[kPlanThreads + thread - step];
      }
      SyncThreads();
    }
    if (has) {
      p.work_end[first + thread] = works_before + works;
      p.first_query[first + thread] = queries_before + queries - own_queries;
    }
    sums[thread] = works;
    sums[kPlanThreads + thread] = queries;
    SyncThreads();
    works_before += sums[kPlanThreads - 1];
    queries_before += sums[2 * kPlanThreads - 1];
    SyncThreads();
  }
}

template <int kDim>
struct AttentionShared {
  UnitQueries<kDim> queries;
  VectorPlanes<kDim> planes[kAttentionWarps<kDim>];
  float max[kAttentionWarps<kDim>][kUnitRows];
  float total[kAttentionWarps<kDim>][kUnitRows];
  float row_max[kUnitRows];  // Of the unit; after a merge log2-sum-exp.
  float row_total[kUnitRows];
  float log2_sum_exp[kUnitRows];
};

// Bytes of one of the two stages of a warp: raw rows, or what Load and LoadQuarter put there.
template <int kDim>
constexpr std::size_t StageBytes(std::size_t of_record) {
  constexpr std::size_t kRaw = kRawTokens * kRawPitch<kDim>;
  return of_record > kRaw ? of_record : kRaw;
}
constexpr std::size_t Larger(std::size_t a, std::size_t b) { return a > b ? a : b; }

// Sets the sizes of the stages; returns the bytes of a block of threads.
template <int kDim>
std::size_t LayOutShared(AttentionParameters& p, bool in_quarters) {
  const RecordLayout& l = p.layout;
  std::size_t scales = 0;
  p.in_quarters = in_quarters;
  if (in_quarters) {
    const std::size_t key_codes = (l.k_scale - l.k_codes) / 2;
    const std::size_t value_codes = (l.v_channel - l.v_codes) / (p.shape.format.group / 64u);
    p.key_bytes = p.value_bytes = StageBytes<kDim>(Larger(key_codes, value_codes));
    p.key_scale_bytes = l.v_codes - l.k_scale;
    scales = p.key_scale_bytes + (l.bytes - l.v_channel);
  } else {
    p.key_bytes = StageBytes<kDim>(l.v_codes);
    p.value_bytes = StageBytes<kDim>(l.bytes - l.v_codes);
    p.key_scale_bytes = 0;
  }
  p.warp_bytes = p.key_bytes + p.value_bytes + scales;
  return (sizeof(AttentionShared<kDim>) + 15) / 16 * 16 + kAttentionWarps<kDim> * p.warp_bytes;
}

// Each of the unit's rows times H, in shared memory. Begins and ends with a barrier.
template <int kDim>
KVMILL_DEVICE void RotateRows(float (&rows)[kUnitRows][kDim]) {
  constexpr float kNorm = kDim == 64 ? 0.125f : kDim == 128 ? 0.088388347648318447f : 0.0625f;
  for (unsigned half = 1; half < kDim; half *= 2) {
    SyncThreads();
    for (unsigned i = ThreadIndex(); i < kUnitRows * kDim / 2; i += kAttentionThreads<kDim>) {
      const unsigned row = i / (kDim / 2);
      const unsigned pair = i % (kDim / 2);
      const unsigned at = pair / half * 2 * half + pair % half;
      const float norm = half == kDim / 2 ? kNorm : 1.0f;
      const float a = rows[row][at];
      const float b = rows[row][at + half];
      rows[row][at] = (a + b) * norm;
      rows[row][at + half] = (a - b) * norm;
    }
  }
  SyncThreads();
}

KVMILL_DEVICE float LoadValue(const void* from, VectorType type, std::size_t index) {
  if (type == VectorType::kFloat32) return static_cast<const float*>(from)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[index];
  return type == VectorType::kFloat16 ? HalfToFloat(bits) : BFloat16ToFloat(bits);
}
KVMILL_DEVICE void StoreValue(float x, void* to, VectorType type, std::size_t index) {
  if (type == VectorType::kFloat32) {
    static_cast<float*>(to)[index] = x;
  } else {
    static_cast<std::uint16_t*>(to)[index] =
        type == VectorType::kFloat16 ? FloatToHalf(x) : FloatToBFloat16(x);
  }
}

// Where row `row` of the unit lies among the rows of queries and outputs; negative: beyond the
// last.
KVMILL_DEVICE std::ptrdiff_t OutputRow(const AttentionParameters& p, const Share& share,
                                       unsigned row) {
  const unsigned sharing = p.shape.q_heads / p.shape.kv_heads;
  const unsigned r = share.row_group * kUnitRows + row;
  if (r >= p.sequences[share.sequence].query_count * sharing) return -1;
  return static_cast<std::ptrdiff_t>(std::size_t{p.first_query[share.sequence] + r / sharing} *
                                         p.shape.q_heads +
                                     share.kv_head * sharing + r % sharing);
}

// Ends with a barrier.
template <int kDim>
KVMILL_DEVICE void LoadQueries(const AttentionParameters& p, const Share& share,
                               UnitQueries<kDim>& q) {
  for (unsigned i = ThreadIndex(); i < kUnitRows * kDim; i += kAttentionThreads<kDim>) {
    const std::ptrdiff_t row = OutputRow(p, share, i / kDim);
    const float x =
        row < 0 ? 0.0f
                : LoadValue(p.query, p.query_type, static_cast<std::size_t>(row) * kDim + i % kDim);
    q.plain[i / kDim][i % kDim] = q.rotated[i / kDim][i % kDim] = x;
  }
  SyncThreads();
  // Two rows a warp, as planes divided by their largest value.
  const int lane = static_cast<int>(LaneIndex());
  for (int r = static_cast<int>(WarpIndex()); r < kUnitRows; r += kAttentionWarps<kDim>) {
    float largest = 0;
    for (int c = lane; c < kDim; c += 32)
      largest = Max(largest, Max(q.plain[r][c], -q.plain[r][c]));
    largest = FromBits(ReduceMax(kAllLanes, BitsOf(largest)));
    const float inverse = largest > 0 ? 1.0f / largest : 0.0f;
    for (int c = lane; c < kDim; c += 32) {
      const float x = q.plain[r][c] * inverse;
      const std::uint16_t half = FloatToHalf(x);
      const std::uint16_t bfloat16 = FloatToBFloat16(x);
      q.half.rows[r][c] = half;
      q.half.rows[r + 8][c] = FloatToHalf(x - HalfToFloat(half));
      q.bfloat16.rows[r][c] = bfloat16;
      q.bfloat16.rows[r + 8][c] = FloatToBFloat16(x - BFloat16ToFloat(bfloat16));
    }
    if (lane == 0) q.scale[r] = largest;
  }
  if (p.shape.frame == Frame::kModel) RotateRows<kDim>(q.rotated);
  SyncThreads();
}

// The rows of a unit, and their log-sum-exps in units of log2, to where the caller wants them.
// `value(row, channel)` is an output.
template <int kDim, typename Value>
KVMILL_DEVICE void WriteRows(const AttentionParameters& p, const Share& share,
                             const float (&log2_sum_exp)[kUnitRows], Value value) {
  for (unsigned i = ThreadIndex(); i < kUnitRows * kDim; i += kAttentionThreads<kDim>) {
    const std::ptrdiff_t row = OutputRow(p, share, i / kDim);
    if (row < 0) continue;
    const auto at = static_cast<std::size_t>(row);
    StoreValue(value(i / kDim, i % kDim), p.output, p.output_type, at * kDim + i % kDim);
    if (i % kDim == 0 && p.log_sum_exp != nullptr) {
      p.log_sum_exp[at] = log2_sum_exp[i / kDim] * (1.0f / kLog2E);
    }
  }
}

template <int kDim>
KVMILL_DEVICE float* PartOf(const AttentionParameters& p, unsigned worker, bool begins) {
  return p.parts + (std::size_t{worker} * 2 + (begins ? 1 : 0)) * kUnitRows * (kDim + 1);
}

// Merges the parts of workers first .. last, which are all there, into the output.
template <int kDim>
KVMILL_DEVICE void MergeParts(const AttentionParameters& p, const Share& share, unsigned first,
                              unsigned last, AttentionShared<kDim>& shared) {
  const unsigned thread = ThreadIndex();
  if (thread < kUnitRows) {
    float largest = kMinusInfinity;
    for (unsigned w = first; w <= last; ++w) {
      largest = Max(largest, PartOf<kDim>(p, w, w == first)[kUnitRows * kDim + thread]);
    }
    float total = 0;
    if (largest != kMinusInfinity) {
      for (unsigned w = first; w <= last; ++w) {
        total += Exp2(PartOf<kDim>(p, w, w == first)[kUnitRows * kDim + thread] - largest);
      }
    }
    shared.log2_sum_exp[thread] = largest == kMinusInfinity ? largest : largest + Log2(total);
  }
  SyncThreads();
  WriteRows<kDim>(p, share, shared.log2_sum_exp, [&](unsigned row, unsigned channel) {
    const float merged = shared.log2_sum_exp[row];
    float sum = 0;
    if (merged == kMinusInfinity) return sum;
    for (unsigned w = first; w <= last; ++w) {
      const float* const part = PartOf<kDim>(p, w, w == first);
      sum = Fma(Exp2(part[kUnitRows * kDim + row] - merged), part[row * kDim + channel], sum);
    }
    return sum;
  });
}

// What the warps found, as outputs in the model's frame in shared.queries.plain, not yet divided by
// row_total. Begins and ends with a barrier.
template <int kDim>
KVMILL_DEVICE void MeetWarps(const AttentionParameters& p, const AttentionWarp<kDim>& warp,
                             AttentionShared<kDim>& shared) {
  const unsigned thread = ThreadIndex();
  const unsigned lane = LaneIndex();
  if (lane % 4 == 0) {
    shared.max[WarpIndex()][lane / 4] = warp.max();
    shared.total[WarpIndex()][lane / 4] = warp.total();
  }
  SyncThreads();
  if (thread < kUnitRows) {
    float largest = kMinusInfinity;
    for (int w = 0; w < kAttentionWarps<kDim>; ++w) largest = Max(largest, shared.max[w][thread]);
    float total = 0;
    for (int w = 0; w < kAttentionWarps<kDim>; ++w) {
      if (shared.max[w][thread] == kMinusInfinity) continue;
      total = Fma(shared.total[w][thread], Exp2(shared.max[w][thread] - largest), total);
    }
    shared.row_max[thread] = largest;
    shared.row_total[thread] = total;
    shared.log2_sum_exp[thread] = total > 0 ? largest + Log2(total) : kMinusInfinity;
  }
  SyncThreads();
  const float factor =
      warp.max() == kMinusInfinity ? 0.0f : Exp2(warp.max() - shared.row_max[lane / 4]);
  for (unsigned w = 0; w < kAttentionWarps<kDim>; ++w) {
    if (WarpIndex() == w) warp.Output(shared.queries, factor, w != 0);
    SyncThreads();
  }
  if (p.shape.frame == Frame::kModel) RotateRows<kDim>(shared.queries.rotated);
  for (unsigned i = thread; i < kUnitRows * kDim; i += kAttentionThreads<kDim>) {
    shared.queries.plain[i / kDim][i % kDim] += shared.queries.rotated[i / kDim][i % kDim];
  }
  SyncThreads();
}

template <int kDim>
KVMILL_KERNEL(kAttentionThreads<kDim>, 1)
AttentionKernel(AttentionParameters p) {
  KVMILL_DYNAMIC_SHARED(std::byte, memory);
  auto& shared = *reinterpret_cast<AttentionShared<kDim>*>(memory);
  std::byte* const stage =
      memory + (sizeof(AttentionShared<kDim>) + 15) / 16 * 16 + WarpIndex() * p.warp_bytes;
  std::byte* const values = stage + p.key_bytes;
  std::byte* const scales = values + p.value_bytes;
  const WarpMemory<kDim> warp_memory =
      p.in_quarters
          ? WarpMemory<kDim>{&shared.planes[WarpIndex()], stage, values, scales,
                             scales + p.key_scale_bytes}
          : WarpMemory<kDim>{&shared.planes[WarpIndex()], stage, values, stage + p.layout.k_scale,
                             values + (p.layout.v_channel - p.layout.v_codes)};

  const unsigned total = p.work_end[p.sequence_count - 1];
  const unsigned each = (total + GridBlocks() - 1) / GridBlocks();
  const unsigned worker = BlockIndex();
  unsigned position = worker * each;
  const unsigned end = position + each < total ? position + each : total;
  while (position < end) {
    const Share share = ShareAt(p, position, end);
    LoadQueries<kDim>(p, share, shared.queries);
    AttentionWarp<kDim> warp(p, share, shared.queries, warp_memory);
    warp.Run();
    MeetWarps<kDim>(p, warp, shared);

    const bool begins = position == share.unit_begin;
    const unsigned share_end = position + (share.block_end - share.block);
    const auto value = [&](unsigned row, unsigned channel) {
      const float t = shared.row_total[row];
      return t > 0 ? shared.queries.plain[row][channel] / t : 0.0f;
    };
    if (begins && share_end == share.unit_end) {
      WriteRows<kDim>(p, share, shared.log2_sum_exp, value);
    } else {
      float* const part = PartOf<kDim>(p, worker, begins);
      for (unsigned i = ThreadIndex(); i < kUnitRows * kDim; i += kAttentionThreads<kDim>) {
        part[i] = value(i / kDim, i % kDim);
        if (i % kDim == 0) part[kUnitRows * kDim + i / kDim] = shared.log2_sum_exp[i / kDim];
      }
      const unsigned first = share.unit_begin / each;
      const unsigned last = (share.unit_end - 1) / each;
      SyncThreads();
      bool arrived_last = false;
      if (ThreadIndex() == 0) {
        ThreadFence();
        arrived_last = AtomicAdd(&p.arrivals[first], 1) == last - first;
        ThreadFence();
      }
      if (SyncThreadsOr(arrived_last)) {
        MergeParts<kDim>(p, share, first, last, shared);
        if (ThreadIndex() == 0) p.arrivals[first] = 0;  // For the next launch.
      }
    }
    SyncThreads();  // Before the queries of the next unit.
    position = share_end;
  }
}

// How a kernel is started for a head_dim.
struct AttentionLaunch {
  void (*kernel)(AttentionParameters);
  unsigned threads;
  std::size_t shared_bytes;
};
// In halves if the device has the shared memory.
template <int kDim>
AttentionLaunch LaunchOf(AttentionParameters& p, std::size_t shared_bytes_max) {
  std::size_t shared_bytes = LayOutShared<kDim>(p, false);
  if (shared_bytes > shared_bytes_max) shared_bytes = LayOutShared<kDim>(p, true);
  return {AttentionKernel<kDim>, kAttentionThreads<kDim>, shared_bytes};
}

std::size_t RoundUp(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace
}  // namespace device

std::size_t AttentionCudaWorkspaceBytes(const TileFormat& format, std::size_t sequence_count,
                                        std::uint32_t worker_count) {
  return device::RoundUp(worker_count * sizeof(unsigned)) +
         2 * device::RoundUp(sequence_count * sizeof(unsigned)) +
         std::size_t{worker_count} * 2 * device::kUnitRows * (format.head_dim + 1u) * sizeof(float);
}

absl::Status AttentionCuda(const AttentionArgs& args, std::uint32_t worker_count, void* workspace,
                           CUstream_st* stream) {
  const AttentionShape& shape = args.shape;
  const absl::Status valid = ValidateCudaTileFormat(shape.format);
  if (!valid.ok()) return valid;
  if (worker_count == 0 || shape.kv_heads == 0 || shape.q_heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError("want workers, KV heads, and a multiple of those of q_heads");
  }
  if (args.sequences.empty()) return absl::OkStatus();
  auto* at = static_cast<std::byte*>(workspace);
  device::AttentionParameters p;
  p.shape = shape;
  p.layout = LayoutOf(shape.format);
  p.sequences = args.sequences.data();
  p.sequence_count = static_cast<unsigned>(args.sequences.size());
  p.query = args.query;
  p.output = args.output;
  p.query_type = args.query_type;
  p.output_type = args.output_type;
  p.log_sum_exp = args.log_sum_exp;
  p.arrivals = reinterpret_cast<unsigned*>(at);
  at += device::RoundUp(worker_count * sizeof(unsigned));
  p.work_end = reinterpret_cast<unsigned*>(at);
  at += device::RoundUp(args.sequences.size() * sizeof(unsigned));
  p.first_query = reinterpret_cast<unsigned*>(at);
  at += device::RoundUp(args.sequences.size() * sizeof(unsigned));
  p.parts = reinterpret_cast<float*>(at);

  // Before anything is enqueued.
  const std::size_t bytes_max = device::SharedBytesMax();
  const device::AttentionLaunch launch =
      shape.format.head_dim == 64    ? device::LaunchOf<64>(p, bytes_max)
      : shape.format.head_dim == 128 ? device::LaunchOf<128>(p, bytes_max)
                                     : device::LaunchOf<256>(p, bytes_max);
  if (bytes_max != 0 && launch.shared_bytes > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention over ", ToString(shape.format), ", head_dim ", shape.format.head_dim, ": ",
        launch.shared_bytes, " bytes of shared memory a block, the device has ", bytes_max));
  }
  const absl::Status planned = device::Launch(
      device::PlanKernel, {1, device::kPlanThreads, 2 * device::kPlanThreads * sizeof(unsigned)},
      stream, p);
  if (!planned.ok()) return planned;
  return device::Launch(launch.kernel, {worker_count, launch.threads, launch.shared_bytes}, stream,
                        p);
}

}  // namespace kvmill
