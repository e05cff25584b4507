// One unit of attention work and the memory of the worker that does it.
#ifndef KVMILL_KERNELS_CPU_ATTENTION_UNIT_H_
#define KVMILL_KERNELS_CPU_ATTENTION_UNIT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cpu/tile_method.h"

namespace kvmill {

// Row r of a sequence and KV head is query r / sharing of head r % sharing of those that share it.
struct AttentionUnit {
  const AttentionSequence* sequence = nullptr;
  std::uint32_t kv_head = 0;
  std::uint32_t first_row = 0;  // Of sequence and KV head.
  std::uint32_t row_count = 0;  // 1 to kUnitRowsMax.
  std::size_t first_query = 0;  // Of the sequence, in the query and output arrays.
  // Blocks of the run; those from sequence.block_count on are pieces of the tail, also `group`
  // tokens long.
  std::uint64_t block_begin = 0;
  std::uint64_t block_end = 0;
};

// Arrays of one worker, all aligned to 64 bytes, rows without gaps. Sized for kUnitRowsMax rows.
struct UnitWorkspace {
  float* query_of_raw;    // [rows][head_dim], in the frame of raw rows, ...
  float* query_of_tiles;  // ... and in that of tiles.
  float* from_raw;        // [rows][head_dim]: weighted sums of V, in the one frame ...
  float* from_tiles;      // ... and the other.
  float* folded;          // [rows][axis]: operand of a product.
  float* product;         // [rows][axis]: its result.
  SoftmaxState softmax;
  float* bias;           // [rows]: the part of a product that the codes do not change.
  float* scales;         // [6][axis]: S, Z, T of K and V.
  float* converted;      // 16 KiB: raw rows in fp32.
  std::byte* gathered;   // K and V of `group` tokens of the tail, made adjacent.
  std::byte* keys;       // [head_dim][group / 2]: 3-bit codes of K, widened.
  std::byte* scratch;    // kTileScratchBytes.
  std::byte* raw_query;  // kRawQueryBytes.
};

inline constexpr std::size_t kConvertedBytes = 16384;

// Lays a workspace out from `base`, which may be null to learn the size. Returns its size.
std::size_t LayOut(const TileFormat& format, std::byte* base, UnitWorkspace* workspace);

// Where the result of a unit goes: row r of the unit to output + r * head_dim and log_sum_exp + r.
struct UnitResult {
  float* output;
  float* log_sum_exp;
};

// Rows of a unit that sees nothing get 0 and -infinity.
void AttendUnit(const AttentionArgs& args, const AttentionUnit& unit, const TileMethod* method,
                const UnitWorkspace& workspace, const UnitResult& result);

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_ATTENTION_UNIT_H_
