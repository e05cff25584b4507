// Each baseline against its definition: small cases by hand, bounds, and bits.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "client/eval/kitty.h"
#include "client/eval/kvquant.h"
#include "client/eval/methods.h"
#include "client/eval/polarquant.h"
#include "client/eval/round_to_nearest.h"
#include "client/eval/turboquant.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hadamard.h"

namespace kvmill::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct TestHead {
  std::vector<float> values;
  HeadValues view;
};
TestHead Gaussian(std::uint32_t tokens, std::uint32_t head_dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  TestHead head;
  head.values.resize(std::size_t{tokens} * head_dim);
  for (float& x : head.values) x = Float16ToFloat(FloatToFloat16(gauss(random)));
  head.view = {head.values, tokens, head_dim, DType::kFloat16};
  return head;
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const auto x = static_cast<double>(want[i]), y = static_cast<double>(got[i]);
    difference += (y - x) * (y - x);
    norm += x * x;
  }
  return std::sqrt(difference / norm);
}

TEST(RoundingTest, AGroupByHand) {
  // Range 3, 2 bits: scale 1. Every other value belongs to somebody else.
  std::vector<float> values = {-1, 100, 2, 100, 0.4f, 100, 0.6f, 100, 1.5f};
  EXPECT_EQ(RoundGroup(values.data(), 5, 2, 2), 5u * 2 + 32);
  EXPECT_THAT(values, ElementsAre(-1, 100, 2, 100, 0, 100, 1, 100, 1));  // 1.5: code 2.5, to even.
  std::vector<float> constant = {3, 3, 3};
  EXPECT_EQ(RoundGroup(constant.data(), 3, 1, 4), 3u * 4 + 32);
  EXPECT_THAT(constant, ElementsAre(3, 3, 3));
  // 0.5 of the range -4 .. 8 is -2 .. 4; scale 2; what is outside goes to the ends.
  std::vector<float> clipped = {-4, 8, 0.9f, 1.1f};
  RoundGroup(clipped.data(), 4, 1, 2, 0.5f);
  EXPECT_THAT(clipped, ElementsAre(-2, 4, 0, 2));
}

TEST(RoundingTest, ErrorIsAtMostHalfAStepOfTheOwnGroup) {
  for (const Axis axis : {Axis::kPerToken, Axis::kPerChannel}) {
    const std::size_t tokens = 64, dim = 64, group = 32;
    TestHead head = Gaussian(tokens, dim, 1);
    // One channel and one token are 100 times as large: a step must not leak into other groups.
    for (std::size_t i = 0; i < tokens; ++i) head.values[i * dim + 5] *= 100;
    std::vector<float> rounded = head.values;
    EXPECT_EQ(RoundGroups(rounded.data(), tokens, dim, axis, group, 4), tokens * dim * 5);
    const bool per_token = axis == Axis::kPerToken;
    for (std::size_t row = 0; row < 64; ++row) {
      for (std::size_t begin = 0; begin < 64; begin += group) {
        const auto at = [&](std::size_t i) {
          return per_token ? row * dim + begin + i : (begin + i) * dim + row;
        };
        float low = INFINITY, high = -INFINITY;
        for (std::size_t i = 0; i < group; ++i) {
          low = std::min(low, head.values[at(i)]);
          high = std::max(high, head.values[at(i)]);
        }
        const float step = (high - low) / 15;
        for (std::size_t i = 0; i < group; ++i) {
          // fp16 of scale and zero adds 2^-11 of what they are.
          EXPECT_LE(std::abs(rounded[at(i)] - head.values[at(i)]),
                    step / 2 + 1.5e-3f * std::max(std::abs(low), std::abs(high)));
        }
      }
    }
  }
}

TEST(RoundingTest, KiviIsPerChannelForKeysAndPerTokenForValues) {
  // Channel d is constant d: exact per channel. Token t constant t: exact per token.
  TestHead channels = Gaussian(64, 64, 1), tokens = channels;
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t d = 0; d < 64; ++d) {
      channels.values[t * 64 + d] = static_cast<float>(d);
      tokens.values[t * 64 + d] = static_cast<float>(t);
    }
  }
  channels.view.values = channels.values;
  tokens.view.values = tokens.values;
  const TileFormat format{2, 2, 64, 64};
  for (const char* name : {"kivi-g32", "kivi-g128"}) {
    const auto kivi = (*FindMethods({name}))[0]->make(format);
    EXPECT_EQ(kivi->Quantize(Half::kKey, channels.view).values, channels.values);
    EXPECT_NE(kivi->Quantize(Half::kKey, tokens.view).values, tokens.values);
    EXPECT_EQ(kivi->Quantize(Half::kValue, tokens.view).values, tokens.values);
    EXPECT_NE(kivi->Quantize(Half::kValue, channels.view).values, channels.values);
  }
  const auto rtn = (*FindMethods({"rtn"}))[0]->make(format);
  EXPECT_EQ(rtn->Quantize(Half::kKey, tokens.view).values, tokens.values);
  EXPECT_NE(rtn->Quantize(Half::kKey, channels.view).values, channels.values);
}

