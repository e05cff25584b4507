// The ways to attend to a tile, chosen at run time.
//
// A tile asks for one product twice: rows of numbers times a matrix of codes,
//
//   sum_k row[k] * code[k][n]
//
// for the scores with the codes of K (k: channels, n: tokens), for the outputs with the codes of V
// (k: tokens, n: channels). Both halves of a record lie the same way: row k holds its codes one
// after the other along n. Every method unpacks a code once and uses it for all rows of a unit;
// methods differ in the arithmetic. Integer ones first turn each row into fixed point of its own
// unit, 15 bits and a sign: an error far below what 4-bit codes cost.
//
// A method is either the product alone, between steps that Highway does, or the whole tile.
#ifndef KVMILL_KERNELS_CPU_TILE_METHOD_H_
#define KVMILL_KERNELS_CPU_TILE_METHOD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/ahead.h"
#include "kernels/engine_pages.h"
#include "kernels/tile_format.h"

namespace kvmill {

// Rows of one unit at most. A row is one query of one query head; all rows of a unit read the same
// KV head.
inline constexpr std::size_t kUnitRowsMax = 32;

struct CodeMatrix {
  const std::byte* codes = nullptr;  // Any alignment.
  std::uint32_t bits = 4;            // 2 or 4: those of 3 are widened first.
  std::size_t rows = 0;              // k: 64, 128 or 256.
  std::size_t columns = 0;           // n: the same.
};

// Part of a block that one row sees.
struct TokenSpan {
  std::size_t begin = 0;
  std::size_t end = 0;
};

// How products become logits in units of log 2.
struct LogitRule {
  float scale = 0;        // Over ln 2, unless there is a cap.
  float cap = 0;          // 0: none.
  float cap_of_log2 = 0;  // cap / ln 2.
  float cap_inverse = 0;
};

// The softmax of a unit so far, one entry a row.
struct SoftmaxState {
  float* total;       // [rows][16]: sum of the weights, in 16 parts.
  float* largest;     // Largest logit, in units of log 2.
  float* correction;  // Out: what the last block's new largest multiplies older sums by.
};

// One tile and the rows of a unit. All arrays are aligned to 64 bytes, rows without gaps.
struct TileStep {
  const TileFormat* format;
  const RecordLayout* layout;
  const std::byte* record;
  CodeMatrix keys;               // Of the record, or what was made of it.
  const std::byte* next_record;  // To be asked for; `record` again if there is none.
  std::size_t row_count;
  const float* query;    // [rows][head_dim], rotated.
  float* from_tiles;     // [rows][head_dim]: corrected, then added to. In plane order.
  SoftmaxState softmax;  // `correction` is for what else the unit has summed up.
  const LogitRule* rule;
  const TokenSpan* spans;  // [rows]
  std::byte* scratch;      // kTileScratchBytes.
};

// One half of a raw block: rows of 16-bit values.
struct RawHalf {
  const std::byte* first;
  std::ptrdiff_t stride_bytes;
  DType dtype;
};

// One raw block and the rows of a unit.
struct RawStep {
  RawHalf k, v;
  std::size_t token_count;  // Rows of K and V that may be read; not 0.
  std::size_t dim;
  std::size_t row_count;
  const std::byte* query;  // What prepare_raw made.
  float* from_raw;         // [rows][dim]: corrected, then added to.
  SoftmaxState softmax;
  const LogitRule* rule;
  const TokenSpan* spans;  // [rows]
  Ahead* ahead;            // What to ask for meanwhile.
  std::byte* scratch;      // kTileScratchBytes.
};

struct TileMethod {
  const char* name;
  bool (*is_supported)();  // By this CPU and operating system. Any thread.
  // Around any number of calls on one thread.
  void (*open)();
  void (*close)();
  // One of the two; the other is null. `rows` must be finite.
  void (*multiply)(const CodeMatrix& matrix, const float* rows, std::size_t row_count, float* out,
                   std::byte* scratch);
  void (*attend)(const TileStep& step);
  // Raw blocks, if the method has its own way with them; else both are null and Highway's is used.
  // prepare_raw brings [rows][dim] queries into the form of RawStep::query, kRawQueryBytes.
  void (*prepare_raw)(const float* query, std::size_t row_count, std::size_t dim, std::byte* to);
  void (*attend_raw)(const RawStep& step);
};

// Two planes of bf16 of all rows, a scale per row.
inline constexpr std::size_t kRawQueryBytes =
    std::size_t{2} * 2 * kUnitRowsMax * kHeadDimMax + sizeof(float) * kUnitRowsMax;

// For a tile: unpacked codes of the largest half (256 x 128), 16 bits each; rows in fixed point;
// int32 sums of two planes of them; scales. Raw rows take a little more, see raw_amx.cc.
inline constexpr std::size_t kTileScratchBytes = std::size_t{160} << 10;
static_assert(kTileScratchBytes >= std::size_t{2} * kHeadDimMax * kGroupMax +
                                       std::size_t{10} * kUnitRowsMax * kHeadDimMax +
                                       std::size_t{6 * 4} * kHeadDimMax);

// Planes: codes of a byte are taken out by masks, which gives vectors of every second or fourth
// column. In plane order, position i of a row of `bits`-bit codes holds column PlaneColumn(i,
// bits).
constexpr std::size_t PlaneColumn(std::size_t i, std::uint32_t bits) {
  const std::size_t planes = 8 / bits;
  return i / (16 * planes) * (16 * planes) + i % 16 * planes + i / 16 % planes;
}

#if defined(__x86_64__)
extern const TileMethod kTileAmx;   // "AMX": int8, the whole tile.
extern const TileMethod kTileVnni;  // "VNNI": int8, the whole tile.
extern const TileMethod kTileAvx2;  // "AVX2": int16, the product.
#endif

// The one to use, for the level in use and what was forced; null for the portable product, which is
// part of the kernel of each level.
const TileMethod* ChosenTileMethod();

// Whether the level in use is more than "SCALAR".
bool LevelHasVectors();

}  // namespace kvmill

#endif  // KVMILL_KERNELS_CPU_TILE_METHOD_H_
