// Refined records: never further from their input than what encode made, the same T and format, and
// the cpu implementation as good as the reference at every SIMD level.
//
// Method: tiles of every kind through the reference encoder, then refined; errors are those of
// decoded tiles in the rotated frame.
#include "kernels/refine.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/refine_row.h"
#include "tests/kernels/tile_inputs.h"

namespace kvmill {
namespace {

using RefineFunction = decltype(&RefineTilesReference);

// What `with` makes of a record.
std::vector<std::byte> Refine(RefineFunction with, const TileFormat& format, const TileInput& input,
                              std::vector<std::byte> record, Frame frame = Frame::kModel,
                              EncodeResult result = EncodeResult::kTile) {
  const auto* k_page = reinterpret_cast<const std::byte*>(input.k.data());
  const auto* v_page = reinterpret_cast<const std::byte*>(input.v.data());
  const std::ptrdiff_t stride = std::ptrdiff_t{2} * format.head_dim;
  EncodeArgs args;
  args.k = {&k_page, 0, format.group, stride, 2, input.dtype};
  args.v = {&v_page, 0, format.group, stride, 2, input.dtype};
  args.record = record.data();
  Scratch scratch(EncodeScratchBytes(format));
  with(format, frame, {&args, 1}, {&result, 1}, scratch.span());
  return record;
}

struct Errors {
  double k = 0, v = 0;
};
Errors ErrorsOf(const TileFormat& format, const TileInput& input,
                const std::vector<std::byte>& record, Frame frame = Frame::kModel) {
  const Decoded tile = Decode(ReferenceImplementation(), format, record, frame);
  const auto floats = [&](const std::vector<std::uint16_t>& values) {
    std::vector<float> out;
    for (const std::uint16_t bits : values) out.push_back(ToFloat(bits, input.dtype));
    return out;
  };
  return {RelativeError(tile.k, floats(input.k)), RelativeError(tile.v, floats(input.v))};
}

bool SameBytes(const std::vector<std::byte>& a, const std::vector<std::byte>& b, std::size_t from,
               std::size_t bytes) {
  return std::memcmp(a.data() + from, b.data() + from, bytes) == 0;
}

TEST(RefineTest, AFitGoesThroughPointsThatLieOnALine) {
  RowSums sums;
  for (const double q : {0.0, 1.0, 1.0, 3.0}) {
    const double t = q + 0.5, x = (2 * q + 1) * t;
    sums.w += t * t;
    sums.wq += t * t * q;
    sums.wqq += t * t * q * q;
    sums.wx += t * x;
    sums.wqx += t * x * q;
  }
  RowScale row;
  ASSERT_TRUE(FitRow(sums, row));
  EXPECT_EQ(Float16ToFloat(row.scale), 2);
  EXPECT_EQ(Float16ToFloat(row.zero), 1);
  // All codes the same: nothing to fit.
  row = {7, 8};
  EXPECT_FALSE(FitRow({4, 8, 16, 4, 8}, row));
  // Too large for fp16.
  EXPECT_FALSE(FitRow({4, 2, 2, 2e5, 2e5}, row));
  EXPECT_EQ(row.scale, 7);
  EXPECT_EQ(row.zero, 8);
}

TEST(RefineTest, NoTileGetsWorseAndEveryLevelIsAsGoodAsTheReference) {
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
      const Encoded encoded = Encode(ReferenceImplementation(), format, input);
      if (encoded.result != EncodeResult::kTile) continue;
      ++tiles;
      const Errors before = ErrorsOf(format, input, encoded.record);
      const auto refined = Refine(RefineTilesReference, format, input, encoded.record);
      const Errors want = ErrorsOf(format, input, refined);
      // Rounding S and Z to fp16 can take a little of what a fit won.
      EXPECT_LE(want.k, before.k * 1.001 + 1e-7);
      EXPECT_LE(want.v, before.v * 1.001 + 1e-7);
      EXPECT_TRUE(SameBytes(refined, encoded.record, at.k_token, at.v_codes - at.k_token));
      EXPECT_TRUE(SameBytes(refined, encoded.record, at.v_channel, at.v_scale - at.v_channel));
      // A token that outweighs all others is left with what S and Z are rounded by.
      const double slack = kind == InputKind::kHugeToken ? 0.3 : 0.01;
      for (const Implementation& cpu : CpuImplementations()) {
        SCOPED_TRACE(cpu.name);
        cpu.Select();
        const auto got = Refine(RefineTilesCpu, format, input, encoded.record);
        const Errors errors = ErrorsOf(format, input, got);
        EXPECT_NEAR(errors.k, want.k, slack * want.k + 1e-7);
        EXPECT_NEAR(errors.v, want.v, slack * want.v + 1e-7);
        EXPECT_TRUE(SameBytes(got, encoded.record, at.k_token, at.v_codes - at.k_token));
        EXPECT_TRUE(SameBytes(got, encoded.record, at.v_channel, at.v_scale - at.v_channel));
      }
      ForceCpuSimd("");
    }
  }
  EXPECT_GT(tiles, 150);
}

TEST(RefineTest, TwoBitsWinTheMost) {
  const TileInput input = MakeInput({2, 2, 128, 128}, InputKind::kGaussian, DType::kFloat16, 9);
  for (const RefineFunction refine : {&RefineTilesReference, &RefineTilesCpu}) {
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      TileFormat format{2, 2, 128, 128};
      Encoded encoded = Encode(ReferenceImplementation(), format, input, frame);
      Errors before = ErrorsOf(format, input, encoded.record, frame);
      Errors after =
          ErrorsOf(format, input, Refine(refine, format, input, encoded.record, frame), frame);
      EXPECT_LT(after.k, 0.85 * before.k);
      EXPECT_LT(after.v, 0.85 * before.v);
      format = {4, 4, 128, 128};
      encoded = Encode(ReferenceImplementation(), format, input, frame);
      before = ErrorsOf(format, input, encoded.record, frame);
      after = ErrorsOf(format, input, Refine(refine, format, input, encoded.record, frame), frame);
      EXPECT_LT(after.k, 0.99 * before.k);
      EXPECT_LT(after.v, 0.99 * before.v);
    }
  }
}

TEST(RefineTest, WhatIsNoTileIsLeftAlone) {
  const TileFormat format{4, 2, 64, 64};
  const TileInput input = MakeInput(format, InputKind::kGaussian, DType::kFloat16, 3);
  const std::vector<std::byte> record = Encode(ReferenceImplementation(), format, input).record;
  for (const RefineFunction refine : {&RefineTilesReference, &RefineTilesCpu}) {
    for (const EncodeResult result : {EncodeResult::kRaw, EncodeResult::kNonFinite}) {
      EXPECT_EQ(Refine(refine, format, input, record, Frame::kModel, result), record);
    }
    EXPECT_NE(Refine(refine, format, input, record), record);
  }
}

TEST(RefineTest, ConstantRowsKeepTheirZero) {
  const TileFormat format{4, 2, 128, 64};
  const TileInput input = MakeInput(format, InputKind::kConstant, DType::kFloat16, 1);
  const Encoded encoded = Encode(ReferenceImplementation(), format, input);
  ASSERT_EQ(encoded.result, EncodeResult::kTile);
  for (const RefineFunction refine : {&RefineTilesReference, &RefineTilesCpu}) {
    const Errors after = ErrorsOf(format, input, Refine(refine, format, input, encoded.record));
    const Errors before = ErrorsOf(format, input, encoded.record);
    EXPECT_LE(after.k, before.k + 1e-7);
    EXPECT_LE(after.v, before.v + 1e-7);
  }
}

}  // namespace
}  // namespace kvmill
