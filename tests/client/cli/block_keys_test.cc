#include "client/cli/block_keys.h"

#include <string>

#include "gtest/gtest.h"

namespace kvmill::cli {
namespace {

// Computed with another SHA-256 from the formula in the header: other programs rely on these.
TEST(BlockKeysTest, KeysAreThoseOfTheFormula) {
  const std::vector<BlockKey> keys = SequenceKeys("chat-1", 3);
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_EQ(keys[0].ToHex(), "6df0b78122c1ddbe884f29c1f93c72911bac02f2b364abe270f1719fef328027");
  EXPECT_EQ(keys[1].ToHex(), "34d33e24b7d312133fb415bd6fd73f44ad300660859afbae290ca61a5020e573");
  EXPECT_EQ(keys[2].ToHex(), "3a443863b083ab249b05c8a8e574e1a5bb38887ee012f25a3bc61681da34f7a1");
  EXPECT_EQ(SequenceKeys("", 1)[0].ToHex(),
            "7482bc36ffcceee0fd6abf4526b0610a9045000901621d5276212c174549d359");
}

TEST(BlockKeysTest, SequencesShareNoKey) {
  // Without the length in the hash, "a" and "a\0..." could meet.
  const std::vector<BlockKey> a = SequenceKeys("a", 4);
  const std::vector<BlockKey> b = SequenceKeys(std::string("a\0", 2), 4);
  for (const BlockKey& x : a) {
    for (const BlockKey& y : b) EXPECT_FALSE(x == y);
  }
}

TEST(BlockKeysTest, NoBlocksNoKeys) { EXPECT_TRUE(SequenceKeys("a", 0).empty()); }

}  // namespace
}  // namespace kvmill::cli
