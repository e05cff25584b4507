#include "storage/block_index.h"

#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "storage/core/mutex.h"

namespace kvmill {
namespace {

BlockKey Key(std::uint64_t number) {
  return *BlockKey::FromBytes(absl::StrFormat("key-%028d", number));
}
BlockId Id(std::uint64_t number) { return {7, 0, Key(number)}; }

std::unique_ptr<BlockIndex> Make(std::uint32_t entries_max) {
  auto index = BlockIndex::Create({.entries_max = entries_max});
  EXPECT_TRUE(index.ok()) << index.status();
  return *std::move(index);
}

absl::StatusOr<EntryId> Add(BlockIndex& index, std::uint64_t number, std::size_t pages = 2) {
  return index.Insert(Id(number), pages, [&](BlockEntry& e) {
    e.flags = kInHost;
    e.token_count = static_cast<std::uint16_t>(number % 128);
    for (PagePlace& place : e.pages) place.page_bytes = static_cast<std::uint32_t>(number);
  });
}

void Drop(BlockIndex& index, EntryId entry) {
  ASSERT_TRUE(index.Detach(entry, [](BlockEntry&) {}));
  index.Free(entry);
}

TEST(BlockIndexTest, RefusesBadOptionsAndMoreThanItsLimit) {
  EXPECT_EQ(BlockIndex::Create({.entries_max = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  auto index = Make(3);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Add(*index, i).ok());
  const absl::Status full = Add(*index, 3).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("at most 3"), absl::string_view::npos) << full;
  EXPECT_EQ(Add(*index, 2).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST(BlockIndexTest, DetachedEntryLivesUntilFreedAndItsKeyIsFree) {
  auto index = Make(16);
  const EntryId first = *Add(*index, 1);
  ASSERT_TRUE(index->Detach(first, [](BlockEntry& e) { e.references = 1; }));
  EXPECT_FALSE(index->Detach(first, [](BlockEntry&) {}));
  EXPECT_FALSE(index->Find(Id(1), [](EntryId, BlockEntry&) {}));
  const EntryId second = *Add(*index, 1);
  EXPECT_NE(first, second);
  index->With(first, [](BlockEntry& e) {
    EXPECT_EQ(e.pages[1].page_bytes, 1u);
    e.references = 0;
  });
  index->Free(first);
  EXPECT_TRUE(index->Find(Id(1), [&](EntryId entry, BlockEntry&) { EXPECT_EQ(entry, second); }));
  EXPECT_EQ(index->size(), 1u);
}

TEST(BlockIndexTest, GroupAndNamespaceArePartOfTheIdentity) {
  auto index = Make(16);
  ASSERT_TRUE(Add(*index, 1).ok());
  EXPECT_FALSE(index->Find({8, 0, Key(1)}, [](EntryId, BlockEntry&) {}));
  EXPECT_FALSE(index->Find({7, 1, Key(1)}, [](EntryId, BlockEntry&) {}));
}

TEST(BlockIndexTest, BatchEqualsSingleLookups) {
  auto index = Make(20000);
  for (std::uint64_t i = 0; i < 10000; i += 3) ASSERT_TRUE(Add(*index, i).ok());
  std::vector<BlockKey> keys;
  for (std::uint64_t i = 0; i < 10000; ++i) keys.push_back(Key(i));
  std::vector<BlockIndex::Presence> found(keys.size());
  index->FindBatch(7, 0, keys, absl::MakeSpan(found));
  for (std::uint64_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(found[i].flags != 0, i % 3 == 0) << i;
    if (i % 3 == 0) {
      ASSERT_EQ(found[i].token_count, i % 128) << i;
    }
  }
}

// 1 M blocks of 36 pages and 32-byte keys stay within 192 bytes a block and 16 a page, the policy's
// share (40) included, and no absent key is ever found: at this size some of them share table cells
// and tags with present ones.
TEST(BlockIndexTest, MillionBlocksStayWithinTheBudgetAndNoAbsentKeyIsFound) {
  constexpr std::uint64_t kBlocks = 1'000'000;
  constexpr std::uint64_t kPages = 36;
  constexpr std::uint64_t kPolicyBytes = 40;
  auto index = Make(kBlocks);
  for (std::uint64_t i = 0; i < kBlocks; ++i) ASSERT_TRUE(Add(*index, i, kPages).ok()) << i;
  const double bytes_per_block = static_cast<double>(index->metadata_bytes()) / kBlocks;
  RecordProperty("bytes_per_block_without_pages", std::to_string(bytes_per_block - 16.0 * kPages));
  EXPECT_LE(bytes_per_block, 192 - kPolicyBytes + 16 * kPages);
  std::vector<BlockKey> keys(4096);
  std::vector<BlockIndex::Presence> found(keys.size());
  for (std::uint64_t begin = 0; begin < 2 * kBlocks; begin += keys.size()) {
    for (std::uint64_t i = 0; i < keys.size(); ++i) keys[i] = Key(begin + i);
    index->FindBatch(7, 0, keys, absl::MakeSpan(found));
    for (std::uint64_t i = 0; i < keys.size(); ++i)
      ASSERT_EQ(found[i].flags != 0, begin + i < kBlocks) << begin + i;
  }
}

// Each thread owns the numbers congruent to it and keeps a model of them; all use the same shards.
TEST(BlockIndexTest, ThreadsAgreeWithTheirModels) {
  auto index = Make(50000);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::map<std::uint64_t, EntryId> model;
      for (int step = 0; step < 60000; ++step) {
        const std::uint64_t number = random() % 2000 * 4 + t;
        const auto it = model.find(number);
        if (random() % 3 != 0) {
          bool right = true;
          const bool found = index->Find(Id(number), [&](EntryId entry, BlockEntry& e) {
            right = it != model.end() && entry == it->second && e.id == Id(number) &&
                    e.pages.size() == number % 5 &&
                    (e.pages.empty() || e.pages[0].page_bytes == number);
          });
          ASSERT_EQ(found, it != model.end()) << number;
          ASSERT_TRUE(right) << number;
        } else if (it == model.end()) {
          auto entry = Add(*index, number, number % 5);
          ASSERT_TRUE(entry.ok()) << entry.status();
          model[number] = *entry;
        } else {
          Drop(*index, it->second);
          model.erase(it);
        }
      }
      for (const auto& [number, entry] : model) Drop(*index, entry);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(index->size(), 0u);
  index->ForEach([](EntryId, const BlockEntry&) {
    ADD_FAILURE() << "an entry is left";
    return false;
  });
}

}  // namespace
}  // namespace kvmill