TEST(RoundingTest, QuaRotIsRoundingBetweenTwoRotationsWithTheRangeCut) {
  const TestHead head = Gaussian(64, 128, 3);
  std::vector<float> want = head.values;
  RotateRowsReference(want.data(), 64, 128);
  const std::uint64_t bits = RoundGroups(want.data(), 64, 128, Axis::kPerToken, 128, 2, 0.95f);
  RotateRowsReference(want.data(), 64, 128);
  const auto quarot = (*FindMethods({"quarot"}))[0]->make({2, 2, 64, 128});
  for (const Half half : {Half::kKey, Half::kValue}) {
    const Decoded got = quarot->Quantize(half, head.view);
    EXPECT_EQ(got.values, want);
    EXPECT_EQ(got.bits, bits);
  }
}

TEST(TurboQuantTest, CodebooksWhereTheDistributionIsKnown) {
  // In 3 dimensions a coordinate of a random direction is uniform on [-1, 1] (Archimedes).
  const std::vector<double> one = SphereCodebook(3, 1), two = SphereCodebook(3, 2);
  ASSERT_EQ(one.size(), 2u);
  EXPECT_NEAR(one[0], -0.5, 1e-4);
  EXPECT_NEAR(one[1], 0.5, 1e-4);
  ASSERT_EQ(two.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(two[static_cast<std::size_t>(i)], -0.75 + 0.5 * i, 1e-4);
  EXPECT_NEAR(SphereDistortion(3, two), 1.0 / 48, 1e-4);  // (1/2)^2 / 12.
  // In many it is Gaussian with variance 1/d; the least errors of a Gaussian are Max's (1960), and
  // his 2-bit levels 0.4528 and 1.510.
  const double least[] = {0.3634, 0.1175, 0.03454, 0.009497};
  for (std::uint32_t bits = 1; bits <= 4; ++bits) {
    EXPECT_NEAR(1024 * SphereDistortion(1024, SphereCodebook(1024, bits)), least[bits - 1],
                0.01 * least[bits - 1]);
  }
  EXPECT_NEAR(SphereCodebook(1024, 2)[2] * 32, 0.4528, 0.005);
  EXPECT_NEAR(SphereCodebook(1024, 2)[3] * 32, 1.510, 0.01);
}

TEST(TurboQuantTest, TheRotationIsOrthogonalAndAlwaysTheSame) {
  const std::vector<float> rows = RandomOrthogonal(64, 1);
  for (std::size_t a = 0; a < 64; ++a) {
    for (std::size_t b = 0; b < 64; ++b) {
      double dot = 0;
      for (std::size_t d = 0; d < 64; ++d) {
        dot += static_cast<double>(rows[a * 64 + d]) * static_cast<double>(rows[b * 64 + d]);
      }
      EXPECT_NEAR(dot, a == b, 1e-5);
    }
  }
  EXPECT_EQ(rows, RandomOrthogonal(64, 1));
  EXPECT_NE(rows, RandomOrthogonal(64, 2));
}

TEST(TurboQuantTest, ErrorIsThatOfTheCodebookWhateverTheDirection) {
  // The worst for others: one channel has everything. The error depends on the rotation alone.
  TestHead head = Gaussian(64, 128, 1);
  for (std::size_t i = 0; i < head.values.size(); ++i) {
    if (i % 128 == 3) head.values[i] *= 1000;
  }
  for (const std::uint32_t bits : {2u, 4u}) {
    const Decoded decoded = MakeTurboQuant(bits, bits, 128)->Quantize(Half::kKey, head.view);
    EXPECT_EQ(decoded.bits, 64u * (128 * bits + 16));
    const double want = std::sqrt(128 * SphereDistortion(128, SphereCodebook(128, bits)));
    EXPECT_NEAR(RelativeError(decoded.values, head.values), want, 0.25 * want);
  }
  std::vector<float> zeros(64 * 64, 0.0f);
  EXPECT_EQ(MakeTurboQuant(2, 2, 64)->Quantize(Half::kKey, {zeros, 64, 64}).values, zeros);
}

TEST(PolarQuantTest, ARingByHand) {
  // Pair 0 of token t: radius 1 + t % 2, angle in the middle of bin t % 4 between those of its
  // ends.
  TestHead head = Gaussian(64, 64, 1);
  for (std::size_t t = 0; t < 64; ++t) {
    const float radius = t % 2 ? 2.0f : 1.0f;
    head.values[t * 64] = t % 4 < 2 ? radius : -radius;  // Angles 0 and pi.
    head.values[t * 64 + 32] = 0;
  }
  const Decoded decoded = MakePolarQuant(2, 2, 64)->Quantize(Half::kKey, head.view);
  for (std::size_t t = 0; t < 64; ++t) {
    // Radii 1 .. 2 in 4 bins: middles of the first and last are 1.125 and 1.875. Angles 0 .. pi:
    // middles of the first and last bin are pi/8 and 7 pi/8.
    const double radius = t % 2 ? 1.875 : 1.125;
    const double angle = (t % 4 < 2 ? 1 : 7) * 3.14159265 / 8;
    EXPECT_NEAR(decoded.values[t * 64], radius * std::cos(angle), 3e-3);
    EXPECT_NEAR(decoded.values[t * 64 + 32], radius * std::sin(angle), 3e-3);
  }
  EXPECT_EQ(decoded.bits, 64u * 64 * 2 + 32 * 64);  // Codes; 32 pairs of 4 fp16.
}

TEST(PolarQuantTest, RadiusAndAngleAreWithinHalfABin) {
  const TestHead head = Gaussian(128, 64, 5);
  const Decoded decoded = MakePolarQuant(4, 4, 128)->Quantize(Half::kKey, head.view);
  for (std::size_t pair = 0; pair < 32; ++pair) {
    std::vector<double> radii;
    for (std::size_t t = 0; t < 128; ++t) {
      radii.push_back(std::hypot(head.values[t * 64 + pair], head.values[t * 64 + pair + 32]));
    }
    const auto [low, high] = std::minmax_element(radii.begin(), radii.end());
    for (std::size_t t = 0; t < 128; ++t) {
      const double x = decoded.values[t * 64 + pair], y = decoded.values[t * 64 + pair + 32];
      EXPECT_NEAR(std::hypot(x, y), radii[t], (*high - *low) / 32 + 4e-3);
      const double turn = std::remainder(
          std::atan2(y, x) - std::atan2(static_cast<double>(head.values[t * 64 + pair + 32]),
                                        static_cast<double>(head.values[t * 64 + pair])),
          6.283185307);
      EXPECT_LE(std::abs(turn), 6.2832 / 32 + 8e-3);
    }
  }
}

TEST(KvQuantTest, OutliersAreThoseThatStretchTheRange) {
  EXPECT_THAT(FindOutliers({0, 1, 2, 50, 3}, 1), ElementsAre(3));
  EXPECT_THAT(FindOutliers({0, -9, 2, 50, 3}, 2), ElementsAre(1, 3));
  EXPECT_THAT(FindOutliers({-60, -50, 0, 1, 2}, 2), ElementsAre(0, 1));
  EXPECT_THAT(FindOutliers({7, 7, 7, 7}, 1), ElementsAre(3));
  EXPECT_EQ(OutlierCount(128, 0.01), 1u);
  EXPECT_EQ(OutlierCount(256, 0.01), 3u);
  EXPECT_EQ(OutlierCount(8, 0.01), 1u);
  EXPECT_EQ(OutlierCount(128, 0.1), 13u);
}

TEST(KvQuantTest, TheShareIsKeptExactlyAndBitsAreCounted) {
  TestHead head = Gaussian(128, 64, 1);
  for (std::size_t d = 0; d < 64; ++d)
    head.values[(d % 128) * 64 + d] = 300.0f + static_cast<float>(d);
  head.view.values = head.values;
  const Decoded k = MakeKvQuant(2, 2, 128, 0.01)->Quantize(Half::kKey, head.view);
  for (std::size_t d = 0; d < 64; ++d) {
    EXPECT_EQ(k.values[d * 64 + d], head.values[d * 64 + d]);  // The outlier of channel d.
  }
  EXPECT_LT(RelativeError(k.values, head.values), 0.02);  // Their ranges are not stretched.
  // 64 channels: 128 codes, a range, an outlier of 16 bits and an index below 128; 4 levels.
  EXPECT_EQ(k.bits, 64u * (128 * 2 + 32 + 16 + 7) + 4 * 16);
  const Decoded v = MakeKvQuant(2, 2, 128, 0.01)->Quantize(Half::kValue, head.view);
  EXPECT_EQ(v.bits, 128u * (64 * 2 + 32 + 16 + 6) + 4 * 16);
}

TEST(KvQuantTest, LevelsNeedNotBeEquallyFarApart) {
  // Values sit on four unequal levels of each channel: nothing is lost but fp16 of the levels.
  const float levels[] = {-1, -0.9f, 0.1f, 1};
  TestHead head = Gaussian(128, 64, 1);
  for (std::size_t i = 0; i < head.values.size(); ++i) head.values[i] = levels[(i / 64) % 4];
  head.view.values = head.values;
  const auto levelled = MakeKvQuant(2, 2, 128, 0.01)->Quantize(Half::kKey, head.view);
  EXPECT_LT(RelativeError(levelled.values, head.values), 2e-3);
  RoundGroups(head.values.data(), 128, 64, Axis::kPerChannel, 128, 2);
  EXPECT_GT(RelativeError(head.values, levelled.values), 0.05);
}

TEST(KittyTest, BoostsTheChannelsOfLargestMagnitude) {
  TestHead head = Gaussian(64, 64, 1);
  for (std::size_t t = 0; t < 64; ++t) {
    for (const std::size_t d : {3, 17, 40}) head.values[t * 64 + d] *= 10;
  }
  head.view.values = head.values;
  const std::vector<bool> boosted = BoostedChannels(head.values.data(), 64, 64, 0.125);
  EXPECT_EQ(std::count(boosted.begin(), boosted.end(), true), 8);
  EXPECT_TRUE(boosted[3] && boosted[17] && boosted[40]);
  const Decoded decoded = MakeKitty(2, 2, 64, 0.125)->Quantize(Half::kKey, head.view);
  // 8 channels with 4 bits, 56 with 2; a range and a bit that says which, each.
  EXPECT_EQ(decoded.bits, 64u * (8 * 4 + 56 * 2) + 64 * 33);
  std::vector<float> want = head.values;
  for (std::size_t d = 0; d < 64; ++d) RoundGroup(want.data() + d, 64, 64, boosted[d] ? 4 : 2);
  EXPECT_EQ(decoded.values, want);
}

TEST(MethodsTest, EveryMethodIsNearItsInputAndCountsMoreThanItsCodes) {
  for (const std::uint16_t dim : {std::uint16_t{64}, std::uint16_t{128}, std::uint16_t{256}}) {
    for (const std::uint8_t bits : {std::uint8_t{2}, std::uint8_t{4}}) {
      const TileFormat format{bits, bits, 64, dim};
      const TestHead head = Gaussian(128, dim, dim);
      for (const Method& method : AllMethods()) {
        if (method.two_bit_keys && bits != 2) continue;
        SCOPED_TRACE(method.name);
        const auto quantizer = method.make(format);
        for (const Half half : {Half::kKey, Half::kValue}) {
          const Decoded decoded = quantizer->Quantize(half, head.view);
          const double error = RelativeError(decoded.values, head.values);
          EXPECT_GT(error, bits == 2 ? 0.1 : 0.02);
          EXPECT_LT(error, bits == 2 ? 0.7 : 0.2);
          EXPECT_GT(decoded.bits, head.values.size() * bits);
          EXPECT_LT(decoded.bits, head.values.size() * (bits + 2u));
          // The same again.
          EXPECT_EQ(quantizer->Quantize(half, head.view).values, decoded.values);
        }
      }
    }
  }
}

TEST(MethodsTest, NamesAndSets) {
  const auto found = FindMethods({"rtn", "kvarn", "baselines", "rtn"});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)[0]->name, "rtn");
  EXPECT_EQ((*found)[1]->name, "kvarn");
  EXPECT_EQ(found->size(), 11u);
  const auto wrong = FindMethods({"kvarn", "kvi"});
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("'kvi'"));
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("kivi-g32, kivi-g128"));
  EXPECT_FALSE(FindMethods({""}).ok());
}

}  // namespace
}  // namespace kvmill::eval
