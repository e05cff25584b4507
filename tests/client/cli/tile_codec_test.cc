#include "client/cli/tile_codec.h"

#include <cmath>
#include <cstring>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

using ::testing::HasSubstr;

Tensor Gaussian(std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim, unsigned seed,
                DType dtype = DType::kFloat16) {
  Tensor tensor;
  tensor.tokens = tokens;
  tensor.heads = heads;
  tensor.head_dim = head_dim;
  tensor.dtype = dtype;
  std::mt19937 random(seed);
  std::normal_distribution<float> gauss;
  for (std::size_t i = 0; i < std::size_t{tokens} * heads * head_dim; ++i) {
    tensor.values.push_back(FromFloat(gauss(random), dtype));
  }
  return tensor;
}

std::uint16_t& At(Tensor& t, std::uint32_t token, std::uint32_t head, std::uint32_t channel) {
  return t.values[(std::size_t{token} * t.heads + head) * t.head_dim + channel];
}

double RelativeError(const Tensor& got, const Tensor& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    const double w = ToFloat(want.values[i], want.dtype);
    const double d = ToFloat(got.values[i], got.dtype) - w;
    difference += d * d;
    norm += w * w;
  }
  return std::sqrt(difference / norm);
}

TEST(TileCodecTest, DecodedTensorsAreAsFarOffAsTheErrorSays) {
  for (const Encoder encoder : {Encoder::kCpu, Encoder::kReference}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const TileFormat format{4, 4, 64, 128};
      const Tensor k = Gaussian(200, 3, 128, 1, dtype), v = Gaussian(200, 3, 128, 2, dtype);
      const absl::StatusOr<EncodedTensors> encoded = EncodeTensors(k, v, format, encoder);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      EXPECT_EQ(encoded->block_count, 3u);
      EXPECT_EQ(encoded->tail_tokens, 8u);
      EXPECT_EQ(encoded->records.size(), 9 * RecordBytes(format));
      const absl::StatusOr<DecodedTensors> decoded =
          DecodeRecords(encoded->records, format, 3, dtype, Frame::kModel, {});
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      EXPECT_EQ(decoded->k.ShapeString(), "[192, 3, 128]");
      Tensor tiled = k;
      tiled.values.resize(decoded->k.values.size());
      // 16-bit rounding of the output adds a little to what the encoder measured in fp32.
      EXPECT_NEAR(RelativeError(decoded->k, tiled), encoded->rel_error_k, 2e-4);
      EXPECT_GT(encoded->rel_error_k, 0.05);
      EXPECT_LT(encoded->rel_error_k, 0.15);
    }
  }
}

TEST(TileCodecTest, HeadsAndBlocksLandInTheirRecord) {
  // Head h of block b is constant b * 8 + h + 1: any mix-up shows in the decoded value.
  const TileFormat format{4, 2, 64, 64};
  Tensor k = Gaussian(128, 2, 64, 1);
  for (std::uint32_t token = 0; token < 128; ++token) {
    for (std::uint32_t head = 0; head < 2; ++head) {
      for (std::uint32_t d = 0; d < 64; ++d) {
        At(k, token, head, d) = FloatToFloat16(static_cast<float>(token / 64 * 8 + head + 1));
      }
    }
  }
  const absl::StatusOr<EncodedTensors> encoded = EncodeTensors(k, k, format, Encoder::kCpu);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  for (std::uint32_t record = 0; record < 4; ++record) {
    const std::string one =
        encoded->records.substr(record * RecordBytes(format), RecordBytes(format));
    const auto decoded = DecodeRecords(one, format, 1, DType::kFloat16, Frame::kModel, {});
    ASSERT_TRUE(decoded.ok());
    EXPECT_NEAR(Float16ToFloat(decoded->k.values[5]),
                static_cast<float>(record / 2 * 8 + record % 2 + 1), 0.05f);
  }
}

