// Goal: the CUDA decoder writes what the reference decoder writes, where it writes it and nowhere
// else. Method: random records of every format into pages of every geometry, under the harness,
// against the reference: bit for bit in the rotated frame; in the model's frame, where fp32 sums in
// another order, at most one value in a hundred may round to the neighbouring 16-bit value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/decode.h"
#include "tests/kernels/implementations.h"
#include "tests/kernels/paged_output.h"
#include "tests/kernels/tile_testing.h"

namespace kvmill {
namespace {

class DecodeCudaTest : public testing::TestWithParam<std::size_t> {
 protected:
  const TileFormat format_ = TileFormatAt(GetParam());
};

TEST_P(DecodeCudaTest, PagesHoldWhatTheReferenceWritesAndNothingElseIsTouched) {
  const std::vector<std::byte> record =
      RandomRecord(format_, static_cast<std::uint32_t>(GetParam()));
  std::size_t values = 0;
  std::size_t neighbours = 0;
  std::size_t geometry = GetParam();
  for (const Frame frame : {Frame::kModel, Frame::kRotated}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const Geometry& g = kGeometries[geometry++ % std::size(kGeometries)];
      SCOPED_TRACE(g.name);
      std::vector<PagedOutput> outputs;
      for (const Implementation* with : {&ReferenceImplementation(), &AllImplementations()[0]}) {
        outputs.emplace_back(g, format_, dtype);
        outputs.emplace_back(g, format_, dtype);
        Scratch scratch(DecodeScratchBytes(format_));
        const DecodeArgs args{record.data(), outputs[outputs.size() - 2].View(),
                              outputs.back().View()};
        with->decode(format_, frame, {&args, 1}, scratch.span());
      }
      for (std::size_t half = 0; half < 2; ++half) {
        const std::vector<std::uint16_t> want = outputs[half].Take(format_);
        const std::vector<std::uint16_t> got = outputs[2 + half].Take(format_);
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t i = 0; i < want.size(); ++i) {
          if (got[i] == want[i]) continue;
          ASSERT_EQ(frame, Frame::kModel) << "value " << i;
          ++neighbours;
          const float a = ToFloat(got[i], dtype);
          const float b = ToFloat(want[i], dtype);
          // A neighbour, or two values near 0 whose difference is small for the row.
          ASSERT_LE(std::abs(a - b), std::max(std::abs(b) / 120, 1e-4f)) << "value " << i;
        }
        values += want.size();
        EXPECT_TRUE(outputs[2 + half].IsUntouched());
      }
    }
  }
  EXPECT_LE(neighbours, values / 100);
}

INSTANTIATE_TEST_SUITE_P(AllFormats, DecodeCudaTest, testing::Range(std::size_t{0}, FormatCount()),
                         [](const auto& param) {
                           const TileFormat f = TileFormatAt(param.param);
                           return ToString(f) + "_d" + std::to_string(f.head_dim);
                         });

TEST(DecodeCudaBatchTest, RecordsNeedNoAlignmentAndABatchIsItsTilesOneByOne) {
  const TileFormat format;
  MisalignedBatch batch(format);
  AllImplementations()[0].decode(format, Frame::kRotated, batch.args, {});
  for (std::size_t i = 0; i < batch.args.size(); ++i) {
    const Decoded want =
        Decode(ReferenceImplementation(), format,
               RandomRecord(format, static_cast<std::uint32_t>(i)), Frame::kRotated);
    EXPECT_EQ(batch.outputs[2 * i].Take(format), Rounded(want.k, DType::kFloat16));
    EXPECT_EQ(batch.outputs[2 * i + 1].Take(format), Rounded(want.v, DType::kFloat16));
  }
}

TEST(CudaLauncherTest, BadFormatsAreRefusedAndNoTilesAreNothing) {
  TileFormat format;
  EXPECT_TRUE(EncodeTilesCuda(format, Frame::kModel, nullptr, 0, nullptr, nullptr).ok());
  EXPECT_TRUE(DecodeTilesCuda(format, Frame::kModel, nullptr, 0, nullptr).ok());
  format.head_dim = 96;
  EXPECT_EQ(EncodeTilesCuda(format, Frame::kModel, nullptr, 1, nullptr, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeTilesCuda(format, Frame::kModel, nullptr, 1, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill
