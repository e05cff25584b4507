// The disk tier's promises one by one, without faults of the disk (rocks_disk_store_fault_test.cc)
// and of the process (rocks_disk_store_crash_test.cc).
#include "storage/rocks_disk_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/rocks_crc32c.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kPageBytes = 14 * 1024;

using RocksDiskStoreTest = DiskStoreTest;

TEST_P(RocksDiskStoreTest, ReadsBackWhatWasWritten) {
  Open();
  const TestBlock block = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(block).ok());
  EXPECT_EQ(Get(block), "right");
  ASSERT_TRUE(store_->Flush().ok());
  EXPECT_EQ(Get(block), "right");
  EXPECT_GT(store_->page_file_bytes_read(), 4 * kPageBytes - 1);

  const absl::StatusOr<DiskBlockMeta> meta = store_->Find(block.meta.id);
  ASSERT_TRUE(meta.ok());
  EXPECT_EQ(meta->id, block.meta.id);
  EXPECT_EQ(meta->parent, block.meta.parent);
  EXPECT_EQ(meta->token_count, 128);
  EXPECT_EQ(meta->page_bytes, block.meta.page_bytes);
  EXPECT_GT(meta->epoch, 0u);
}

// Without it a write takes three times the processor time.
TEST_P(RocksDiskStoreTest, RocksDbCallsOurChecksum) {
  Open();
  EXPECT_TRUE(RocksUsesFastCrc32c());
}

TEST_P(RocksDiskStoreTest, ReadsPagesOfDifferentLengthsOneByOne) {
  Open();
  TestBlock block = MakeBlock(7, 0, 0);
  for (const std::size_t page_bytes : {1u, 64u, 4096u, 4096u, 111u * 1024, 300u * 1024}) {
    block.pages.emplace_back(page_bytes);
    FillPage(page_bytes, absl::MakeSpan(block.pages.back()));
    block.meta.page_bytes.push_back(static_cast<std::uint32_t>(page_bytes));
  }
  ASSERT_TRUE(Put(block).ok());
  ASSERT_TRUE(store_->Flush().ok());
  for (std::size_t i = 0; i < block.pages.size(); ++i) {
    std::vector<std::byte> page(block.pages[i].size());
    const absl::Span<std::byte> out[] = {absl::MakeSpan(page)};
    ASSERT_TRUE(store_->Read(block.meta.id, i, out).ok()) << i;
    EXPECT_EQ(page, block.pages[i]) << i;
  }
}

TEST_P(RocksDiskStoreTest, AnAbsentBlockIsNotFound) {
  Open();
  EXPECT_TRUE(absl::IsNotFound(store_->Find(TestId(1)).status()));
  std::vector<std::byte> page(16);
  const absl::Span<std::byte> out[] = {absl::MakeSpan(page)};
  EXPECT_TRUE(absl::IsNotFound(store_->Read(TestId(1), 0, out)));
  EXPECT_TRUE(store_->Remove({TestId(1)}).ok());
}

TEST_P(RocksDiskStoreTest, ASecondWriteKeepsTheFirstBytes) {
  Open();
  const TestBlock first = MakeBlock(1, 4, kPageBytes, /*salt=*/0);
  const TestBlock second = MakeBlock(1, 4, kPageBytes, /*salt=*/1);
  ASSERT_TRUE(Put(first).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Put(second)));
  Reopen();
  EXPECT_TRUE(absl::IsAlreadyExists(Put(second)));
  EXPECT_EQ(Get(first), "right");
}

TEST_P(RocksDiskStoreTest, AKeyInAnotherNamespaceOrGroupIsAnotherBlock) {
  Open();
  const TestBlock block = MakeBlock(1, 1, 64);
  ASSERT_TRUE(Put(block).ok());
  DiskBlockId id = block.meta.id;
  id.group = 9;
  EXPECT_TRUE(absl::IsNotFound(store_->Find(id).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Find(TestId(1, /*tenant=*/2)).status()));
}

