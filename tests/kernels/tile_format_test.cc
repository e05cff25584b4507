#include "kernels/tile_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda_formats.h"
#include "kernels/packed_codes.h"

namespace kvmill {
namespace {

using testing::HasSubstr;

TileFormat Format(int key_bits, int value_bits, int group, int head_dim) {
  TileFormat f;
  f.key_bits = static_cast<std::uint8_t>(key_bits);
  f.value_bits = static_cast<std::uint8_t>(value_bits);
  f.group = static_cast<std::uint16_t>(group);
  f.head_dim = static_cast<std::uint16_t>(head_dim);
  return f;
}

// The table of docs/formats.md.
TEST(TileFormatTest, RecordsHaveThePublishedSizes) {
  struct Row {
    int head_dim, group;
    std::size_t k4v2, k4v4, k2v2;
  };
  for (const Row& row : {
           Row{64, 128, 7296, 9344, 5248},
           Row{128, 128, 13824, 17920, 9728},
           Row{64, 64, 3840, 4864, 2816},
           Row{128, 64, 7296, 9344, 5248},
           Row{256, 64, 14208, 18304, 10112},
           Row{256, 128, 26880, 35072, 18688},
       }) {
    SCOPED_TRACE(testing::Message() << "D " << row.head_dim << " G " << row.group);
    EXPECT_EQ(RecordBytes(Format(4, 2, row.group, row.head_dim)), row.k4v2);
    EXPECT_EQ(RecordBytes(Format(4, 4, row.group, row.head_dim)), row.k4v4);
    EXPECT_EQ(RecordBytes(Format(2, 2, row.group, row.head_dim)), row.k2v2);
  }
}

TEST(TileFormatTest, SectionsOfK4V2G128D128LieWhereTheRecordPageSays) {
  const RecordLayout l = LayoutOf(Format(4, 2, 128, 128));
  EXPECT_EQ(l.k_codes, 0u);
  EXPECT_EQ(l.k_scale, 8192u);
  EXPECT_EQ(l.k_zero, 8448u);
  EXPECT_EQ(l.k_token, 8704u);
  EXPECT_EQ(l.v_codes, 8960u);
  EXPECT_EQ(l.v_channel, 13056u);
  EXPECT_EQ(l.v_scale, 13312u);
  EXPECT_EQ(l.v_zero, 13568u);
  EXPECT_EQ(l.bytes, 13824u);
}

// Another shape, so that a swap of group and head_dim, or of the widths, cannot hide.
TEST(TileFormatTest, SectionsOfK2V4G64D256LieWhereTheRecordPageSays) {
  const RecordLayout l = LayoutOf(Format(2, 4, 64, 256));
  EXPECT_EQ(l.k_codes, 0u);
  EXPECT_EQ(l.k_scale, 4096u);
  EXPECT_EQ(l.k_zero, 4608u);
  EXPECT_EQ(l.k_token, 5120u);
  EXPECT_EQ(l.v_codes, 5248u);
  EXPECT_EQ(l.v_channel, 13440u);
  EXPECT_EQ(l.v_scale, 13952u);
  EXPECT_EQ(l.v_zero, 14080u);
  EXPECT_EQ(l.bytes, 14208u);
}

TEST(TileFormatTest, LayoutOfThreeBitKeys) {
  const RecordLayout l = LayoutOf(Format(3, 2, 128, 128));
  EXPECT_EQ(l.k_scale, 6144u);
  EXPECT_EQ(l.v_codes, 6912u);
  EXPECT_EQ(l.bytes, 11776u);
  EXPECT_EQ(RecordBytes(Format(3, 4, 64, 64)), 4352u);
}

// By hand: what docs/formats.md says of a row.
TEST(TileFormatTest, ThreeBitsAreTwoLowOnesOfAllAndThenTheHighOnes) {
  const std::uint32_t codes[] = {1, 0, 3, 6, 7, 4, 5, 2, 0, 0, 0, 7, 4, 0, 0, 0};
  std::byte row[6] = {};
  for (std::size_t i = 0; i < 16; ++i) PutCode(row, i, 3, 16, codes[i]);
  // Low bits 1 0 3 2 | 3 0 1 2 | 0 0 0 3 | 0 0 0 0, high bits 00011110 (first lowest) and 00011000.
  const std::uint8_t want[] = {0b10110001, 0b10010011, 0b11000000, 0, 0b01111000, 0b00011000};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(static_cast<std::uint8_t>(row[i]), want[i]) << i;
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(CodeAt(row, i, 3, 16), codes[i]) << i;
}

TEST(TileFormatTest, CudaHasAllButThreeBitKeys) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    const absl::Status status = ValidateCudaTileFormat(format);
    EXPECT_EQ(status.ok(), i < kCudaTileFormatCount) << ToString(format);
    EXPECT_EQ(status.ok(), format.key_bits != 3);
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr(ToString(format)));
  }
  EXPECT_EQ(ValidateCudaTileFormat(Format(5, 2, 64, 64)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TileFormatTest, RawBytesAreTwoHalvesOfSixteenBitValues) {
  EXPECT_EQ(RawBytes(Format(4, 2, 128, 128), 128), 65536u);
  EXPECT_EQ(RawBytes(Format(4, 2, 128, 64), 3), 768u);
  EXPECT_EQ(RawBytes(Format(4, 2, 128, 64), 0), 0u);
}

TEST(TileFormatTest, EveryFormatIsValidDistinctAndReadsItsOwnName) {
  for (std::size_t i = 0; i < kTileFormatCount; ++i) {
    const TileFormat format = TileFormatAt(i);
    EXPECT_TRUE(ValidateTileFormat(format).ok()) << i;
    const absl::StatusOr<TileFormat> parsed = ParseTileFormat(ToString(format), format.head_dim);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, format);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(TileFormatAt(j), format) << i << " and " << j;
  }
}