TEST(TileCodecTest, AHeadThatATileCannotHoldComesBackFromTheRawHeads) {
  const TileFormat format{4, 2, 128, 64};
  Tensor k = Gaussian(256, 2, 64, 1);
  const Tensor v = Gaussian(256, 2, 64, 2);
  for (std::uint32_t token = 128; token < 256; ++token) {
    // A few of the smallest fp16 values: the scales leave fp16 at its lower end.
    for (std::uint32_t d = 0; d < 64; ++d) {
      At(k, token, 1, d) = static_cast<std::uint16_t>((token * 7 + d * 5) % 11);
    }
  }
  const absl::StatusOr<EncodedTensors> encoded = EncodeTensors(k, v, format, Encoder::kCpu);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  ASSERT_EQ(encoded->raw_heads.size(), 1u);
  EXPECT_EQ(encoded->raw_heads[0].block, 1u);
  EXPECT_EQ(encoded->raw_heads[0].head, 1u);
  const absl::StatusOr<DecodedTensors> decoded = DecodeRecords(
      encoded->records, format, 2, DType::kFloat16, Frame::kModel, encoded->raw_heads);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  for (std::uint32_t token = 128; token < 256; ++token) {
    for (std::uint32_t d = 0; d < 64; ++d) {
      const std::size_t at = (std::size_t{token} * 2 + 1) * 64 + d;
      ASSERT_EQ(decoded->k.values[at], k.values[at]);
      ASSERT_EQ(decoded->v.values[at], v.values[at]);
    }
  }
  // The raw head is in no tile: it must not drown the error of the others.
  EXPECT_GT(encoded->rel_error_k, 0.04);
}

TEST(TileCodecTest, ZerosHaveNoError) {
  Tensor zero = Gaussian(128, 1, 64, 1);
  std::fill(zero.values.begin(), zero.values.end(), std::uint16_t{0});
  const auto encoded = EncodeTensors(zero, zero, TileFormat{4, 2, 128, 64}, Encoder::kCpu);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->rel_error_k, 0);
  EXPECT_EQ(encoded->rel_error_v, 0);
}

TEST(TileCodecTest, NonFiniteValuesAreNamedByTokenHeadAndChannel) {
  Tensor v = Gaussian(256, 2, 64, 2);
  At(v, 200, 1, 33) = 0x7C00;
  const absl::Status status =
      EncodeTensors(Gaussian(256, 2, 64, 1), v, TileFormat{4, 2, 128, 64}, Encoder::kCpu).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("V: token 200 head 1 channel 33 is inf"));
}

TEST(TileCodecTest, FewerTokensThanABlockAreAllTail) {
  const Tensor k = Gaussian(127, 1, 64, 1);
  const auto encoded = EncodeTensors(k, k, TileFormat{4, 2, 128, 64}, Encoder::kCpu);
  ASSERT_TRUE(encoded.ok());
  EXPECT_EQ(encoded->block_count, 0u);
  EXPECT_EQ(encoded->tail_tokens, 127u);
  EXPECT_TRUE(encoded->records.empty());
}

TEST(TileCodecTest, ShapesThatDoNotFitAreRefused) {
  const TileFormat format{4, 2, 128, 64};
  const Tensor k = Gaussian(128, 2, 64, 1);
  EXPECT_FALSE(EncodeTensors(k, Gaussian(128, 1, 64, 1), format, Encoder::kCpu).ok());
  EXPECT_FALSE(EncodeTensors(k, Gaussian(129, 2, 64, 1), format, Encoder::kCpu).ok());
  const Tensor wide = Gaussian(128, 2, 128, 1);
  EXPECT_FALSE(EncodeTensors(wide, wide, format, Encoder::kCpu).ok());
}

TEST(TileCodecTest, RecordsOfAnotherFormatOrCutOffAreRefused) {
  const TileFormat format{4, 2, 128, 64};
  const Tensor k = Gaussian(256, 2, 64, 1);
  const auto encoded = EncodeTensors(k, k, format, Encoder::kCpu);
  ASSERT_TRUE(encoded.ok());
  const auto decode = [&](absl::string_view bytes, const TileFormat& as, std::uint32_t heads) {
    return DecodeRecords(bytes, as, heads, DType::kFloat16, Frame::kModel, {}).ok();
  };
  EXPECT_TRUE(decode(encoded->records, format, 2));
  EXPECT_FALSE(decode(encoded->records, format, 3));
  EXPECT_FALSE(decode(encoded->records, TileFormat{4, 4, 128, 64}, 2));
  EXPECT_FALSE(decode(absl::string_view(encoded->records).substr(1), format, 2));
  std::string damaged = encoded->records;
  const std::uint16_t infinite = 0x7C00;
  std::memcpy(damaged.data() + RecordBytes(format) + LayoutOf(format).v_scale, &infinite, 2);
  EXPECT_FALSE(decode(damaged, format, 2));
}

}  // namespace
}  // namespace kvmill::cli
