#include "client/cli/raw_heads.h"

#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

constexpr TileFormat kFormat{4, 2, 64, 64};

std::vector<RawHead> TwoHeads() {
  std::vector<RawHead> heads(2);
  heads[0] = {0, 1, std::vector<std::uint16_t>(64 * 64, 7), std::vector<std::uint16_t>(64 * 64, 8)};
  heads[1] = {2, 0, std::vector<std::uint16_t>(64 * 64, 9), std::vector<std::uint16_t>(64 * 64, 1)};
  return heads;
}

TEST(RawHeadsTest, WhatIsWrittenIsRead) {
  const std::string bytes = SerializeRawHeads(TwoHeads(), kFormat, DType::kBFloat16, 2, 3);
  const absl::StatusOr<RawHeads> parsed = ParseRawHeads(bytes, kFormat, 2);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->dtype, DType::kBFloat16);
  EXPECT_EQ(parsed->block_count, 3u);
  ASSERT_EQ(parsed->heads.size(), 2u);
  EXPECT_EQ(parsed->heads[0].head, 1u);
  EXPECT_EQ(parsed->heads[1].block, 2u);
  EXPECT_EQ(parsed->heads[1].k, TwoHeads()[1].k);
  EXPECT_EQ(parsed->heads[1].v, TwoHeads()[1].v);
}

TEST(RawHeadsTest, EveryFlippedByteIsFound) {
  const std::string good = SerializeRawHeads(TwoHeads(), kFormat, DType::kFloat16, 2, 3);
  for (std::size_t at = 0; at < good.size(); at += at < 64 ? 1 : 997) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    EXPECT_FALSE(ParseRawHeads(bad, kFormat, 2).ok()) << at;
  }
}

TEST(RawHeadsTest, OtherGeometryAndOtherLengthAreRefused) {
  const std::string good = SerializeRawHeads(TwoHeads(), kFormat, DType::kFloat16, 2, 3);
  EXPECT_FALSE(ParseRawHeads(good, kFormat, 3).ok());
  EXPECT_FALSE(ParseRawHeads(good, TileFormat{4, 2, 128, 64}, 2).ok());
  EXPECT_FALSE(ParseRawHeads(good + "x", kFormat, 2).ok());
  EXPECT_FALSE(ParseRawHeads(good.substr(0, good.size() - 1), kFormat, 2).ok());
  EXPECT_FALSE(ParseRawHeads("", kFormat, 2).ok());
}

TEST(RawHeadsTest, NoRawHeadsIsAFileToo) {
  const std::string bytes = SerializeRawHeads({}, kFormat, DType::kFloat16, 2, 3);
  EXPECT_EQ(bytes.size(), sizeof(RawHeadsHeader));
  EXPECT_TRUE(ParseRawHeads(bytes, kFormat, 2)->heads.empty());
}

}  // namespace
}  // namespace kvmill::cli
