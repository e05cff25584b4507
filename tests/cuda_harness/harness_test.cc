// Goal: the harness finds every fault of its list and nothing else, in whatever order threads run.
// Method: kernels that are correct in one form and wrong in others, under many seeds.
#include "tests/cuda_harness/harness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/float16.h"
#include "tests/cuda_harness/planted_faults.h"

namespace kvmill {
namespace cuda_harness {
namespace {

constexpr unsigned kBlocks = 3;
constexpr std::uint32_t kSeeds = 20;

enum class Sum { kTree, kWarp, kAsyncCopy, kLastBlock };

struct Outcome {
  absl::Status status;
  std::vector<Fault> faults;
  std::vector<float> sums;
};

Outcome RunSum(Sum sum, Planted fault, std::uint32_t seed) {
  Harness harness(seed);
  const DeviceBuffer<float> in = harness.Allocate<float>(kBlocks * kPlantedThreads, "in");
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 17);
  const DeviceBuffer<float> out = harness.Allocate<float>(kBlocks + 1, "out");
  const DeviceBuffer<unsigned> counter = harness.Allocate<unsigned>(1, "counter");
  Outcome run;
  switch (sum) {
    case Sum::kTree:
      run.status = TreeSum(fault, kBlocks, in.data(), out.data());
      break;
    case Sum::kWarp:
      run.status = WarpSum(fault, kBlocks, in.data(), out.data());
      break;
    case Sum::kAsyncCopy:
      run.status = AsyncCopySum(fault, kBlocks, in.data(), out.data());
      break;
    case Sum::kLastBlock:
      // Twice: a kernel must leave its counter ready, and launches are ordered.
      run.status = LastBlockSum(fault, kBlocks, in.data(), out.data(), counter.data());
      run.status.Update(LastBlockSum(fault, kBlocks, in.data(), out.data(), counter.data()));
      break;
  }
  run.faults = harness.faults();
  run.sums.assign(out.begin(), out.end());
  return run;
}

struct Case {
  const char* name;
  Sum sum;
  Planted planted;
  FaultKind want;
  const char* mentions;
};

const Case kCases[] = {
    {"Race", Sum::kTree, Planted::kRace, FaultKind::kRace, "out byte"},
    {"MissingBarrier", Sum::kTree, Planted::kMissingBarrier, FaultKind::kRace, "shared memory"},
    {"MissingWarpSync", Sum::kWarp, Planted::kMissingWarpSync, FaultKind::kRace, ""},
    {"DivergentBarrier", Sum::kTree, Planted::kDivergentBarrier, FaultKind::kDivergentBarrier,
     "has ended"},
    {"TwoBarriers", Sum::kTree, Planted::kTwoBarriers, FaultKind::kDivergentBarrier,
     "another barrier"},
    {"SharedOutOfBounds", Sum::kTree, Planted::kSharedOutOfBounds, FaultKind::kSharedOutOfBounds,
     "at offset 512"},
    {"SharedBelow", Sum::kTree, Planted::kSharedBelow, FaultKind::kSharedOutOfBounds,
     "at offset -4"},
    {"GlobalOutOfBounds", Sum::kTree, Planted::kGlobalOutOfBounds, FaultKind::kGlobalOutOfBounds,
     "in of 1536 bytes at offset 1536"},
    {"GlobalBelow", Sum::kTree, Planted::kGlobalBelow, FaultKind::kGlobalOutOfBounds,
     "in of 1536 bytes at offset -4"},
    {"WildPointer", Sum::kTree, Planted::kWildPointer, FaultKind::kGlobalOutOfBounds,
     "no allocation"},
    {"ReadBeforeWait", Sum::kAsyncCopy, Planted::kReadBeforeWait, FaultKind::kAsyncCopyPending,
     "byte 256"},
    {"WaitWithoutBarrier", Sum::kAsyncCopy, Planted::kWaitWithoutBarrier, FaultKind::kRace, ""},
    {"MaskWithoutSelf", Sum::kWarp, Planted::kMaskWithoutSelf, FaultKind::kWarpMask, ""},
    {"MaskOfAbsentLanes", Sum::kWarp, Planted::kMaskOfAbsentLanes, FaultKind::kWarpMask, ""},
    {"MasksThatDisagree", Sum::kWarp, Planted::kMasksThatDisagree, FaultKind::kWarpMask,
     "disagree"},
    {"ShuffleFromOutsideMask", Sum::kWarp, Planted::kShuffleFromOutsideMask, FaultKind::kWarpMask,
     "not in the mask"},
    {"MissingFence", Sum::kLastBlock, Planted::kMissingFence, FaultKind::kRace, "out byte"},
    {"Uninitialized", Sum::kTree, Planted::kUninitialized, FaultKind::kSharedUninitialized, ""},
    {"Misaligned", Sum::kTree, Planted::kMisaligned, FaultKind::kMisaligned, "in at an offset"},
};

class PlantedFaultTest : public testing::TestWithParam<Case> {};

TEST_P(PlantedFaultTest, IsFoundInEveryOrder) {
  const Case& c = GetParam();
  for (std::uint32_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Outcome run = RunSum(c.sum, c.planted, seed);
    EXPECT_FALSE(run.status.ok());
    // Whichever of the two accesses comes first: a lane may read what its neighbour has not yet
    // written.
    ASSERT_FALSE(run.faults.empty());
    if (c.planted == Planted::kMissingWarpSync || c.planted == Planted::kWaitWithoutBarrier) {
      EXPECT_THAT(run.faults[0].kind, testing::AnyOf(c.want, FaultKind::kSharedUninitialized,
                                                     FaultKind::kAsyncCopyPending));
    } else {
      EXPECT_EQ(run.faults[0].kind, c.want) << run.faults[0].what;
    }
    EXPECT_THAT(run.faults[0].what, testing::HasSubstr(c.mentions));
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlantedFaultTest, testing::ValuesIn(kCases),
                         [](const auto& param) { return param.param.name; });

TEST(CudaHarnessTest, CorrectKernelsAreAcceptedInEveryOrder) {
  std::vector<float> want(kBlocks + 1);
  for (std::size_t i = 0; i < kBlocks * kPlantedThreads; ++i) {
    want[i / kPlantedThreads] += static_cast<float>(i % 17);
    want[kBlocks] += static_cast<float>(i % 17);
  }
  for (std::uint32_t seed = 1; seed <= kSeeds; ++seed) {
    for (const Sum sum : {Sum::kTree, Sum::kWarp, Sum::kAsyncCopy, Sum::kLastBlock}) {
      const Outcome run = RunSum(sum, Planted::kNone, seed);
      ASSERT_TRUE(run.status.ok()) << run.status << " seed " << seed;
      EXPECT_TRUE(run.faults.empty());
      for (unsigned b = 0; b < kBlocks; ++b) EXPECT_EQ(run.sums[b], want[b]);
      if (sum == Sum::kLastBlock) {
        EXPECT_EQ(run.sums[kBlocks], want[kBlocks]);
      }
    }
  }
}

TEST(CudaHarnessDeathTest, RunningOverTheStackHitsTheGuardPage) {
  EXPECT_DEATH(RunSum(Sum::kTree, Planted::kStackOverflow, 1), "");
}

TEST(CudaHarnessTest, ALaunchThatNoDeviceWouldTakeIsRefused) {
  Harness harness;
  const DeviceBuffer<float> out = harness.Allocate<float>(1, "out");
  EXPECT_FALSE(TreeSum(Planted::kNone, 0, out.data(), out.data()).ok());
  ASSERT_EQ(harness.faults().size(), 1u);
  EXPECT_EQ(harness.faults()[0].kind, FaultKind::kBadLaunch);
}

// The fragment layouts, with values whose products are exact.
TEST(CudaHarnessTest, MatrixProductsUseTheDocumentedFragments) {
  for (const int kind : {0, 1}) {
    const DType dtype = kind == 0 ? DType::kFloat16 : DType::kBFloat16;
    Harness harness;
    std::mt19937 random(7);
    const DeviceBuffer<std::uint16_t> a = harness.Allocate<std::uint16_t>(16 * 16, "a");
    const DeviceBuffer<std::uint16_t> b = harness.Allocate<std::uint16_t>(16 * 8, "b");
    const DeviceBuffer<float> c = harness.Allocate<float>(16 * 8, "c");
    const auto small = [&] { return static_cast<float>(random() % 33) - 16; };
    for (std::uint16_t& x : a) x = FromFloat(small(), dtype);
    for (std::uint16_t& x : b) x = FromFloat(small(), dtype);
    for (float& x : c) x = small();
    std::vector<float> want(c.begin(), c.end());
    for (std::size_t m = 0; m < 16; ++m) {
      for (std::size_t n = 0; n < 8; ++n) {
        for (std::size_t k = 0; k < 16; ++k) {
          want[m * 8 + n] += ToFloat(a[m * 16 + k], dtype) * ToFloat(b[k * 8 + n], dtype);
        }
      }
    }
    const absl::Status status = WarpMatrixProduct(kind, a.data(), b.data(), c.data());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(std::vector<float>(c.begin(), c.end()), want);
  }
}

// Rounded once: against fp64, for all sizes of halves, subnormals included.
TEST(CudaHarnessTest, HalfMathRoundsOnce) {
  Harness harness;
  std::mt19937 random(3);
  const DeviceBuffer<std::uint32_t> a = harness.Allocate<std::uint32_t>(32, "a");
  const DeviceBuffer<std::uint32_t> b = harness.Allocate<std::uint32_t>(32, "b");
  const DeviceBuffer<std::uint32_t> c = harness.Allocate<std::uint32_t>(32, "c");
  const DeviceBuffer<std::uint32_t> fma = harness.Allocate<std::uint32_t>(32, "fma");
  const DeviceBuffer<std::uint32_t> difference = harness.Allocate<std::uint32_t>(32, "difference");
  // 1 + 2^-10, squared and lessened by 1 + 2^-9: 2^-20 is left only without a rounding in between.
  const std::uint32_t one_and_ulp = 0x3C013C01, minus_square = 0xBC02BC02;
  a[0] = b[0] = one_and_ulp;
  c[0] = minus_square;
  for (std::size_t i = 1; i < 32; ++i) {
    const auto half = [&] { return static_cast<std::uint32_t>(random() % 0x7C00); };
    a[i] = half() | half() << 16;
    b[i] = (half() % 0x3C00) | half() % 0x3C00 << 16;
    c[i] = 0x80008000u | half() | half() << 16;
  }
  ASSERT_TRUE(HalfMath(a.data(), b.data(), c.data(), fma.data(), difference.data()).ok());
  EXPECT_EQ(Float16ToFloat(static_cast<std::uint16_t>(fma[0])), 1.0f / (1 << 20));
  for (std::size_t i = 0; i < 32; ++i) {
    for (unsigned shift : {0u, 16u}) {
      const auto value = [shift](std::uint32_t pair) {
        return static_cast<double>(Float16ToFloat(static_cast<std::uint16_t>(pair >> shift)));
      };
      const double exact = value(a[i]) * value(b[i]) + value(c[i]);
      const double got = value(fma[i]);
      // No neighbouring half is nearer.
      const auto bits = static_cast<std::uint16_t>(fma[i] >> shift);
      for (const int step : {-1, 1}) {
        const auto neighbour = static_cast<std::uint16_t>(bits + step);
        const double other = static_cast<double>(Float16ToFloat(neighbour));
        if (!std::isfinite(other) || (bits & 0x7FFF) == 0) continue;
        EXPECT_LE(std::abs(got - exact), std::abs(other - exact));
      }
      EXPECT_EQ(value(difference[i]), static_cast<double>(Float16ToFloat(FloatToFloat16(
                                          static_cast<float>(value(a[i]) - value(b[i]))))));
    }
  }
}

}  // namespace
}  // namespace cuda_harness
}  // namespace kvmill