TEST(TileFormatTest, NamesAreWrittenAsTheCommandLineTakesThem) {
  EXPECT_EQ(ToString(Format(4, 2, 128, 128)), "k4v2_g128");
  EXPECT_EQ(ToString(Format(2, 4, 64, 256)), "k2v4_g64");
}

TEST(TileFormatTest, BadNamesAreRefusedWithTheNameInTheMessage) {
  for (const char* name :
       {"",          "k",          "k4v2",       "k4v2_g",     "k4v2_128",   "k4v2g128",
        "K4v2_g128", "k4v2_g128 ", " k4v2_g128", "k4v2_g0128", "k4v2_g064",  "k4v2_g+64",
        "k4v2_g-64", "k4v2_g64x",  "k4v2_g1e2",  "k5v2_g128",  "k4v3_g128",  "k4v8_g64",
        "k0v0_g64",  "k42v2_g64",  "k4v2_g32",   "k4v2_g256",  "k4v2_g1280", "k4v2_g99",
        "v4k2_g128", "k4v2-g128",  "kxvy_g64",   "fp16"}) {
    const absl::StatusOr<TileFormat> parsed = ParseTileFormat(name, 128);
    ASSERT_FALSE(parsed.ok()) << name;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(std::string(name)));
  }
}

TEST(TileFormatTest, BadHeadDimsAreRefusedWithTheValueInTheMessage) {
  for (const std::uint32_t head_dim :
       {0u, 1u, 8u, 63u, 65u, 127u, 192u, 255u, 257u, 512u, 65536u, 65536u + 128u, 0xFFFFFFFFu}) {
    const absl::StatusOr<TileFormat> parsed = ParseTileFormat("k4v2_g128", head_dim);
    ASSERT_FALSE(parsed.ok()) << head_dim;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status().message()),
                HasSubstr("head_dim " + std::to_string(head_dim)));
  }
}

TEST(TileFormatTest, ValidationNamesTheFieldAndItsValue) {
  const auto message = [](const TileFormat& f) {
    return std::string(ValidateTileFormat(f).message());
  };
  EXPECT_THAT(message(Format(5, 2, 128, 128)), HasSubstr("key_bits 5"));
  EXPECT_THAT(message(Format(4, 0, 128, 128)), HasSubstr("value_bits 0"));
  EXPECT_THAT(message(Format(4, 2, 100, 128)), HasSubstr("group 100"));
  EXPECT_THAT(message(Format(4, 2, 128, 512)), HasSubstr("head_dim 512"));
}

}  // namespace
}  // namespace kvmill
