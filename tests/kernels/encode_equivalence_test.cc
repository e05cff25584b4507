// Goal: the cpu encoder is the reference encoder at every SIMD level, for every format and kind of
// input. Method: encode the same tile with both; count the codes that differ (budget 1e-5 of them,
// off by one each) and compare the decoded tiles (relative Frobenius distance: 99 % within 2.5e-3,
// all within 2e-2). Scales are not compared: iterates that tie differ by a factor that cancels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_inputs.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

struct Source {
  DType dtype;
  std::uint32_t seed;
};
constexpr Source kSources[] = {{DType::kFloat16, 1}, {DType::kFloat16, 2}, {DType::kBFloat16, 3}};

struct Tally {
  std::size_t codes = 0;
  std::size_t differing = 0;
  std::vector<double> distances;
};

// Adds one tile to the tally.
void Compare(const TileFormat& format, const Encoded& want, const Encoded& got, Tally& tally) {
  const RecordLayout l = LayoutOf(format);
  const std::size_t half = std::size_t{format.group} * format.head_dim;
  const CodeDifferences k = CompareCodes(got.record.data() + l.k_codes,
                                         want.record.data() + l.k_codes, half, format.key_bits);
  const CodeDifferences v = CompareCodes(got.record.data() + l.v_codes,
                                         want.record.data() + l.v_codes, half, format.value_bits);
  EXPECT_LE(k.largest, 1u);
  EXPECT_LE(v.largest, 1u);
  tally.codes += 2 * half;
  tally.differing += k.count + v.count;
  const Decoded got_tile = Decode(ReferenceImplementation(), format, got.record);
  const Decoded want_tile = Decode(ReferenceImplementation(), format, want.record);
  tally.distances.push_back(RelativeError(got_tile.k, want_tile.k));
  tally.distances.push_back(RelativeError(got_tile.v, want_tile.v));
}

void ExpectWithinBudget(Tally& tally) {
  EXPECT_LE(static_cast<double>(tally.differing),
            std::ceil(1e-5 * static_cast<double>(tally.codes)));
  std::sort(tally.distances.begin(), tally.distances.end());
  ASSERT_FALSE(tally.distances.empty());
  EXPECT_LE(tally.distances[(tally.distances.size() - 1) * 99 / 100], 2.5e-3);
  EXPECT_LE(tally.distances.back(), 2e-2);
}

class EncodeEquivalenceTest : public testing::TestWithParam<std::size_t> {
 protected:
  const TileFormat format_ = TileFormatAt(GetParam());
};

TEST_P(EncodeEquivalenceTest, EveryLevelEncodesEveryKindOfInputAsTheReference) {
  std::map<std::string, Tally> tallies;
  for (const InputKind kind : kInputKinds) {
    for (const Source& source : kSources) {
      const TileInput input = MakeInput(format_, kind, source.dtype, source.seed);
      const Encoded want = Encode(ReferenceImplementation(), format_, input);
      for (const Implementation& cpu : CpuImplementations()) {
        // The reference itself, and slow: once is enough.
        if (cpu.simd == "SCALAR" && kind != InputKind::kGaussian) continue;
        SCOPED_TRACE(testing::Message() << cpu.name << ", " << ToString(kind) << ", "
                                        << (source.dtype == DType::kFloat16 ? "fp16" : "bf16")
                                        << ", seed " << source.seed);
        cpu.Select();
        const Encoded got = Encode(cpu, format_, input);
        ASSERT_EQ(got.result, want.result);
        if (want.result == EncodeResult::kTile) Compare(format_, want, got, tallies[cpu.name]);
      }
    }
  }
  for (auto& [name, tally] : tallies) {
    SCOPED_TRACE(name);
    ExpectWithinBudget(tally);
    RecordProperty("differing_" + name, static_cast<int>(tally.differing));
  }
}

TEST_P(EncodeEquivalenceTest, InputThatIsRotatedAlreadyIsNotRotatedAgain) {
  const TileInput input = MakeInput(format_, InputKind::kOutlierChannels, DType::kFloat16, 11);
  const Encoded want = Encode(ReferenceImplementation(), format_, input, Frame::kRotated);
  const Decoded tile = Decode(ReferenceImplementation(), format_, want.record, Frame::kRotated);
  std::vector<float> k(input.k.size());
  std::transform(input.k.begin(), input.k.end(), k.begin(), Float16ToFloat);
  EXPECT_LE(RelativeError(tile.k, k), format_.key_bits == 4 ? 0.15 : 0.6);
  for (const Implementation& cpu : CpuImplementations()) {
    SCOPED_TRACE(cpu.name);
    cpu.Select();
    Tally tally;
    const Encoded got = Encode(cpu, format_, input, Frame::kRotated);
    ASSERT_EQ(got.result, want.result);
    Compare(format_, want, got, tally);
    ExpectWithinBudget(tally);
  }
}

INSTANTIATE_TEST_SUITE_P(AllFormats, EncodeEquivalenceTest,
                         testing::Range(std::size_t{0}, kTileFormatCount), [](const auto& param) {
                           const TileFormat f = TileFormatAt(param.param);
                           return ToString(f) + "_d" + std::to_string(f.head_dim);
                         });

}  // namespace
}  // namespace kvmill
