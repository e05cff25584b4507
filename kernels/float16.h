// The two 16-bit floating-point types of K and V, and exact scalar conversions. Bit patterns are
// std::uint16_t; no compiler extension is needed, and the result never depends on the machine.
// C++17; included by device code.
#ifndef KVMILL_KERNELS_FLOAT16_H_
#define KVMILL_KERNELS_FLOAT16_H_

#include <cstdint>
#include <cstring>

namespace kvmill {

// Values are written to disk and never change.
enum class DType : std::uint8_t { kFloat16 = 0, kBFloat16 = 1 };

inline float BitsToFloat(std::uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
inline std::uint32_t FloatToBits(float f) {
  std::uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return bits;
}

// Exact: every fp16 value, subnormals and infinities included, is an fp32 value. NaN stays NaN.
inline float Float16ToFloat(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu;
  const std::uint32_t mantissa = h & 0x3FFu;
  if (exponent == 31) return BitsToFloat(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return BitsToFloat(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);  // mantissa * 2^-24
  return BitsToFloat(sign | FloatToBits(magnitude));
}

// Round to nearest, ties to even. Beyond 65519.99 the result is infinite; NaN becomes a quiet NaN.
inline std::uint16_t FloatToFloat16(float f) {
  const std::uint32_t bits = FloatToBits(f);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // >= 65520
  if (magnitude < 0x38800000u) {
    // Below 2^-14: subnormal. Adding 0.5 lets the FPU round at bit 2^-24.
    const float shifted = BitsToFloat(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (FloatToBits(shifted) - 0x3F000000u));
  }
  const std::uint32_t round = ((magnitude >> 13) & 1u) + 0xFFFu;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + round) >> 13));
}

inline float BFloat16ToFloat(std::uint16_t h) { return BitsToFloat(std::uint32_t{h} << 16); }

// Round to nearest, ties to even. NaN becomes a quiet NaN.
inline std::uint16_t FloatToBFloat16(float f) {
  const std::uint32_t bits = FloatToBits(f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float ToFloat(std::uint16_t h, DType dtype) {
  return dtype == DType::kFloat16 ? Float16ToFloat(h) : BFloat16ToFloat(h);
}
inline std::uint16_t FromFloat(float f, DType dtype) {
  return dtype == DType::kFloat16 ? FloatToFloat16(f) : FloatToBFloat16(f);
}

}  // namespace kvmill

#endif  // KVMILL_KERNELS_FLOAT16_H_
