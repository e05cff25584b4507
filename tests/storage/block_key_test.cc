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
  const auto key = [](absl::string_view bytes) { return *BlockKey::FromBytes(bytes); };
  EXPECT_EQ(TailKey(key("parent"), 17, key("engine key")).ToHex(),
            "61fddd63baf0d535082d467fae00ac7e3a2bcc00cc68ef331593c6097d5c49f4");
  EXPECT_EQ(TailKey(BlockKey(), 1, key("k")).ToHex(),
            "a05d124708cf1acfaba0c7acb404a07326d5fb080172a38c65cc53557aaef0ee");
  // Nothing moves from one part to another.
  std::set<std::string> names;
  for (const auto& [parent, tokens, own] : {std::tuple("ab", 0x6300u, "c"),
                                            {"a", 0x6300u, "bc"},
                                            {"a", 0x6263u, "c"},
                                            {"ab", 0x63u, "c"}})
    names.insert(TailKey(key(parent), tokens, key(own)).ToHex());
  EXPECT_EQ(names.size(), 4u);
}

TEST(BlockKeyTest, TailCandidatesAreCheckedByNameValueAndLimit) {
  const TailCandidate good{*BlockKey::FromBytes("k"), 63, 1u << 31};
  const auto says = [](absl::Span<const TailCandidate> tails) {
    return std::string(CheckTailCandidates(tails, 64).message());
  };
  EXPECT_TRUE(CheckTailCandidates({}, 64).ok());
  EXPECT_TRUE(CheckTailCandidates(std::vector<TailCandidate>(kTailCandidatesMax, good), 64).ok());
  EXPECT_EQ(says(std::vector<TailCandidate>(kTailCandidatesMax + 1, good)),
            "1025 tail candidates in one lookup: at most 1024");
  EXPECT_EQ(says({good, {BlockKey(), 1, 0}}), "tail candidate 1: key of 0 bytes: want 1 to 64");
  EXPECT_EQ(says({{good.key, 0, 0}}), "tail candidate 0: token_count 0, want 1 to 63");
  EXPECT_EQ(says({{good.key, 64, 0}}), "tail candidate 0: token_count 64, want 1 to 63");
}

}  // namespace
}  // namespace kvmill
