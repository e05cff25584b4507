// Refined records: S, Z and codes that stretch what least squares finds, at the T that encode has,
// and the cpu implementation as good as the reference at every SIMD level.
//
// Method: tiles of every kind through both algorithms; errors are those of decoded tiles, in the
// model's frame, products those of decoded and original values.
#include "kernels/refine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/refine_reference.h"
#include "tests/kernels/tile_inputs.h"

namespace kvmill {
namespace {

// The implementation with the refined encoder in place of its own.
Implementation Refining(Implementation with) {
  with.encode = with.simd.empty() ? EncodeRefinedTilesReference : EncodeRefinedTilesCpu;
  return with;
}

// Of one half of a decoded tile.
struct Fidelity {
  double error = 0;  // Relative.
  double share = 0;  // The product with the values / their square.
};
Fidelity FidelityOf(const std::vector<float>& got, const std::vector<std::uint16_t>& bits,
                    DType dtype) {
  std::vector<float> values;
  for (const std::uint16_t b : bits) values.push_back(ToFloat(b, dtype));
  double product = 0, square = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    product += static_cast<double>(got[i]) * static_cast<double>(values[i]);
    square += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  return {RelativeError(got, values), square > 0 ? product / square : 1};
}

struct Outcome {
  Encoded encoded;
  Fidelity k, v;
};
Outcome OutcomeOf(const Implementation& with, const TileFormat& format, const TileInput& input,
                  Frame frame = Frame::kModel) {
  Outcome out;
  out.encoded = Encode(with, format, input, frame);
  if (out.encoded.result != EncodeResult::kTile) return out;
  const Decoded tile = Decode(ReferenceImplementation(), format, out.encoded.record, frame);
  out.k = FidelityOf(tile.k, input.k, input.dtype);
  out.v = FidelityOf(tile.v, input.v, input.dtype);
  return out;
}

bool SameBytes(const std::vector<std::byte>& a, const std::vector<std::byte>& b, std::size_t from,
               std::size_t bytes) {
  return std::memcmp(a.data() + from, b.data() + from, bytes) == 0;
}

TEST(RefineTest, AFitGoesThroughPointsThatLieOnALine) {
  float codes[] = {0, 1, 1, 3}, across[4], values[4];
  for (std::size_t i = 0; i < 4; ++i) {
    across[i] = codes[i] + 0.5f;
    values[i] = (2 * codes[i] + 1) * across[i];
  }
  RefineRow row{values, across, 4, 3, codes, 7, 8};
  FitReference(row);
  EXPECT_EQ(row.scale, 2);
  EXPECT_EQ(row.zero, 1);
  RecodeReference(row);
  EXPECT_EQ(codes[3], 3);
  StretchReference(row);  // Nothing is short.
  EXPECT_EQ(row.scale, 2);
  EXPECT_EQ(row.zero, 1);
  // Too large for fp16.
  for (float& value : values) value *= 40000;
  FitReference(row);
  EXPECT_EQ(row.scale, 2);
  // All codes the same: nothing to fit.
  std::fill_n(codes, 4, 2.0f);
  for (float& value : values) value /= 20000;
  FitReference(row);
  StretchReference(row);
  EXPECT_EQ(row.scale, 2);
  EXPECT_EQ(row.zero, 1);
}

TEST(RefineTest, StretchingTakesBackWhatLeastSquaresShortens) {
  float codes[] = {0, 1, 1, 2}, across[] = {1, 1, 2, 1}, values[] = {-1, 1.5, 1.5, 3};
  RefineRow row{values, across, 4, 3, codes, 1, 0};
  // Of the row: sum of decoded times value, less the means'; weights T^2.
  const auto product = [&] {
    const RefineMoments m = MomentsOf(row);
    return static_cast<double>(row.scale) * m.covariance / m.var_y;
  };
  FitReference(row);
  EXPECT_LT(product(), 0.99);
  StretchReference(row);
  EXPECT_NEAR(product(), 1, 1e-6);
  const RefineMoments m = MomentsOf(row);
  EXPECT_NEAR(static_cast<double>(row.scale) * m.mean_q + static_cast<double>(row.zero), m.mean_y,
              1e-6);
  // Codes that have little to do with the values are left.
  float noise[] = {-1, 9, -9, 1.2f};
  row.values = noise;
  row.scale = 1;
  row.zero = 0.25f;
  StretchReference(row);
  EXPECT_EQ(row.scale, 1);
  EXPECT_EQ(row.zero, 0.25f);
}

TEST(RefineTest, NoFitMakesARowWorse) {
  for (const InputKind kind : kInputKinds) {
    SCOPED_TRACE(ToString(kind));
    const TileInput input = MakeInput({2, 2, 128, 128}, kind, DType::kFloat16, 7);
    std::vector<float> across(128, 1.0f), values(128), codes(128);
    for (std::size_t r = 0; r < 128; ++r) {
      for (std::size_t c = 0; c < 128; ++c) {
        across[c] = 0.75f + static_cast<float>(c % 7);
        values[c] = ToFloat(input.k[r * 128 + c], input.dtype);
      }
      RefineRow row{values.data(), across.data(), 128, 3, codes.data(), 0.5f, -1.0f};
      const auto error = [&] {
        double sum = 0;
        for (std::size_t c = 0; c < 128; ++c) {
          const double moved =
              static_cast<double>((codes[c] * row.scale + row.zero) * across[c] - values[c]);
          sum += moved * moved;
        }
        return sum;
      };
      RecodeReference(row);
      double before = error();
      for (int fit = 0; fit < 3; ++fit) {
        FitReference(row);
        const double fitted = error();
        ASSERT_LE(fitted, before * (1 + 1e-5) + 1e-9) << "row " << r;
        RecodeReference(row);
        before = error();
        ASSERT_LE(before, fitted * (1 + 1e-5) + 1e-9) << "row " << r;
      }
    }
  }
}

TEST(RefineTest, EveryLevelIsAsGoodAsTheReferenceAndKeepsTAndResults) {
  int tiles = 0;
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    const RecordLayout at = LayoutOf(format);
    for (const InputKind kind : kInputKinds) {
      const DType dtype =
          (i + static_cast<std::size_t>(kind)) % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
      SCOPED_TRACE(ToString(format) + " d" + std::to_string(format.head_dim) + " " +
                   ToString(kind));
      const TileInput input = MakeInput(format, kind, dtype, 5);
      const Outcome plain = OutcomeOf(ReferenceImplementation(), format, input);
      const Outcome want = OutcomeOf(Refining(ReferenceImplementation()), format, input);
      ASSERT_EQ(want.encoded.result, plain.encoded.result);
      if (plain.encoded.result != EncodeResult::kTile) continue;
      ++tiles;
      // Stretching costs less than what the fits win, but for rows that had nothing to win.
      EXPECT_LE(want.k.error, plain.k.error * 1.01 + 1e-7);
      EXPECT_LE(want.v.error, plain.v.error * 1.01 + 1e-7);
      EXPECT_NEAR(want.k.share, 1, 0.01);
      EXPECT_NEAR(want.v.share, 1, 0.01);
      // A token that outweighs all others is left with what S, Z and T are rounded by.
      const double slack = kind == InputKind::kHugeToken ? 0.3 : 0.01;
      for (const Implementation& cpu : CpuImplementations()) {
        SCOPED_TRACE(cpu.name);
        cpu.Select();
        const Outcome kvarn = OutcomeOf(cpu, format, input);
        const Outcome got = OutcomeOf(Refining(cpu), format, input);
        ASSERT_EQ(got.encoded.result, kvarn.encoded.result);
        ASSERT_EQ(got.encoded.result, EncodeResult::kTile);
        EXPECT_NEAR(got.k.error, want.k.error, slack * want.k.error + 1e-7);
        EXPECT_NEAR(got.v.error, want.v.error, slack * want.v.error + 1e-7);
        EXPECT_NEAR(got.k.share, want.k.share, 2e-3);
        EXPECT_NEAR(got.v.share, want.v.share, 2e-3);
        const auto& a = got.encoded.record;
        const auto& b = kvarn.encoded.record;
        EXPECT_TRUE(SameBytes(a, b, at.k_token, at.v_codes - at.k_token));
        EXPECT_TRUE(SameBytes(a, b, at.v_channel, at.v_scale - at.v_channel));
      }
      ForceCpuSimd("");
    }
  }
  EXPECT_GT(tiles, 150);
}

TEST(RefineTest, TwoBitsWinTheMost) {
  const TileInput input = MakeInput({2, 2, 128, 128}, InputKind::kGaussian, DType::kFloat16, 9);
  for (const Implementation& with : {ReferenceImplementation(), CpuImplementations().front()}) {
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      SCOPED_TRACE(with.name);
      with.Select();
      Outcome before = OutcomeOf(with, {2, 2, 128, 128}, input, frame);
      Outcome after = OutcomeOf(Refining(with), {2, 2, 128, 128}, input, frame);
      EXPECT_LT(after.k.error, 0.85 * before.k.error);
      EXPECT_LT(after.v.error, 0.85 * before.v.error);
      EXPECT_NEAR(after.k.share, 1, 2e-3);
      EXPECT_NEAR(after.v.share, 1, 2e-3);
      before = OutcomeOf(with, {4, 4, 128, 128}, input, frame);
      after = OutcomeOf(Refining(with), {4, 4, 128, 128}, input, frame);
      EXPECT_LT(after.k.error, 0.99 * before.k.error);
      EXPECT_LT(after.v.error, 0.99 * before.v.error);
    }
  }
  ForceCpuSimd("");
}

TEST(RefineTest, ConstantRowsKeepTheirZero) {
  const TileFormat format{4, 2, 128, 64};
  const TileInput input = MakeInput(format, InputKind::kConstant, DType::kFloat16, 1);
  for (const Implementation& with : {ReferenceImplementation(), CpuImplementations().front()}) {
    SCOPED_TRACE(with.name);
    with.Select();
    const Outcome before = OutcomeOf(with, format, input);
    const Outcome after = OutcomeOf(Refining(with), format, input);
    ASSERT_EQ(after.encoded.result, EncodeResult::kTile);
    EXPECT_LE(after.k.error, before.k.error + 1e-7);
    EXPECT_LE(after.v.error, before.v.error + 1e-7);
  }
  ForceCpuSimd("");
}

}  // namespace
}  // namespace kvmill
