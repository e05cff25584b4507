// int8 with AMX: one tdpbsud multiplies 16 rows of 64 int8 by 64 rows of 16 uint8. The two planes
// of eight query heads are 16 rows: a group of 8 fills the unit.
#include "kernels/cpu/tile_method.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "kernels/cpu/raw_amx.h"
#include "kernels/cpu/tile_avx512.h"

#define KVMILL_TARGET __attribute__((target(KVMILL_AVX512 ",amx-tile,amx-int8")))

namespace kvmill {
namespace {

// What ldtilecfg reads: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Tile registers have names, not numbers: 0 and 1 are sums, 2 and 3 codes, 4 to 7 planes.
template <std::size_t kChunks>
KVMILL_TARGET inline void LoadPlanes(const std::int8_t* planes) {
  constexpr std::size_t kLength = 64 * kChunks;
  _tile_loadd(4, planes, kLength);
  if constexpr (kChunks > 1) _tile_loadd(5, planes + 64, kLength);
  if constexpr (kChunks > 2) {
    _tile_loadd(6, planes + 128, kLength);
    _tile_loadd(7, planes + 192, kLength);
  }
}

// Two vectors of quads times the planes of eight rows.
template <std::size_t kChunks>
KVMILL_TARGET inline void MultiplyVectors(const std::uint8_t* quads, std::int32_t* sums) {
  constexpr std::size_t kVectorBytes = 64 * kChunks * 16;
  const std::uint8_t* other = quads + kVectorBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, quads, 64);
  _tile_loadd(3, other, 64);
  _tile_dpbsud(0, 4, 2);
  _tile_dpbsud(1, 4, 3);
  if constexpr (kChunks > 1) {
    _tile_loadd(2, quads + 1024, 64);
    _tile_loadd(3, other + 1024, 64);
    _tile_dpbsud(0, 5, 2);
    _tile_dpbsud(1, 5, 3);
  }
  if constexpr (kChunks > 2) {
    _tile_loadd(2, quads + 2048, 64);
    _tile_loadd(3, other + 2048, 64);
    _tile_dpbsud(0, 6, 2);
    _tile_dpbsud(1, 6, 3);
    _tile_loadd(2, quads + 3072, 64);
    _tile_loadd(3, other + 3072, 64);
    _tile_dpbsud(0, 7, 2);
    _tile_dpbsud(1, 7, 3);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 2 * kBlockRows * 16, 64);
}

// A tile load has to wait until the stores before it have left for the cache: a group of vectors is
// multiplied after the next one was unpacked, and by then they have. Large groups are not worth it:
// what two of them push out of the L1 cache costs more.
template <std::uint32_t kBits, std::size_t kChunks>
KVMILL_TARGET void MultiplyOf(const Avx512Product& product) {
  constexpr std::size_t kPlanes = 8 / kBits;
  constexpr std::size_t kLength = 64 * kChunks;
  constexpr std::size_t kVectorBytes = kLength * 16;
  constexpr std::size_t kGroupBytes = kPlanes * kVectorBytes;
  constexpr std::size_t kGroups = kGroupBytes <= 4096 ? 2 : 1;  // Take turns.
  const std::size_t group_count = product.matrix.columns / 16 / kPlanes;
  const std::size_t vector_count = product.matrix.columns / 16;
  const std::size_t block_count = (product.row_count + kBlockRows - 1) / kBlockRows;
  const auto quads_of = [&](std::size_t group) {
    return product.quads + group % kGroups * kGroupBytes;
  };
  if (kGroups == 2) UnpackQuads<kBits>(product, 0, quads_of(0));
  // GCC's tile loads do not say that they read memory: what was stored has to be there.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (block_count == 1) LoadPlanes<kChunks>(product.planes);
  for (std::size_t g = 0; g < group_count; ++g) {
    const std::size_t unpacked = g + kGroups - 1;
    if (unpacked < group_count) UnpackQuads<kBits>(product, unpacked * 16, quads_of(unpacked));
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (std::size_t block = 0; block < block_count; ++block) {
      // Planes beyond the last row are whatever is there: their sums are not looked at.
      if (block_count != 1) LoadPlanes<kChunks>(product.planes + block * 2 * kBlockRows * kLength);
      const std::uint8_t* quads = quads_of(g);
      std::int32_t* sums = product.sums + (block * vector_count + g * kPlanes) * kVectorSums;
      for (std::size_t n = 0; n < kPlanes; n += 2) {
        MultiplyVectors<kChunks>(quads + n * kVectorBytes, sums + n * kVectorSums);
      }
    }
  }
}

template <std::uint32_t kBits>
KVMILL_TARGET void MultiplyBits(const Avx512Product& product) {
  switch (product.matrix.rows) {
    case 64:
      return MultiplyOf<kBits, 1>(product);
    case 128:
      return MultiplyOf<kBits, 2>(product);
    default:
      return MultiplyOf<kBits, 4>(product);
  }
}

void Multiply(const Avx512Product& product) {
  if (product.matrix.bits == 4) {
    MultiplyBits<4>(product);
  } else {
    MultiplyBits<2>(product);
  }
}

void Attend(const TileStep& step) { AttendTileAvx512(step, &Multiply); }

KVMILL_TARGET void Open() {
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
}

// Gives the registers' 8 KiB back: the kernel saves them with the thread as long as they are in
// use.
KVMILL_TARGET void Close() { _tile_release(); }

bool IsSupported() {
#if defined(__linux__)
  if (!HasAvx512ForTiles() || !RawAmxIsSupported()) return false;
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

const TileMethod kTileAmx = {"AMX",   IsSupported, Open,          Close,
                             nullptr, Attend,      PrepareRawAmx, AttendRawAmx};

}  // namespace kvmill
#endif  // __x86_64__