TEST_P(RocksDiskStoreTest, WrongLengthsAreDataLossAndBadBlocksAreRefused) {
  Open();
  TestBlock block = MakeBlock(1, 2, 64);
  ASSERT_TRUE(Put(block).ok());
  std::vector<std::byte> page(65);
  const absl::Span<std::byte> longer[] = {absl::MakeSpan(page)};
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(block.meta.id, 0, longer)));
  const absl::Span<std::byte> exact[] = {absl::MakeSpan(page).subspan(0, 64)};
  EXPECT_TRUE(store_->Read(block.meta.id, 1, exact).ok());
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(block.meta.id, 2, exact)));
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(block.meta.id, SIZE_MAX, exact)));

  TestBlock bad = MakeBlock(2, 2, 64);
  bad.meta.page_bytes[1] = 65;
  EXPECT_TRUE(absl::IsInvalidArgument(Put(bad)));
  bad.meta.page_bytes.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(Put(bad)));
  EXPECT_TRUE(absl::IsInvalidArgument(Put(MakeBlock(3, 0, 0))));
  EXPECT_TRUE(absl::IsInvalidArgument(Put(MakeBlock(3, 1, 0))));
  EXPECT_EQ(store_->stats().block_count, 1u);
}

TEST_P(RocksDiskStoreTest, ABlockLargerThanAnEpochIsResourceExhausted) {
  options_.capacity_bytes = kDiskCapacityBytesMin;  // Epochs of 1 MiB.
  Open();
  EXPECT_TRUE(absl::IsResourceExhausted(Put(MakeBlock(1, 1, (1 << 20) + 1))));
  EXPECT_TRUE(Put(MakeBlock(2, 4, 250 << 10)).ok());
}

TEST_P(RocksDiskStoreTest, BadOptionsAreInvalid) {
  const auto open = [this](auto change) {
    RocksDiskStoreOptions options = options_;
    change(options);
    return RocksDiskStore::Open(options).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.directory = ""; })));
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.capacity_bytes = 1 << 20; })));
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.epoch_count = 3; })));
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.epoch_count = 65; })));
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.reinsert_share = 0.95; })));
  EXPECT_TRUE(absl::IsInvalidArgument(open([](auto& o) { o.memtable_bytes = 1; })));
  EXPECT_TRUE(absl::IsUnavailable(open([this](auto& o) { o.directory = temp_.Sub("a/b"); })));
}

