// Products and softmax against sums in fp64, at every SIMD level, over shapes around the sizes of
// tiles.
#include "kernels/dense.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/simd.h"

namespace kvmill {
namespace {

std::vector<float> Gaussian(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  std::vector<float> values(count);
  for (float& x : values) x = gauss(random);
  return values;
}

TEST(DenseTest, TheReferenceMultipliesByHand) {
  std::vector<float> b(2 * 16, 0), out(16);
  b[0] = 3, b[1] = 4, b[16] = 5, b[17] = -1;
  const std::vector<float> a = {2, 10};
  MultiplyReference({a.data(), b.data(), out.data(), 1, 2, 16, 2, 16, 16});
  EXPECT_EQ(out[0], 56);
  EXPECT_EQ(out[1], -2);
  EXPECT_EQ(out[2], 0);
}

TEST(DenseTest, EveryLevelMultipliesAsTheReference) {
  for (const std::string_view simd : CpuSimdNames()) {
    ASSERT_TRUE(ForceCpuSimd(simd));
    for (const std::size_t rows : {1u, 2u, 3u, 5u, 6u, 7u, 11u, 12u, 13u, 21u}) {
      // Panels of 128, 256 or 512 rows of `b` are copied: one, just under and over, several.
      for (const std::size_t depth : {1u, 7u, 128u, 255u, 257u, 1100u}) {
        for (const std::size_t columns : {16u, 48u, 128u, 144u}) {
          SCOPED_TRACE(testing::Message()
                       << simd << " " << rows << " x " << depth << " x " << columns);
          const std::size_t a_stride = depth + 3, b_stride = columns + 5, out_stride = columns + 1;
          const std::vector<float> a = Gaussian(rows * a_stride, 1),
                                   b = Gaussian(depth * b_stride, 2);
          std::vector<float> want(rows * out_stride, 77), got = want;
          ProductArgs args{a.data(), b.data(), want.data(), rows,      depth,
                           columns,  a_stride, b_stride,    out_stride};
          MultiplyReference(args);
          args.out = got.data();
          MultiplyCpu(args);
          const float bound = 4e-7f * static_cast<float>(depth);  // sqrt(depth) times both norms.
          for (std::size_t i = 0; i < want.size(); ++i)
            ASSERT_NEAR(got[i], want[i], 4 * bound) << i;
        }
      }
    }
  }
  ForceCpuSimd("");
}

TEST(DenseTest, EveryLevelHasTheSoftmaxOfTheReference) {
  for (const std::string_view simd : CpuSimdNames()) {
    ASSERT_TRUE(ForceCpuSimd(simd));
    for (const std::size_t count : {1u, 2u, 15u, 16u, 17u, 100u, 112u}) {
      SCOPED_TRACE(testing::Message() << simd << ", count " << count);
      std::vector<float> want = Gaussian(112 + 16, 3);
      for (float& x : want) x *= 30;
      std::vector<float> got = want;
      SoftmaxReference(want.data(), count, 112, 0.3f);
      SoftmaxCpu(got.data(), count, 112, 0.3f);
      double sum = 0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], i < 112 ? 2e-6f : 0) << i;
        if (i < count) sum += static_cast<double>(got[i]);
        if (i >= count && i < 112) {
          ASSERT_EQ(got[i], 0) << i;
        }
      }
      EXPECT_NEAR(sum, 1, 1e-5);
    }
  }
  ForceCpuSimd("");
}

TEST(DenseTest, EveryLevelHasTheGateOfTheReference) {
  std::vector<float> gate = Gaussian(96, 4);
  const std::vector<float> up = Gaussian(96, 5);
  for (std::size_t i = 0; i < 32; ++i) gate[i] *= 20;
  gate[32] = 0, gate[33] = -3e4f, gate[34] = 3e4f, gate[35] = -88, gate[36] = 88;
  std::vector<float> want(96);
  GateReference(gate.data(), up.data(), 96, want.data());
  EXPECT_EQ(want[32], 0);
  EXPECT_EQ(want[34], 3e4f * up[34]);
  for (const std::string_view simd : CpuSimdNames()) {
    ASSERT_TRUE(ForceCpuSimd(simd));
    std::vector<float> got = gate;
    GateCpu(got.data(), up.data(), 96, got.data());
    for (std::size_t i = 0; i < 96; ++i) {
      ASSERT_NEAR(got[i], want[i], 2e-6f * std::abs(gate[i] * up[i])) << simd << " " << i;
    }
  }
  ForceCpuSimd("");
}

TEST(DenseTest, SoftmaxOfLargeAndEqualLogitsIsFinite) {
  std::vector<float> row(16, 3e4f);
  SoftmaxCpu(row.data(), 10, 16, 1);
  EXPECT_NEAR(row[0], 0.1f, 1e-6f);
  EXPECT_EQ(row[10], 0);
  row.assign(16, -3e4f);
  row[3] = 3e4f;
  SoftmaxCpu(row.data(), 16, 16, 1);
  EXPECT_EQ(row[3], 1);
  EXPECT_EQ(row[0], 0);
}

}  // namespace
}  // namespace kvmill
