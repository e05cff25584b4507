// int8 with AVX-512 VNNI: vpdpbusd adds four products of uint8 and int8 into one int32 lane.
#include "kernels/cpu/code_product.h"

#if defined(__x86_64__)
#include "kernels/cpu/code_planes_avx512.h"

#define KVMILL_TARGET __attribute__((target(KVMILL_AVX512 ",avx512vnni")))

namespace kvmill {
namespace {

// kRows rows times two vectors of 16 columns.
template <std::uint32_t kBits, std::size_t kRows>
KVMILL_TARGET void MultiplyRows(const std::uint8_t* quads, const std::int8_t* planes,
                                const float* units, std::size_t length, std::size_t columns,
                                float* out) {
  constexpr std::size_t kPerByte = 8 / kBits;
  const std::size_t vector_bytes = length * 16;
  for (std::size_t first = 0; first < columns / 16; first += kPerByte) {
    __m512i high[kRows][kPerByte];
    __m512i low[kRows][kPerByte];
    for (std::size_t v = 0; v < kPerByte; v += 2) {
      const std::uint8_t* code = quads + (first + v) * vector_bytes;
      __m512i h0[kRows], h1[kRows], l0[kRows], l1[kRows];
      for (std::size_t r = 0; r < kRows; ++r) {
        h0[r] = h1[r] = l0[r] = l1[r] = _mm512_setzero_si512();
      }
      for (std::size_t k = 0; k < length; k += 4) {
        const __m512i c0 = _mm512_load_si512(code + k * 16);
        const __m512i c1 = _mm512_load_si512(code + vector_bytes + k * 16);
        for (std::size_t r = 0; r < kRows; ++r) {
          const auto* h = reinterpret_cast<const std::int32_t*>(planes + 2 * r * length + k);
          const auto* l = reinterpret_cast<const std::int32_t*>(planes + (2 * r + 1) * length + k);
          const __m512i qh = _mm512_set1_epi32(*h);
          const __m512i ql = _mm512_set1_epi32(*l);
          h0[r] = _mm512_dpbusd_epi32(h0[r], c0, qh);
          h1[r] = _mm512_dpbusd_epi32(h1[r], c1, qh);
          l0[r] = _mm512_dpbusd_epi32(l0[r], c0, ql);
          l1[r] = _mm512_dpbusd_epi32(l1[r], c1, ql);
        }
      }
      for (std::size_t r = 0; r < kRows; ++r) {
        high[r][v] = h0[r];
        high[r][v + 1] = h1[r];
        low[r][v] = l0[r];
        low[r][v + 1] = l1[r];
      }
    }
    for (std::size_t r = 0; r < kRows; ++r) {
      StoreColumns<kBits>(high[r], low[r], units[r], out + r * columns + first * 16);
    }
  }
}

template <std::uint32_t kBits>
KVMILL_TARGET void MultiplyOf(const CodeMatrix& matrix, const PlaneScratch& scratch,
                              const float* units, std::size_t row_count, float* out) {
  UnpackQuads<kBits>(matrix, scratch.quads);
  const std::size_t length = matrix.rows;
  const std::size_t columns = matrix.columns;
  std::size_t r = 0;
  for (; r + 4 <= row_count; r += 4) {
    MultiplyRows<kBits, 4>(scratch.quads, scratch.planes + 2 * r * length, units + r, length,
                           columns, out + r * columns);
  }
  for (; r + 2 <= row_count; r += 2) {
    MultiplyRows<kBits, 2>(scratch.quads, scratch.planes + 2 * r * length, units + r, length,
                           columns, out + r * columns);
  }
  if (r < row_count) {
    MultiplyRows<kBits, 1>(scratch.quads, scratch.planes + 2 * r * length, units + r, length,
                           columns, out + r * columns);
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

bool IsSupported() { return HasAvx512ForCodes() && __builtin_cpu_supports("avx512vnni") != 0; }

void Nothing() {}

}  // namespace

const CodeProduct kCodeProductVnni = {"VNNI", IsSupported, Nothing, Nothing, Multiply};

}  // namespace kvmill
#endif  // __x86_64__
