// The decoders where golden tiles do not reach: every format at every SIMD level against the
// reference, and where they write.
#include "kernels/decode.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/hadamard.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/paged_output.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

class DecodeTest : public testing::TestWithParam<std::size_t> {
 protected:
  DecodeTest() { with().Select(); }
  static const Implementation& with() { return AllImplementations()[GetParam()]; }
};

TEST_P(DecodeTest, EveryFormatDecodesAsTheReferenceDoes) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    SCOPED_TRACE(testing::Message() << ToString(format) << " d" << format.head_dim);
    const std::vector<std::byte> record = RandomRecord(format, static_cast<std::uint32_t>(i));
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      const Decoded want = Decode(ReferenceImplementation(), format, record, frame);
      const Decoded got = Decode(with(), format, record, frame);
      EXPECT_LE(RelativeError(got.k, want.k), 1e-6);
      EXPECT_LE(RelativeError(got.v, want.v), 1e-6);
    }
  }
}

// The formula of the header, straight from the record.
TEST_P(DecodeTest, RotatedValuesAreCodeTimesScalePlusZeroTimesTheOtherAxis) {
  TileFormat format;
  format.key_bits = 2;
  format.value_bits = 4;
  format.group = 64;
  format.head_dim = 256;
  const RecordLayout l = LayoutOf(format);
  const std::vector<std::byte> record = RandomRecord(format, 1);
  const Decoded got = Decode(with(), format, record, Frame::kRotated);
  const std::byte* r = record.data();
  for (const std::size_t t : {0u, 1u, 17u, 63u}) {
    for (const std::size_t d : {0u, 1u, 100u, 255u}) {
      const auto k_byte = static_cast<unsigned>(r[l.k_codes + d * 16 + t / 4]);
      const auto k_code = static_cast<float>((k_byte >> (t % 4 * 2)) & 3);
      EXPECT_FLOAT_EQ(got.k[t * 256 + d],
                      (k_code * Float16At(r + l.k_scale, d) + Float16At(r + l.k_zero, d)) *
                          Float16At(r + l.k_token, t));
      const auto v_byte = static_cast<unsigned>(r[l.v_codes + t * 128 + d / 2]);
      const auto v_code = static_cast<float>((v_byte >> (d % 2 * 4)) & 15);
      EXPECT_FLOAT_EQ(got.v[t * 256 + d],
                      (v_code * Float16At(r + l.v_scale, t) + Float16At(r + l.v_zero, t)) *
                          Float16At(r + l.v_channel, d));
    }
  }
}

// As above, for the layout of 3 bits.
TEST_P(DecodeTest, ThreeBitKeysAreTheirLowBitsAndTheHighOnesBehindThem) {
  const TileFormat format{3, 2, 128, 64};
  const RecordLayout l = LayoutOf(format);
  const std::vector<std::byte> record = RandomRecord(format, 2);
  const Decoded got = Decode(with(), format, record, Frame::kRotated);
  const std::byte* r = record.data();
  for (std::size_t t = 0; t < 128; ++t) {
    for (std::size_t d = 0; d < 64; ++d) {
      const std::byte* row = r + l.k_codes + d * 48;
      const auto low = static_cast<unsigned>(row[t / 4]) >> (t % 4 * 2) & 3;
      const auto high = static_cast<unsigned>(row[32 + t / 8]) >> (t % 8) & 1;
      const auto code = static_cast<float>(low | high << 2);
      ASSERT_FLOAT_EQ(got.k[t * 64 + d],
                      (code * Float16At(r + l.k_scale, d) + Float16At(r + l.k_zero, d)) *
                          Float16At(r + l.k_token, t));
    }
  }
}

TEST_P(DecodeTest, PagesHoldTheRoundedFloatsAndNothingElseIsWritten) {
  for (const std::size_t i : {1u, 7u, 12u, 18u}) {
    const TileFormat format = TileFormatAt(i);
    const std::vector<std::byte> record = RandomRecord(format, 3);
    for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
      const Decoded want = Decode(with(), format, record, frame);
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        for (const Geometry& g : kGeometries) {
          SCOPED_TRACE(testing::Message() << ToString(format) << ", " << g.name);
          PagedOutput k(g, format, dtype);
          PagedOutput v(g, format, dtype);
          const DecodeArgs args{record.data(), k.View(), v.View()};
          Scratch scratch(DecodeScratchBytes(format));
          with().decode(format, frame, {&args, 1}, scratch.span());
          EXPECT_EQ(k.Take(format), Rounded(want.k, dtype));
          EXPECT_EQ(v.Take(format), Rounded(want.v, dtype));
          EXPECT_TRUE(k.IsUntouched());
          EXPECT_TRUE(v.IsUntouched());
        }
      }
    }
  }
}

TEST_P(DecodeTest, RecordsNeedNoAlignmentAndABatchIsItsTilesOneByOne) {
  const TileFormat format;
  MisalignedBatch batch(format);
  Scratch scratch(DecodeScratchBytes(format));
  with().decode(format, Frame::kModel, batch.args, scratch.span());
  for (std::size_t i = 0; i < batch.args.size(); ++i) {
    const Decoded want =
        Decode(with(), format, RandomRecord(format, static_cast<std::uint32_t>(i)), Frame::kModel);
    EXPECT_EQ(batch.outputs[2 * i].Take(format), Rounded(want.k, DType::kFloat16));
    EXPECT_EQ(batch.outputs[2 * i + 1].Take(format), Rounded(want.v, DType::kFloat16));
  }
}

// Halves overflow to infinity and vanish to zero as the scalar conversion does, at every level.
TEST_P(DecodeTest, ValuesOutsideTheRangeOfHalvesRoundAsTheScalarConversion) {
  const TileFormat format;
  const RecordLayout l = LayoutOf(format);
  std::vector<std::byte> record = RandomRecord(format, 9);
  for (std::size_t d = 0; d < format.head_dim; ++d) {
    PutFloat16(record.data() + l.k_scale, d, FloatToFloat16(static_cast<float>(d + 1) * 50.0f));
    PutFloat16(record.data() + l.v_channel, d, static_cast<std::uint16_t>(d + 1));  // Subnormal.
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Decoded want = Decode(with(), format, record, Frame::kRotated);
    PagedOutput k(kGeometries[0], format, dtype);
    PagedOutput v(kGeometries[0], format, dtype);
    const DecodeArgs args{record.data(), k.View(), v.View()};
    Scratch scratch(DecodeScratchBytes(format));
    with().decode(format, Frame::kRotated, {&args, 1}, scratch.span());
    EXPECT_EQ(k.Take(format), Rounded(want.k, dtype));
    EXPECT_EQ(v.Take(format), Rounded(want.v, dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(AllImplementations, DecodeTest,
                         testing::Range(std::size_t{0}, AllImplementations().size()),
                         [](const auto& param) { return AllImplementations()[param.param].name; });

}  // namespace
}  // namespace kvmill
