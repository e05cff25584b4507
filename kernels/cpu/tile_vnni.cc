// int8 with AVX-512 VNNI: vpdpbusd adds four products of uint8 and int8 into one int32 lane.
#include "kernels/cpu/tile_method.h"

#if defined(__x86_64__)
#include <cstring>

#include "kernels/cpu/tile_avx512.h"

#define KVMILL_TARGET __attribute__((target(KVMILL_AVX512 ",avx512vnni")))
#define KVMILL_INLINE __attribute__((always_inline, target(KVMILL_AVX512 ",avx512vnni"))) inline

namespace kvmill {
namespace {

// Sums of one row in two vectors of 16 columns, by plane. Not an array, and of the type that the
// instruction adds to: GCC 12 otherwise copies them from register to register at every step.
using Sums = int __attribute__((vector_size(64)));
struct RowSums {
  Sums high0, high1, low0, low1;
};

KVMILL_INLINE void AddQuad(Sums& sums, __m512i codes, __m512i four) {
  sums = reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), codes, four));
}

KVMILL_INLINE __m512i FourOf(const std::int8_t* plane) {
  std::int32_t four;
  std::memcpy(&four, plane, sizeof(four));
  return _mm512_set1_epi32(four);
}

template <std::size_t kLength>
KVMILL_INLINE void Add(__m512i x, __m512i y, const std::int8_t* planes, RowSums& sums) {
  const __m512i high = FourOf(planes);
  const __m512i low = FourOf(planes + kLength);
  AddQuad(sums.high0, x, high);
  AddQuad(sums.high1, y, high);
  AddQuad(sums.low0, x, low);
  AddQuad(sums.low1, y, low);
}

KVMILL_INLINE void Store(const RowSums& sums, std::int32_t* to) {
  _mm512_store_si512(to, reinterpret_cast<__m512i>(sums.high0));
  _mm512_store_si512(to + 16, reinterpret_cast<__m512i>(sums.low0));
  _mm512_store_si512(to + kVectorSums, reinterpret_cast<__m512i>(sums.high1));
  _mm512_store_si512(to + kVectorSums + 16, reinterpret_cast<__m512i>(sums.low1));
}

// kRows rows, 1, 2 or 4, times two vectors of quads.
template <std::size_t kRows, std::size_t kLength>
KVMILL_TARGET void MultiplyRows(const std::uint8_t* quads, const std::int8_t* planes,
                                std::int32_t* sums) {
  const std::uint8_t* other = quads + kLength * 16;
  RowSums row0{};
  RowSums row1{};
  RowSums row2{};
  RowSums row3{};
  for (std::size_t k = 0; k < kLength; k += 4) {
    const __m512i x = _mm512_load_si512(quads + k * 16);
    const __m512i y = _mm512_load_si512(other + k * 16);
    Add<kLength>(x, y, planes + k, row0);
    if constexpr (kRows > 1) Add<kLength>(x, y, planes + 2 * kLength + k, row1);
    if constexpr (kRows > 2) Add<kLength>(x, y, planes + 4 * kLength + k, row2);
    if constexpr (kRows > 2) Add<kLength>(x, y, planes + 6 * kLength + k, row3);
  }
  Store(row0, sums);
  if constexpr (kRows > 1) Store(row1, sums + 32);
  if constexpr (kRows > 2) Store(row2, sums + 64);
  if constexpr (kRows > 2) Store(row3, sums + 96);
}

template <std::uint32_t kBits, std::size_t kLength>
KVMILL_TARGET void MultiplyOf(const Avx512Product& product) {
  constexpr std::size_t kPlanes = 8 / kBits;
  const std::size_t vector_count = product.matrix.columns / 16;
  for (std::size_t v = 0; v < vector_count; v += kPlanes) {
    UnpackQuads<kBits>(product, v / kPlanes * 16, product.quads);
    for (std::size_t n = 0; n < kPlanes; n += 2) {
      const std::uint8_t* quads = product.quads + n * kLength * 16;
      for (std::size_t r = 0; r < product.row_count;) {
        const std::int8_t* planes = product.planes + 2 * r * kLength;
        std::int32_t* sums =
            product.sums +
            ((r / kBlockRows * vector_count + v + n) * 2 * kBlockRows + r % kBlockRows * 2) * 16;
        if (r + 4 <= product.row_count) {
          MultiplyRows<4, kLength>(quads, planes, sums);
          r += 4;
        } else if (r + 2 <= product.row_count) {
          MultiplyRows<2, kLength>(quads, planes, sums);
          r += 2;
        } else {
          MultiplyRows<1, kLength>(quads, planes, sums);
          r += 1;
        }
      }
    }
  }
}

template <std::uint32_t kBits>
void MultiplyBits(const Avx512Product& product) {
  switch (product.matrix.rows) {
    case 64:
      return MultiplyOf<kBits, 64>(product);
    case 128:
      return MultiplyOf<kBits, 128>(product);
    default:
      return MultiplyOf<kBits, 256>(product);
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

bool IsSupported() { return HasAvx512ForTiles() && __builtin_cpu_supports("avx512vnni") != 0; }

void Nothing() {}

}  // namespace

const TileMethod kTileVnni = {"VNNI",  IsSupported, Nothing, Nothing,
                              nullptr, Attend,      nullptr, nullptr};

}  // namespace kvmill
#endif  // __x86_64__
