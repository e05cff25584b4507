// int8 with AMX: one tdpbsud multiplies 16 rows of 64 int8 by 64 rows of 16 uint8. The two planes
// of eight query heads are 16 rows: a group of 8 fills the unit.
#include "kernels/cpu/code_product.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "kernels/cpu/code_planes_avx512.h"

#define KVMILL_TARGET __attribute__((target(KVMILL_AVX512 ",amx-tile,amx-int8")))

namespace kvmill {
namespace {

constexpr std::size_t kRowsTogether = 8;

// What ldtilecfg reads: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Sums of all vectors of 16 columns: sums[v][plane row][16], for the planes of up to eight rows.
template <std::size_t kChunks>
KVMILL_TARGET void MultiplyTiles(const std::uint8_t* quads, const std::int8_t* planes,
                                 std::size_t vector_count, std::int32_t* sums) {
  constexpr std::size_t kLength = 64 * kChunks;
  constexpr std::size_t kVectorBytes = kLength * 16;
  // GCC's tile loads do not say that they read memory: what was stored has to be there.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  // Tile registers have names, not numbers: 0 and 1 sums, 2 and 3 codes, 4 to 7 planes.
  _tile_loadd(4, planes, kLength);
  if constexpr (kChunks > 1) _tile_loadd(5, planes + 64, kLength);
  if constexpr (kChunks > 2) _tile_loadd(6, planes + 128, kLength);
  if constexpr (kChunks > 3) _tile_loadd(7, planes + 192, kLength);
  for (std::size_t v = 0; v < vector_count; v += 2) {
    const std::uint8_t* a = quads + v * kVectorBytes;
    const std::uint8_t* b = a + kVectorBytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, a, 64);
    _tile_loadd(3, b, 64);
    _tile_dpbsud(0, 4, 2);
    _tile_dpbsud(1, 4, 3);
    if constexpr (kChunks > 1) {
      _tile_loadd(2, a + 1024, 64);
      _tile_loadd(3, b + 1024, 64);
      _tile_dpbsud(0, 5, 2);
      _tile_dpbsud(1, 5, 3);
    }
    if constexpr (kChunks > 2) {
      _tile_loadd(2, a + 2048, 64);
      _tile_loadd(3, b + 2048, 64);
      _tile_dpbsud(0, 6, 2);
      _tile_dpbsud(1, 6, 3);
    }
    if constexpr (kChunks > 3) {
      _tile_loadd(2, a + 3072, 64);
      _tile_loadd(3, b + 3072, 64);
      _tile_dpbsud(0, 7, 2);
      _tile_dpbsud(1, 7, 3);
    }
    _tile_stored(0, sums + v * 256, 64);
    _tile_stored(1, sums + (v + 1) * 256, 64);
  }
}

template <std::uint32_t kBits>
KVMILL_TARGET void MultiplyOf(const CodeMatrix& matrix, const PlaneScratch& scratch,
                              const float* units, std::size_t row_count, float* out) {
  constexpr std::size_t kPerByte = 8 / kBits;
  UnpackQuads<kBits>(matrix, scratch.quads);
  const std::size_t vector_count = matrix.columns / 16;
  alignas(64) std::int32_t sums[kHeadDimMax / 16 * 256];
  for (std::size_t first = 0; first < row_count; first += kRowsTogether) {
    const std::int8_t* planes = scratch.planes + 2 * first * matrix.rows;
    // Rows beyond the last one are whatever is there: their sums are not looked at.
    switch (matrix.rows) {
      case 64:
        MultiplyTiles<1>(scratch.quads, planes, vector_count, sums);
        break;
      case 128:
        MultiplyTiles<2>(scratch.quads, planes, vector_count, sums);
        break;
      default:
        MultiplyTiles<4>(scratch.quads, planes, vector_count, sums);
        break;
    }
    const std::size_t last = first + kRowsTogether < row_count ? first + kRowsTogether : row_count;
    for (std::size_t r = first; r < last; ++r) {
      for (std::size_t v = 0; v < vector_count; v += kPerByte) {
        __m512i high[kPerByte];
        __m512i low[kPerByte];
        for (std::size_t m = 0; m < kPerByte; ++m) {
          const std::int32_t* from = sums + (v + m) * 256 + (r - first) * 32;
          high[m] = _mm512_load_si512(from);
          low[m] = _mm512_load_si512(from + 16);
        }
        StoreColumns<kBits>(high, low, units[r], out + r * matrix.columns + v * 16);
      }
    }
  }
}

KVMILL_TARGET void Multiply(const CodeMatrix& matrix, const float* rows, std::size_t row_count,
                            float* out, std::byte* scratch) {
  float units[kCodeProductRowsMax];
  const PlaneScratch parts(scratch);
  SplitRows(rows, row_count, matrix.rows, parts.planes, units);
  if (matrix.bits == 4) {
    MultiplyOf<4>(matrix, parts, units, row_count, out);
  } else {
    MultiplyOf<2>(matrix, parts, units, row_count, out);
  }
}

KVMILL_TARGET void Open() {
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
}

// Gives the registers' 8 KiB back: the kernel saves them with the thread as long as they are in
// use.
KVMILL_TARGET void Close() { _tile_release(); }

bool IsSupported() {
#if defined(__linux__)
  if (!HasAvx512ForCodes()) return false;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kTile = 1u << 24;
  constexpr unsigned kInt8 = 1u << 25;
  if ((d & kTile) == 0 || (d & kInt8) == 0) return false;
  // Linux gives a process the tile registers only when it asks for them.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

const CodeProduct kCodeProductAmx = {"AMX", IsSupported, Open, Close, Multiply};

}  // namespace kvmill
#endif  // __x86_64__
