// Encoders and decoders against tiles that the public KVarN reference implementation encoded.
// Budgets: docs/formats.md, "Tolerances".
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/kernels/golden_data.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

constexpr std::size_t kCodeMismatchesMax = 8;  // Of one half of one case.

const std::vector<GoldenCase>& Cases() {
  static const std::vector<GoldenCase> cases = LoadGoldenCases();
  return cases;
}

TileInput InputOf(const GoldenCase& golden) {
  const auto halves = [&](const char* field) {
    const std::vector<std::byte>& bytes = golden.Field(field);
    std::vector<std::uint16_t> values(bytes.size() / 2);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  return {DType::kFloat16, halves("k_in"), halves("v_in")};
}

// "k4", "v2": how golden fields that depend on the width begin.
std::string Prefix(char half, std::uint8_t bits) { return {half, static_cast<char>('0' + bits)}; }

// The record that the golden fields make up.
std::vector<std::byte> RecordOf(const GoldenCase& golden, const TileFormat& format) {
  const std::string k = Prefix('k', format.key_bits);
  const std::string v = Prefix('v', format.value_bits);
  std::vector<std::byte> record;
  for (const std::string& field : {k + "_codes", k + "_scol", k + "_zp", std::string("k_srow"),
                                   v + "_codes", std::string("v_scol"), v + "_srow", v + "_zp"}) {
    const std::vector<std::byte>& bytes = golden.Field(field);
    record.insert(record.end(), bytes.begin(), bytes.end());
  }
  return record;
}

TileFormat FormatOf(const GoldenCase& golden, std::uint8_t key_bits, std::uint8_t value_bits) {
  TileFormat format;
  format.key_bits = key_bits;
  format.value_bits = value_bits;
  format.group = golden.group;
  format.head_dim = golden.head_dim;
  return format;
}

struct Bits {
  std::uint8_t key, value;
};
constexpr Bits kBitPairs[] = {{4, 2}, {4, 4}, {2, 2}, {2, 4}};

// (index of the case, index of the implementation)
class GoldenTest : public testing::TestWithParam<std::tuple<std::size_t, std::size_t>> {
 protected:
  const GoldenCase& golden() const { return Cases()[std::get<0>(GetParam())]; }
  const Implementation& implementation() const {
    return AllImplementations()[std::get<1>(GetParam())];
  }
};

TEST_P(GoldenTest, RecordSizesAreTheSumOfTheGoldenFields) {
  for (const Bits bits : kBitPairs) {
    const TileFormat format = FormatOf(golden(), bits.key, bits.value);
    EXPECT_EQ(RecordOf(golden(), format).size(), RecordBytes(format)) << ToString(format);
  }
}

TEST_P(GoldenTest, CodesMatchAndDecodedTilesAgree) {
  implementation().Select();
  for (const Bits bits : kBitPairs) {
    const TileFormat format = FormatOf(golden(), bits.key, bits.value);
    SCOPED_TRACE(ToString(format));
    const std::vector<std::byte> want = RecordOf(golden(), format);
    const Encoded got = Encode(implementation(), format, InputOf(golden()));
    ASSERT_EQ(got.result, EncodeResult::kTile);

    const RecordLayout layout = LayoutOf(format);
    const CodeDifferences k =
        CompareCodes(got.record.data() + layout.k_codes, want.data() + layout.k_codes,
                     format.head_dim, format.group, bits.key);
    const CodeDifferences v =
        CompareCodes(got.record.data() + layout.v_codes, want.data() + layout.v_codes, format.group,
                     format.head_dim, bits.value);
    EXPECT_LE(k.count, kCodeMismatchesMax);
    EXPECT_LE(k.largest, 1u);
    EXPECT_LE(v.count, kCodeMismatchesMax);
    EXPECT_LE(v.largest, 1u);
    RecordProperty("code_mismatches_" + ToString(format), static_cast<int>(k.count + v.count));

    const Decoded got_tile = Decode(ReferenceImplementation(), format, got.record);
    const Decoded want_tile = Decode(ReferenceImplementation(), format, want);
    EXPECT_LE(RelativeError(got_tile.k, want_tile.k), 2.5e-3);
    EXPECT_LE(RelativeError(got_tile.v, want_tile.v), 2.5e-3);
  }
}

using GoldenDecodedTest = GoldenTest;  // Only the cases that hold decoded tiles.

TEST_P(GoldenDecodedTest, DecodersReproduceTheGoldenTiles) {
  implementation().Select();
  for (const std::uint8_t bits : {std::uint8_t{2}, std::uint8_t{4}}) {
    const TileFormat format = FormatOf(golden(), bits, bits);
    SCOPED_TRACE(ToString(format));
    const std::vector<std::byte> record = RecordOf(golden(), format);
    const std::string k = Prefix('k', bits);
    const std::string v = Prefix('v', bits);

    const Decoded rotated = Decode(implementation(), format, record, Frame::kRotated);
    if (implementation().name == "reference") {  // Bit for bit.
      EXPECT_EQ(rotated.k, golden().Floats(k + "_dq_rot"));
      EXPECT_EQ(rotated.v, golden().Floats(v + "_dq_rot"));
    }
    EXPECT_LE(RelativeError(rotated.k, golden().Floats(k + "_dq_rot")), 1e-6);
    EXPECT_LE(RelativeError(rotated.v, golden().Floats(v + "_dq_rot")), 1e-6);

    const Decoded model = Decode(implementation(), format, record, Frame::kModel);
    EXPECT_LE(RelativeError(model.k, golden().Floats(k + "_dq")), 1e-6);
    EXPECT_LE(RelativeError(model.v, golden().Floats(v + "_dq")), 1e-6);
  }
}

std::vector<std::size_t> CasesWithDecodedTiles() {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < Cases().size(); ++i) {
    if (Cases()[i].Has("k4_dq_rot")) indices.push_back(i);
  }
  return indices;
}

std::string TestName(const testing::TestParamInfo<GoldenTest::ParamType>& param) {
  return Cases()[std::get<0>(param.param)].name + "_" +
         AllImplementations()[std::get<1>(param.param)].name;
}

const auto kImplementations = testing::Range(std::size_t{0}, AllImplementations().size());

INSTANTIATE_TEST_SUITE_P(AllCases, GoldenTest,
                         testing::Combine(testing::Range(std::size_t{0}, Cases().size()),
                                          kImplementations),
                         TestName);
INSTANTIATE_TEST_SUITE_P(AllCases, GoldenDecodedTest,
                         testing::Combine(testing::ValuesIn(CasesWithDecodedTiles()),
                                          kImplementations),
                         TestName);

TEST(GoldenDataTest, HoldsEveryCase) {
  EXPECT_EQ(Cases().size(), 18u);
  EXPECT_EQ(CasesWithDecodedTiles().size(), 7u);
}

}  // namespace
}  // namespace kvmill
