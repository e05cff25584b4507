#include <cstdint>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "storage/block_index.h"

namespace kvmill {
namespace {

BlockId IdOf(std::uint32_t n) {
  std::string bytes(32, 'k');
  bytes.replace(0, sizeof(n), reinterpret_cast<const char*>(&n), sizeof(n));
  return {1, 0, *BlockKey::FromBytes(bytes)};
}

// Places come from chunks, and every shard takes more than 64 of them here: a chunk whose size was
// computed by a shift of the number of chunks once came out empty.
TEST(BlockIndexGrowthTest, EveryBlockKeepsPlacesOfItsOwnPastSixtyFourChunksAShard) {
  constexpr std::uint32_t kBlocks = 400000;
  BlockIndex::Options options;
  options.entries_max = kBlocks;
  const std::unique_ptr<BlockIndex> index = *BlockIndex::Create(options);
  for (std::uint32_t n = 0; n < kBlocks; ++n) {
    ASSERT_TRUE(
        index->Insert(IdOf(n), 1, [n](BlockEntry& entry) { entry.pages()[0].page_bytes = n + 1; })
            .ok());
  }
  for (std::uint32_t n = 0; n < kBlocks; ++n) {
    std::uint32_t found = 0;
    ASSERT_TRUE(index->Find(
        IdOf(n), [&](EntryId, BlockEntry& entry) { found = entry.pages()[0].page_bytes; }));
    ASSERT_EQ(found, n + 1);
  }
}

}  // namespace
}  // namespace kvmill
