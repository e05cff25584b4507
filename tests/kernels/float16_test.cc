#include "kernels/float16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kvmill {
namespace {

constexpr std::uint16_t kHalfInfinity = 0x7C00;
constexpr std::uint16_t kHalfLargest = 0x7BFF;

bool IsHalfNan(std::uint32_t h) { return (h & 0x7FFFu) > kHalfInfinity; }
bool IsBFloatNan(std::uint32_t h) { return (h & 0x7FFFu) > 0x7F80u; }

// The definition: (-1)^sign * mantissa * 2^exponent, in fp64, without bit tricks.
double HalfByDefinition(std::uint32_t h) {
  const double sign = (h & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((h >> 10) & 31u);
  const int mantissa = static_cast<int>(h & 1023u);
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

double BFloatByDefinition(std::uint32_t h) {
  const double sign = (h & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((h >> 7) & 255u);
  const int mantissa = static_cast<int>(h & 127u);
  if (exponent == 255) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -133)
                       : sign * std::ldexp(128 + mantissa, exponent - 134);
}

// To nearest even by search: the non-negative finite values of a 16-bit type are its bit patterns
// in order.
template <class Definition>
std::uint16_t NearestByDefinition(double x, std::uint16_t largest, const Definition& value_of) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  std::uint16_t below = 0;
  std::uint16_t above = static_cast<std::uint16_t>(largest + 1);  // Infinity's pattern.
  while (above - below > 1) {
    const auto middle = static_cast<std::uint16_t>((above + below) / 2);
    (value_of(middle) <= magnitude ? below : above) = middle;
  }
  // Past the largest value, rounding goes on as if the next one existed.
  const double step = above > largest ? value_of(largest) - value_of(largest - 1u)
                                      : value_of(above) - value_of(below);
  const double middle = value_of(below) + step / 2;
  const bool up = magnitude > middle || (magnitude == middle && (below & 1) != 0);
  return static_cast<std::uint16_t>(sign | (up ? above : below));
}

// Values at which rounding changes its mind: each 16-bit value, the middle to its neighbour, and
// one fp32 step around both.
template <class Definition>
std::vector<float> RoundingCases(std::uint16_t largest, const Definition& value_of) {
  std::vector<float> cases = {0.0f, -0.0f, std::numeric_limits<float>::max(),
                              std::numeric_limits<float>::denorm_min(),
                              std::numeric_limits<float>::infinity()};
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::uint32_t h = 0; h <= largest; ++h) {
    const double here = value_of(h);
    const double next = h < largest ? value_of(h + 1) : 2 * here - value_of(h - 1);
    for (const double x : {here, (here + next) / 2}) {
      const auto f = static_cast<float>(x);
      for (const float y : {f, std::nextafter(f, 0.0f), std::nextafter(f, infinity)}) {
        cases.push_back(y);
        cases.push_back(-y);
      }
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const float f = BitsToFloat(static_cast<std::uint32_t>(random()));
    if (!std::isnan(f)) cases.push_back(f);
  }
  return cases;
}

TEST(Float16Test, EveryHalfHasTheValueOfItsDefinition) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float f = Float16ToFloat(static_cast<std::uint16_t>(h));
    if (IsHalfNan(h)) {
      EXPECT_TRUE(std::isnan(f)) << h;
    } else {
      ASSERT_EQ(static_cast<double>(f), HalfByDefinition(h)) << h;
      ASSERT_EQ(std::signbit(f), (h & 0x8000u) != 0) << h;
    }
  }
}

TEST(Float16Test, EveryHalfSurvivesTheWayThroughFloat) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<std::uint16_t>(h);
    if (!IsHalfNan(h)) {
      ASSERT_EQ(FloatToFloat16(Float16ToFloat(half)), half);
    }
    if (!IsBFloatNan(h)) {
      ASSERT_EQ(FloatToBFloat16(BFloat16ToFloat(half)), half);
    }
  }
}

TEST(Float16Test, FloatsRoundToTheNearestHalfAndTiesToEven) {
  for (const float f : RoundingCases(kHalfLargest, HalfByDefinition)) {
    ASSERT_EQ(FloatToFloat16(f),
              NearestByDefinition(static_cast<double>(f), kHalfLargest, HalfByDefinition))
        << f;
  }
}

TEST(Float16Test, HalvesOverflowFrom65520On) {
  EXPECT_EQ(FloatToFloat16(65504.0f), kHalfLargest);
  EXPECT_EQ(FloatToFloat16(std::nextafter(65520.0f, 0.0f)), kHalfLargest);
  EXPECT_EQ(FloatToFloat16(65520.0f), kHalfInfinity);
  EXPECT_EQ(FloatToFloat16(-65520.0f), 0x8000 | kHalfInfinity);
}

TEST(Float16Test, EveryBFloatHasTheValueOfItsDefinition) {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float f = BFloat16ToFloat(static_cast<std::uint16_t>(h));
    if (IsBFloatNan(h)) {
      EXPECT_TRUE(std::isnan(f)) << h;
    } else {
      ASSERT_EQ(static_cast<double>(f), BFloatByDefinition(h)) << h;
      ASSERT_EQ(std::signbit(f), (h & 0x8000u) != 0) << h;
    }
  }
}

TEST(Float16Test, FloatsRoundToTheNearestBFloatAndTiesToEven) {
  for (const float f : RoundingCases(0x7F7F, BFloatByDefinition)) {
    ASSERT_EQ(FloatToBFloat16(f),
              NearestByDefinition(static_cast<double>(f), 0x7F7F, BFloatByDefinition))
        << f;
  }
}

TEST(Float16Test, NanStaysNanAndIsQuiet) {
  for (const std::uint32_t bits : {0x7FC00000u, 0x7F800001u, 0xFF800001u, 0xFFFFFFFFu}) {
    const float nan = BitsToFloat(bits);
    EXPECT_TRUE(IsHalfNan(FloatToFloat16(nan)));
    EXPECT_NE(FloatToFloat16(nan) & 0x200, 0);
    EXPECT_TRUE(IsBFloatNan(FloatToBFloat16(nan)));
    EXPECT_NE(FloatToBFloat16(nan) & 0x40, 0);
    EXPECT_EQ(FloatToFloat16(nan) >> 15, bits >> 31);
    EXPECT_EQ(FloatToBFloat16(nan) >> 15, bits >> 31);
  }
}

TEST(Float16Test, TheTypeIsChosenByItsName) {
  EXPECT_EQ(ToFloat(0x3C00, DType::kFloat16), 1.0f);
  EXPECT_EQ(ToFloat(0x3F80, DType::kBFloat16), 1.0f);
  EXPECT_EQ(FromFloat(1.0f, DType::kFloat16), 0x3C00);
  EXPECT_EQ(FromFloat(1.0f, DType::kBFloat16), 0x3F80);
}

}  // namespace
}  // namespace kvmill
