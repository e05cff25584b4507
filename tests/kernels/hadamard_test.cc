#include "kernels/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/simd.h"

namespace kvmill {
namespace {

constexpr std::size_t kDims[] = {16, 32, 64, 128, 256};
constexpr std::size_t kRows = 5;

std::vector<float> RandomRows(std::size_t dim, std::size_t offset = 0) {
  std::mt19937 random(static_cast<std::uint32_t>(dim));
  std::normal_distribution<float> gauss;
  std::vector<float> rows(offset + kRows * dim);
  for (float& x : rows) x = gauss(random);
  return rows;
}

TEST(HadamardTest, TheReferenceMultipliesByTheSylvesterMatrix) {
  for (const std::size_t dim : kDims) {
    const std::vector<float> in = RandomRows(dim);
    std::vector<float> out = in;
    RotateRowsReference(out.data(), kRows, dim);
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (std::size_t i = 0; i < dim; ++i) {
          const double x = static_cast<double>(in[r * dim + i]);
          sum += std::popcount(i & j) % 2 == 0 ? x : -x;
        }
        ASSERT_NEAR(static_cast<double>(out[r * dim + j]),
                    sum / std::sqrt(static_cast<double>(dim)), 1e-6);
      }
    }
  }
}

TEST(HadamardTest, RotatingTwiceGivesTheRowsBack) {
  for (const std::size_t dim : kDims) {
    const std::vector<float> in = RandomRows(dim);
    std::vector<float> out = in;
    RotateRowsReference(out.data(), kRows, dim);
    RotateRowsReference(out.data(), kRows, dim);
    for (std::size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(out[i], in[i], 1e-6f);
  }
}

TEST(HadamardTest, EveryLevelRotatesAsTheReferenceAtAnyAlignment) {
  for (const std::string_view simd : CpuSimdNames()) {
    ASSERT_TRUE(ForceCpuSimd(simd));
    for (const std::size_t dim : kDims) {
      for (const std::size_t offset : {0u, 1u, 3u}) {
        SCOPED_TRACE(testing::Message() << simd << ", dim " << dim << ", offset " << offset);
        std::vector<float> want = RandomRows(dim, offset);
        std::vector<float> got = want;
        RotateRowsReference(want.data() + offset, kRows, dim);
        RotateRowsCpu(got.data() + offset, kRows, dim);
        float largest = 0;
        for (const float x : want) largest = std::max(largest, std::fabs(x));
        for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-6f * largest);
      }
    }
  }
  ForceCpuSimd("");
}

TEST(CpuSimdTest, ForcingALevelChangesTheNameAndEmptyGoesBack) {
  const std::string_view best = CpuSimdName();
  ASSERT_EQ(best, CpuSimdNames().front());
  const std::vector<std::string_view> levels = CpuSimdNames();
  for (const std::string_view level : levels) {
    EXPECT_TRUE(ForceCpuSimd(level));
    EXPECT_EQ(CpuSimdName(), level);
    EXPECT_EQ(CpuSimdNames(), levels);
    EXPECT_FALSE(ForceCpuSimd("AVX99"));
    EXPECT_EQ(CpuSimdName(), level);
  }
  EXPECT_TRUE(ForceCpuSimd(""));
  EXPECT_EQ(CpuSimdName(), best);
}

}  // namespace
}  // namespace kvmill
