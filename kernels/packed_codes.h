// Scalar access to the parts of a record: codes of 2, 3 or 4 bits, and little-endian fp16 vectors.
// For the reference implementations, tools and tests; the fast paths read whole vectors instead.
//
// Code `i` of a row lies in byte i / (8/bits), at bit (i % (8/bits)) * bits. Example with bits = 2:
// the codes 1, 0, 3, 2 pack into 0b10110001 = 0xB1. With bits = 3 the low two bits of all codes of
// the row lie so, then their high bits, that of code i in byte i / 8 of these, at bit i % 8.
#ifndef KVMILL_KERNELS_PACKED_CODES_H_
#define KVMILL_KERNELS_PACKED_CODES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

namespace kvmill {

// `count`: codes of the row, a multiple of 8.
inline std::uint32_t CodeAt(const std::byte* row, std::size_t index, std::uint32_t bits,
                            std::size_t count) {
  if (bits == 3) {
    return CodeAt(row, index, 2, count) | CodeAt(row + count / 4, index, 1, count) << 2;
  }
  const std::size_t per_byte = 8 / bits;
  const auto byte = static_cast<std::uint32_t>(row[index / per_byte]);
  return (byte >> (index % per_byte * bits)) & ((1u << bits) - 1u);
}

// The row must start out zeroed: codes are or-ed in.
inline void PutCode(std::byte* row, std::size_t index, std::uint32_t bits, std::size_t count,
                    std::uint32_t code) {
  if (bits == 3) {
    PutCode(row, index, 2, count, code & 3u);
    PutCode(row + count / 4, index, 1, count, code >> 2);
    return;
  }
  const std::size_t per_byte = 8 / bits;
  row[index / per_byte] |= static_cast<std::byte>(code << (index % per_byte * bits));
}

inline std::uint16_t Float16BitsAt(const std::byte* vector, std::size_t index) {
  const auto low = static_cast<std::uint32_t>(vector[2 * index]);
  const auto high = static_cast<std::uint32_t>(vector[2 * index + 1]);
  return static_cast<std::uint16_t>(low | (high << 8));
}
inline float Float16At(const std::byte* vector, std::size_t index) {
  return Float16ToFloat(Float16BitsAt(vector, index));
}
inline void PutFloat16(std::byte* vector, std::size_t index, std::uint16_t bits) {
  vector[2 * index] = static_cast<std::byte>(bits & 0xFFu);
  vector[2 * index + 1] = static_cast<std::byte>(bits >> 8);
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_PACKED_CODES_H_
