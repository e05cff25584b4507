// Goal: the cpu encoder, at every SIMD level, and the CUDA encoder are the reference encoder, for
// every format and kind of input. Method: encode the same tile with both; count the codes that
// differ (budget 1e-5 of them, off by one each) and compare the decoded tiles (relative Frobenius
// distance: 99 % within 2.5e-3, all within 2e-2). Scales are not compared: iterates that tie differ
// by a factor that cancels.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/encode_budget.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_inputs.h"
#include "tests/kernels/tile_testing.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

struct Source {
  DType dtype;
  std::uint32_t seed;
};

std::vector<Source> Sources() {
  std::vector<Source> sources = {{DType::kFloat16, 1}, {DType::kFloat16, 2}, {DType::kBFloat16, 3}};
  for (std::uint32_t seed = 100; seed < ShortOrLong(100u, 120u); ++seed) {
    sources.push_back({seed % 2 == 0 ? DType::kFloat16 : DType::kBFloat16, seed});
  }
  return sources;
}

class EncodeEquivalenceTest : public testing::TestWithParam<std::size_t> {
 protected:
  const TileFormat format_ = TileFormatAt(GetParam());
};

TEST_P(EncodeEquivalenceTest, EveryLevelEncodesEveryKindOfInputAsTheReference) {
  std::map<std::string, Tally> tallies;
  for (const InputKind kind : kInputKinds) {
    for (const Source& source : Sources()) {
      const TileInput input = MakeInput(format_, kind, source.dtype, source.seed);
      const Encoded want = Encode(ReferenceImplementation(), format_, input);
      for (const Implementation& fast : FastImplementations()) {
        // The reference itself, and slow: once is enough.
        if (fast.simd == "SCALAR" && kind != InputKind::kGaussian) continue;
        // Slow as well: each kind takes a third of the sources.
        if (fast.simulated && source.seed % 3 != static_cast<std::uint32_t>(kind) % 3) continue;
        SCOPED_TRACE(testing::Message() << fast.name << ", " << ToString(kind) << ", "
                                        << (source.dtype == DType::kFloat16 ? "fp16" : "bf16")
                                        << ", seed " << source.seed);
        fast.Select();
        const Encoded got = Encode(fast, format_, input);
        ASSERT_EQ(got.result, want.result);
        if (want.result == EncodeResult::kTile) Compare(format_, want, got, tallies[fast.name]);
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
  EXPECT_LE(RelativeError(tile.k, k), format_.key_bits == 4   ? 0.15
                                      : format_.key_bits == 3 ? 0.3
                                                              : 0.6);
  for (const Implementation& fast : FastImplementations()) {
    SCOPED_TRACE(fast.name);
    fast.Select();
    Tally tally;
    const Encoded got = Encode(fast, format_, input, Frame::kRotated);
    ASSERT_EQ(got.result, want.result);
    Compare(format_, want, got, tally);
    ExpectWithinBudget(tally);
  }
}

INSTANTIATE_TEST_SUITE_P(AllFormats, EncodeEquivalenceTest,
                         testing::Range(std::size_t{0}, FormatCount()), [](const auto& param) {
                           const TileFormat f = TileFormatAt(param.param);
                           return ToString(f) + "_d" + std::to_string(f.head_dim);
                         });

}  // namespace
}  // namespace kvmill
