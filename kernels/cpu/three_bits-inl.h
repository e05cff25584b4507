// Codes of 3 bits from and to the 4 bits that the kernels work with. Included once per SIMD target.
//
// A word is 8 codes that follow each other in a row: as 4 bits each, the first in the low bits, or
// narrow, as a record has them: the low two bits of all in bits 0 to 15, the high bits in 16 to 23.
// Bits are moved in steps of half the distance, as one interleaves bits.
#if defined(KVMILL_KERNELS_CPU_THREE_BITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVMILL_KERNELS_CPU_THREE_BITS_INL_H_
#undef KVMILL_KERNELS_CPU_THREE_BITS_INL_H_
#else
#define KVMILL_KERNELS_CPU_THREE_BITS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvmill {
namespace HWY_NAMESPACE {

template <int kDistance, class D>
HWY_INLINE hn::Vec<D> SpreadBits(D d, hn::Vec<D> v, std::uint32_t mask) {
  return hn::And(hn::Or(v, hn::ShiftLeft<kDistance>(v)), hn::Set(d, mask));
}
template <int kDistance, class D>
HWY_INLINE hn::Vec<D> GatherBits(D d, hn::Vec<D> v, std::uint32_t mask) {
  return hn::And(hn::Or(v, hn::ShiftRight<kDistance>(v)), hn::Set(d, mask));
}

// Of each lane; bits 24 to 31 are 0. D: of std::uint32_t.
template <class D>
HWY_INLINE hn::Vec<D> NarrowWords(D d, hn::Vec<D> words) {
  auto low = hn::And(words, hn::Set(d, 0x33333333u));
  low = GatherBits<2>(d, low, 0x0F0F0F0Fu);
  low = GatherBits<4>(d, low, 0x00FF00FFu);
  low = GatherBits<8>(d, low, 0x0000FFFFu);
  auto high = hn::And(hn::ShiftRight<2>(words), hn::Set(d, 0x11111111u));
  high = GatherBits<3>(d, high, 0x03030303u);
  high = GatherBits<6>(d, high, 0x000F000Fu);
  high = GatherBits<12>(d, high, 0x000000FFu);
  return hn::Or(low, hn::ShiftLeft<16>(high));
}

// `low`: 16 bits of each lane, `high`: 8.
template <class D>
HWY_INLINE hn::Vec<D> WidenWords(D d, hn::Vec<D> low, hn::Vec<D> high) {
  low = SpreadBits<8>(d, low, 0x00FF00FFu);
  low = SpreadBits<4>(d, low, 0x0F0F0F0Fu);
  low = SpreadBits<2>(d, low, 0x33333333u);
  high = SpreadBits<12>(d, high, 0x000F000Fu);
  high = SpreadBits<6>(d, high, 0x03030303u);
  high = SpreadBits<3>(d, high, 0x11111111u);
  return hn::Or(low, hn::ShiftLeft<2>(high));
}

// Rows of `count` codes of 3 bits, 64 or 128, to rows of 4 bits, count / 2 bytes each. `out` is
// aligned to 64 bytes.
HWY_INLINE void WidenRows(const std::byte* packed, std::size_t rows, std::size_t count,
                          std::byte* HWY_RESTRICT out) {
  const hn::CappedTag<std::uint32_t, 8> d;  // The words of a row of 64 codes.
  const hn::Rebind<std::uint16_t, decltype(d)> d16;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  const std::size_t words = count / 8;
  for (std::size_t r = 0; r < rows; ++r, packed += count / 8 * 3, out += count / 2) {
    const auto* low = reinterpret_cast<const std::uint16_t*>(packed);
    const auto* high = reinterpret_cast<const std::uint8_t*>(packed) + count / 4;
    auto* to = reinterpret_cast<std::uint32_t*>(out);
    for (std::size_t i = 0; i < words; i += hn::MaxLanes(d)) {
      hn::Store(WidenWords(d, hn::PromoteTo(d, hn::LoadU(d16, low + i)),
                           hn::PromoteTo(d, hn::LoadU(d8, high + i))),
                d, to + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvmill
HWY_AFTER_NAMESPACE();

#endif  // KVMILL_KERNELS_CPU_THREE_BITS_INL_H_