TEST_P(RocksDiskStoreTest, TheDirectoryIsPrivate) {
  ASSERT_EQ(mkdir(options_.directory.c_str(), 0755), 0);
  Open();
  struct stat info {};
  ASSERT_EQ(stat(options_.directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
}

TEST_P(RocksDiskStoreTest, ADirectoryOfOthersIsRefusedAndKeepsItsMode) {
  ASSERT_EQ(mkdir(options_.directory.c_str(), 0755), 0);
  ASSERT_EQ(chmod(options_.directory.c_str(), 0755), 0);
  const std::string theirs = options_.directory + "/letter";
  std::ofstream(theirs) << "dear";
  const absl::Status status = RocksDiskStore::Open(options_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("0755"));
  struct stat info {};
  ASSERT_EQ(stat(options_.directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0755u);
  ASSERT_EQ(unlink(theirs.c_str()), 0);
  // A file system of its own begins like this.
  ASSERT_EQ(mkdir((options_.directory + "/lost+found").c_str(), 0700), 0);
  Open();
  Close();
  // What was ours once is ours, whatever happened to its mode.
  ASSERT_EQ(chmod(options_.directory.c_str(), 0770), 0);
  Open();
  ASSERT_EQ(stat(options_.directory.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
}

TEST_P(RocksDiskStoreTest, ASecondOpenOfTheDirectoryIsRefused) {
  Open();
  const TestBlock block = MakeBlock(1, 4, kPageBytes);
  ASSERT_TRUE(Put(block).ok());
  const absl::Status second = RocksDiskStore::Open(options_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
  EXPECT_THAT(std::string(second.message()),
              HasSubstr(absl::StrFormat("in use by process %d", getpid())));
  EXPECT_EQ(second.message().find('\n'), absl::string_view::npos);
  EXPECT_EQ(Get(block), "right");
  Close();
  Open();  // The lock went with the store.
  EXPECT_EQ(Get(block), "right");
}

TEST_P(RocksDiskStoreTest, ARemovedBlockStaysRemovedAfterFlush) {
  Open();
  const TestBlock kept = MakeBlock(1, 4, kPageBytes);
  const TestBlock removed = MakeBlock(2, 4, kPageBytes);
  ASSERT_TRUE(Put(kept).ok());
  ASSERT_TRUE(Put(removed).ok());
  ASSERT_TRUE(store_->Flush().ok());
  // Twice in one call, and one that is not there.
  ASSERT_TRUE(store_->Remove({removed.meta.id, removed.meta.id, TestId(99)}).ok());
  EXPECT_EQ(Get(removed), "absent");
  EXPECT_EQ(store_->stats().block_count, 1u);
  ASSERT_TRUE(store_->Flush().ok());
  Reopen();
  EXPECT_EQ(Get(removed), "absent");
  EXPECT_EQ(Get(kept), "right");
  EXPECT_EQ(store_->stats().block_count, 1u);
}

TEST_P(RocksDiskStoreTest, AKeyCanBeWrittenAgainAfterRemove) {
  Open();
  const TestBlock first = MakeBlock(1, 4, kPageBytes, /*salt=*/0);
  const TestBlock second = MakeBlock(1, 2, 2 * kPageBytes, /*salt=*/1);
  ASSERT_TRUE(Put(first).ok());
  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Remove({first.meta.id}).ok());
  Reopen();  // A new process may use the removed block's number again.
  ASSERT_TRUE(Put(second).ok());
  EXPECT_EQ(Get(second), "right");
  Reopen();
  EXPECT_EQ(Get(second), "right");
}

TEST_P(RocksDiskStoreTest, ScanVisitsEveryBlockAndStopsWhenTold) {
  Open();
  std::set<std::string> want;
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(Put(MakeBlock(i, 1, 100)).ok());
    want.insert(TestId(i).key.ToHex());
  }
  ASSERT_TRUE(store_->Remove({TestId(3)}).ok());
  want.erase(TestId(3).key.ToHex());
  Reopen();
  std::set<std::string> seen;
  ASSERT_TRUE(store_
                  ->Scan([&](const DiskBlockMeta& meta) {
                    EXPECT_EQ(meta.page_bytes.size(), 1u);
                    EXPECT_TRUE(seen.insert(meta.id.key.ToHex()).second);
                    return true;
                  })
                  .ok());
  EXPECT_EQ(seen, want);
  int visited = 0;
  ASSERT_TRUE(store_->Scan([&](const DiskBlockMeta&) { return ++visited < 5; }).ok());
  EXPECT_EQ(visited, 5);
}

TEST_P(RocksDiskStoreTest, OpenAndScanReadNoPage) {
  Open();
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_TRUE(Put(MakeBlock(i, 4, kPageBytes)).ok());
  Reopen();
  std::size_t blocks = 0;
  ASSERT_TRUE(store_
                  ->Scan([&](const DiskBlockMeta&) {
                    ++blocks;
                    return true;
                  })
                  .ok());
  EXPECT_EQ(blocks, 50u);
  EXPECT_EQ(store_->page_file_bytes_read(), 0u);
  EXPECT_EQ(Get(MakeBlock(1, 4, kPageBytes)), "right");
  EXPECT_GE(store_->page_file_bytes_read(), 4 * kPageBytes);  // The counter does count.
}

TEST_P(RocksDiskStoreTest, NamespacesAreThereAfterARestart) {
  Open();
  ASSERT_TRUE(store_->PutNamespace({.name = "a", .encoding = std::string("\0\1\2", 3)}).ok());
  ASSERT_TRUE(store_->PutNamespace({.name = "b", .encoding = "old"}).ok());
  ASSERT_TRUE(store_->PutNamespace({.name = "b", .encoding = "new"}).ok());
  Reopen();
  const auto records = store_->Namespaces();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2u);
  EXPECT_EQ((*records)[0].name, "a");
  EXPECT_EQ((*records)[0].encoding, std::string("\0\1\2", 3));
  EXPECT_EQ((*records)[1].encoding, "new");
}

INSTANTIATE_TEST_SUITE_P(Files, RocksDiskStoreTest, ::testing::Bool(), EncryptionName);

}  // namespace
}  // namespace kvmill
