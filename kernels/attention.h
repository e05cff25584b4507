// Decode attention that reads tiles in place: no dequantized tile is ever written.
//
// For one query head, with q' = q·H (the query in the rotated frame of the tiles), one tile gives
//
//   score[t] = T[t] * (sum_d (q'[d] * S[d]) * code[d,t] + sum_d q'[d] * Z[d])        K half
//   out'[d] += T[d] * (sum_t (p[t] * S[t]) * code[t,d] + sum_t p[t] * Z[t])          V half
//
// so scales fold into the query and into the probabilities once per tile, and the inner loops
// multiply a vector by small integers. `out'` is in the rotated frame and is un-rotated once at the
// end. Raw blocks (16-bit rows: attention sinks, heads that a tile cannot hold) and the unfinished
// tail may be mixed with tiles freely, block by block and head by head; each contributes in its own
// frame. A table of raw blocks only is plain 16-bit attention: the same core is the baseline that
// tiles are measured against.
//
// Reference: fp64 over decoded tiles, the oracle. Cpu: vectorized, runtime dispatch, agrees with
// the reference within 1e-3 relative Frobenius distance over all outputs (about 1e-4 is typical).
// Outputs come with their log-sum-exp, so that partial results over disjoint tokens (splits of one
// sequence, another store, the engine's own attention) merge exactly: MergeAttention.
//
// Defined and tested: where a query sees no token (empty sequence, everything masked) its output is
// 0 and its log-sum-exp -infinity; such a partial result changes nothing in a merge. No NaN comes
// out of finite input.
//
// Pure functions over the caller's memory: thread-safe, no allocation but in Reference and in error
// messages, no global state. Records are trusted to be what an encoder wrote (finite scales):
// callers verify checksums before.
#ifndef KVMILL_KERNELS_ATTENTION_H_
#define KVMILL_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/encode.h"
#include "kernels/engine_pages.h"
#include "kernels/tile_format.h"

namespace kvmill {

inline constexpr std::uint32_t kAttentionHeadsMax = 1024;  // Query heads.

// What one block of one KV head is.
enum class BlockKind : std::uint8_t {
  kAbsent = 0,  // Not here. Allowed only where no query looks (outside of the window or range).
  kTile = 1,    // `data` is a record: RecordBytes(format) bytes, any alignment.
  kRaw = 2,     // `data` is the K row of the block's first token, see RawLayout.
};

// An entry of the table. Entries need not be near each other in memory; each `data` may point into
// another slot, page or mapping.
struct AttentionBlock {
  BlockKind kind = BlockKind::kAbsent;
  const std::byte* data = nullptr;
};

// Where the rows of raw blocks are: K of token t at data + t * token_stride_bytes, V of it at
// data + value_offset_bytes + t * token_stride_bytes; channels of a row are adjacent, addresses
// need no alignment. One layout for all raw blocks of a call.
struct RawLayout {
  DType dtype = DType::kFloat16;
  std::ptrdiff_t token_stride_bytes = 0;
  std::ptrdiff_t value_offset_bytes = 0;
};

// K, then V, each [token_count][head_dim] without gaps: what the raw slot of a page holds. A full
// block has format.group tokens.
constexpr RawLayout PackedRawLayout(const TileFormat& format, DType dtype,
                                    std::uint32_t token_count) {
  const std::ptrdiff_t row_bytes = std::ptrdiff_t{2} * format.head_dim;
  return {dtype, row_bytes, row_bytes * static_cast<std::ptrdiff_t>(token_count)};
}

// What all sequences of a call share: one layer of a model.
struct AttentionShape {
  TileFormat format;
  std::uint32_t q_heads = 0;   // Query heads; a multiple of kv_heads.
  std::uint32_t kv_heads = 0;  // Query head i reads KV head i / (q_heads / kv_heads).
  float scale = 0;             // Multiplies q·k, usually 1 / sqrt(head_dim).
  float soft_cap = 0;          // c > 0: logits become c * tanh(logit / c). 0: no cap.
  std::uint32_t window = 0;    // W > 0: a query sees the last W tokens, its own included. 0: all.
  RawLayout raw;               // Of blocks of kind kRaw.
  // Of the query, the raw rows, the tail and the output. kModel is the usual one: tiles are rotated
  // and nothing else is; the kernel rotates the query and un-rotates the output. kRotated for
  // engines that keep everything multiplied by H: nothing is rotated here.
  Frame frame = Frame::kModel;
};

// K and V rows of one KV head beyond the last block of the table, in the engine's own pages.
struct TailHead {
  HeadPages k, v;
};

// One sequence: the tokens that it has in this call, and the queries that look at them. Tokens are
// numbered by position in the sequence; block b of the table holds the `group` tokens from
// b * group on.
struct AttentionSequence {
  // The entry of block b and KV head h is blocks[b * kv_heads + h].
  const AttentionBlock* blocks = nullptr;
  std::uint32_t block_count = 0;

  // [kv_heads], the tokens from block_count * group to token_end; not read when there are none.
  // The tail may be longer than a block.
  const TailHead* tail = nullptr;

