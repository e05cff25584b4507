#include "storage/core/block_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace kvmill {
namespace {

TEST(BlockKeyTest, AcceptsOneTo64BytesAndKeepsThem) {
  for (std::size_t size = 1; size <= kBlockKeyBytesMax; ++size) {
    const std::string bytes(size, '\x9c');
    const auto key = BlockKey::FromBytes(bytes);
    ASSERT_TRUE(key.ok()) << size;
    EXPECT_EQ(key->size(), size);
    EXPECT_FALSE(key->empty());
    EXPECT_EQ(std::string(key->view().data(), key->view().size()), bytes);
  }
}

TEST(BlockKeyTest, RefusesEmptyAndTooLongNamingTheLimit) {
  EXPECT_EQ(BlockKey::FromBytes("").status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status status = BlockKey::FromBytes(std::string(65, 'x')).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("65 bytes: want 1 to 64"));
}

TEST(BlockKeyTest, HexGoesThereAndBack) {
  const auto key = BlockKey::FromHex("00fFa17e");
  ASSERT_TRUE(key.ok());
  EXPECT_EQ(key->ToHex(), "00ffa17e");
  EXPECT_EQ(*BlockKey::FromBytes(key->view()), *key);
}

TEST(BlockKeyTest, RefusesBadHex) {
  const std::string bad[] = {"",  "a", "abc", "0g", "0x12", " 12", "12 ", std::string(130, 'a'),
                             "é1"};
  for (const std::string& hex : bad) {
    EXPECT_EQ(BlockKey::FromHex(hex).status().code(), absl::StatusCode::kInvalidArgument) << hex;
  }
}

TEST(BlockKeyTest, EqualityIsOfAllBytesAndTheLength) {
  const auto key = [](std::string bytes) { return *BlockKey::FromBytes(bytes); };
  EXPECT_EQ(key("abc"), key("abc"));
  EXPECT_FALSE(key("abc") == key("abd"));
  EXPECT_FALSE(key("abc") == key(std::string("abc\0", 4)));
  std::string a(64, 'x');
  std::string b = a;
  b.back() = 'y';
  EXPECT_FALSE(key(a) == key(b));
  EXPECT_FALSE(BlockKey() == key(std::string(1, '\0')));
}

TEST(BlockKeyTest, HashDependsOnEveryPartOfTheId) {
  std::set<std::uint64_t> hashes;
  std::size_t count = 0;
  for (NamespaceId n : {0u, 1u, 256u, 0x01000000u}) {
    for (std::uint8_t group : {std::uint8_t{0}, std::uint8_t{1}, std::uint8_t{7}}) {
      for (std::size_t size : {1u, 16u, 17u, 32u, 64u}) {
        std::string bytes(size, 'k');
        for (std::size_t flip : {std::size_t{0}, size - 1}) {
          bytes[flip] ^= 1;
          hashes.insert(HashOf({n, group, *BlockKey::FromBytes(bytes)}));
          ++count;
        }
      }
    }
  }
  EXPECT_EQ(hashes.size(), count);
}

// Engines compute these themselves (docs/formats.md).
TEST(BlockKeyTest, TailKeysAreTheDocumentedOnes) {
  EXPECT_EQ(TailKey(*BlockKey::FromBytes("parent"), 17).ToHex(),
            "49177db366ab7e1f1b841454e02a6588e94ede8493f663289cebb3653024e2ca");
  EXPECT_EQ(TailKey(BlockKey(), 1).ToHex(),
            "3867a6e85e1d36aea25ce414e9322bf73c7f54a1d20eb57ef9a1bde2c42ada2a");
}

}  // namespace
}  // namespace kvmill
