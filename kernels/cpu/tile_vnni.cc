// int8 with AVX-512 VNNI: vpdpbusd adds four products of uint8 and int8 into one int32 lane.
#include "kernels/cpu/tile_method.h"

#if defined(__x86_64__)
#include "kernels/cpu/tile_avx512.h"

#define KVMILL_TARGET __attribute__((target(KVMILL_AVX512 ",avx512vnni")))

namespace kvmill {
namespace {

// kRows rows times two vectors of quads, whose sums are `vector_sums` int32 apart.
template <std::size_t kRows>
KVMILL_TARGET void MultiplyRows(const std::uint8_t* quads, const std::int8_t* planes,
                                std::size_t length, std::int32_t* sums) {
  constexpr std::size_t kVectorSums = 2 * kBlockRows * 16;
  const std::uint8_t* other = quads + length * 16;
  __m512i a[2 * kRows];
  __m512i b[2 * kRows];
  for (std::size_t p = 0; p < 2 * kRows; ++p) a[p] = b[p] = _mm512_setzero_si512();
  for (std::size_t k = 0; k < length; k += 4) {
    const __m512i x = _mm512_load_si512(quads + k * 16);
    const __m512i y = _mm512_load_si512(other + k * 16);
    for (std::size_t p = 0; p < 2 * kRows; ++p) {
      const __m512i q =
          _mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(planes + p * length + k));
      a[p] = _mm512_dpbusd_epi32(a[p], x, q);
      b[p] = _mm512_dpbusd_epi32(b[p], y, q);
    }
  }
  for (std::size_t p = 0; p < 2 * kRows; ++p) {
    _mm512_store_si512(sums + p * 16, a[p]);
    _mm512_store_si512(sums + kVectorSums + p * 16, b[p]);
  }
}

template <std::uint32_t kBits>
KVMILL_TARGET void MultiplyOf(const Avx512Product& product) {
  constexpr std::size_t kPlanes = 8 / kBits;
  const std::size_t length = product.matrix.rows;
  const std::size_t vector_count = product.matrix.columns / 16;
  for (std::size_t v = 0; v < vector_count; v += kPlanes) {
    UnpackQuads<kBits>(product, v / kPlanes * 16, product.quads);
    for (std::size_t n = 0; n < kPlanes; n += 2) {
      const std::uint8_t* quads = product.quads + n * length * 16;
      for (std::size_t r = 0; r < product.row_count;) {
        const std::int8_t* planes = product.planes + 2 * r * length;
        std::int32_t* sums =
            product.sums +
            ((r / kBlockRows * vector_count + v + n) * 2 * kBlockRows + r % kBlockRows * 2) * 16;
        if (r + 4 <= product.row_count) {
          MultiplyRows<4>(quads, planes, length, sums);
          r += 4;
        } else if (r + 2 <= product.row_count) {
          MultiplyRows<2>(quads, planes, length, sums);
          r += 2;
        } else {
          MultiplyRows<1>(quads, planes, length, sums);
          r += 1;
        }
      }
    }
  }
}

void Multiply(const Avx512Product& product) {
  if (product.matrix.bits == 4) {
    MultiplyOf<4>(product);
  } else {
    MultiplyOf<2>(product);
  }
}

void Attend(const TileStep& step) { AttendTileAvx512(step, &Multiply); }

bool IsSupported() { return HasAvx512ForTiles() && __builtin_cpu_supports("avx512vnni") != 0; }

void Nothing() {}

}  // namespace

const TileMethod kTileVnni = {"VNNI", IsSupported, Nothing, Nothing, nullptr, Attend};

}  // namespace kvmill
#endif  // __x86_64__