  // Queries see the tokens token_begin <= t < token_end only. token_end is the length of the
  // sequence, except for a call over a part of it; the last block may be partly beyond it.
  std::uint64_t token_begin = 0;
  std::uint64_t token_end = 0;

  // Query i (0 <= i < query_count) is the token at position query_position + i; it sees the tokens
  // t <= query_position + i, and of those the last `window`. Decoding is query_count 1 and
  // query_position token_end - 1; prefill in chunks and verification of speculated tokens have
  // more queries, and are causal among themselves.
  std::uint32_t query_count = 1;
  std::uint64_t query_position = 0;
};

// Element types of queries and outputs.
enum class VectorType : std::uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct AttentionArgs {
  AttentionShape shape;
  absl::Span<const AttentionSequence> sequences;

  // [rows][q_heads][head_dim] without gaps, where the rows are the queries of the first sequence,
  // those of the second, and so on. `output` must not overlap anything that is read.
  const void* query = nullptr;
  void* output = nullptr;
  VectorType query_type = VectorType::kFloat32;
  VectorType output_type = VectorType::kFloat32;  // 16 bits: rounded to nearest, ties to even.

  float* log_sum_exp = nullptr;  // [rows][q_heads], natural logarithm; may be null.
};

// OK, or INVALID_ARGUMENT naming the field (sequence, block, head) and its value. Looks at every
// table entry that a query sees, and at no record or row. The kernels below expect arguments that
// pass.
absl::Status ValidateAttention(const AttentionArgs& args);

// fp64 over decoded tiles. Allocates the decoded heads: for tests, tools and the error column.
void AttentionReference(const AttentionArgs& args);

// Threads that the caller lends.
struct AttentionWorkers {
  std::uint32_t count = 1;
  // Calls work(context, w) once for each w = 0 .. count - 1, in any order, at the same time or not,
  // and returns after the last has returned. Null: one after the other on the calling thread.
  void (*run)(void* self, void (*work)(void* context, std::uint32_t worker),
              void* context) = nullptr;
  void* self = nullptr;
};

// A unit of work is (sequence, KV head, some queries, a run of blocks), shared by all query heads
// of that KV head; workers take units as they finish others, and the last one to finish a piece
// merges its runs. The result does not depend on who did what, but may differ in the last bits with
// `workers.count`, which decides the runs. `scratch` is aligned to 64 bytes and holds
// AttentionScratchBytes(args, workers.count), which does not grow with the length of a sequence.
// At the level "SCALAR" (kernels/simd.h) this is the reference, which allocates.
std::size_t AttentionScratchBytes(const AttentionArgs& args, std::uint32_t worker_count);
void AttentionCpu(const AttentionArgs& args, const AttentionWorkers& workers,
                  absl::Span<std::byte> scratch);

// How AttentionCpu multiplies codes: "AMX" (int8 tiles), "VNNI" (int8 dot products), "AVX2" (int16
// multiply-add), or "PORTABLE" (fp32, every SIMD level). Names() has those that this CPU can run at
// the level in use (kernels/simd.h), best first; Name() is the one in use.
std::vector<std::string_view> CpuAttentionNames();
std::string_view CpuAttentionName();

// On a device, where `args.sequences` and everything that `args` points to lies; it stays so until
// the stream has got there. The caller has validated the arguments. `worker_count` blocks of
// threads share the work, whatever the lengths, which are read on the device and may change between
// launches of a captured graph; a good number is how many the device holds at a time. `workspace`
// is aligned to 256 bytes and has AttentionCudaWorkspaceBytes(...) bytes, zeroed before its first
// use; one call at a time may use it. Two kernels are enqueued, nothing is allocated or
// synchronized. INVALID_ARGUMENT for a bad shape or one that takes more shared memory than the
// device has (every format fits into 99 KiB), INTERNAL when a launch fails, UNIMPLEMENTED in builds
// without CUDA (the workspace is then empty).
std::size_t AttentionCudaWorkspaceBytes(const TileFormat& format, std::size_t sequence_count,
                                        std::uint32_t worker_count);
absl::Status AttentionCuda(const AttentionArgs& args, std::uint32_t worker_count, void* workspace,
                           CUstream_st* stream);

// For tests and benchmarks: from now on use `name` wherever the level in use can run it; "" goes
// back to the best one. False, and nothing changes, if the name is not one of CpuAttentionNames().
// Process-wide: not while another thread runs AttentionCpu.
bool ForceCpuAttention(std::string_view name);

// A result over some of the tokens: fp32, as AttentionCpu makes it.
struct AttentionPart {
  const float* output = nullptr;       // [row_count][head_dim].
  const float* log_sum_exp = nullptr;  // [row_count].
};

// The result over the tokens of all parts, which must be disjoint. A row is one query of one head.
// `output` and `log_sum_exp` may be those of a part; `log_sum_exp` may be null.
void MergeAttention(absl::Span<const AttentionPart> parts, std::size_t row_count,
                    std::size_t head_dim, float* output, float* log_sum_exp);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_ATTENTION_H_
