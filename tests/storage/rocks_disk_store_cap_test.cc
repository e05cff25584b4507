// The cap: files stay below it plus one epoch whatever is written, what is read lately survives,
// and every block that goes is reported.
#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "storage/core/mutex.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

constexpr std::size_t kPages = 4;
constexpr std::size_t kPageBytes = 14 * 1024;
constexpr std::uint64_t kBlockBytes = kPages * kPageBytes;

class RocksDiskStoreCapTest : public DiskStoreTest {
 protected:
  RocksDiskStoreCapTest() {
    options_.capacity_bytes = kDiskCapacityBytesMin;
    options_.memtable_bytes = std::uint64_t{512}
                              << 10;  // Few flushes: each costs an fsync or three.
  }

  void OpenCounting() {
    Open();
    store_->SetEvictedCallback([this](absl::Span<const DiskBlockId> ids) {
      MutexLock lock(mutex_);
      for (const DiskBlockId& id : ids) evicted_.insert(id.key.ToHex());
      evicted_count_ += ids.size();
    });
  }

  std::uint64_t EpochBytes() const { return options_.capacity_bytes / options_.epoch_count; }

  // Writes blocks first..last-1 and checks the bound on files on the way.
  void Churn(std::uint64_t first, std::uint64_t last, const std::function<void()>& between) {
    for (std::uint64_t i = first; i < last; ++i) {
      ASSERT_TRUE(Put(MakeBlock(i, kPages, kPageBytes)).ok()) << i;
      if (i % 32 == 0) {
        between();
        peak_bytes_ = std::max(peak_bytes_, store_->stats().used_bytes);
      }
    }
    ASSERT_TRUE(store_->Flush().ok());
    peak_bytes_ = std::max(peak_bytes_, store_->stats().used_bytes);
  }

  // The evictor works in the background: waits until it has nothing left to do.
  void WaitForBlocks(std::uint64_t block_count) {
    for (int i = 0; i < 6000 && store_->stats().block_count != block_count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(store_->stats().block_count, block_count);
  }

  Mutex mutex_;
  std::set<std::string> evicted_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t evicted_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t peak_bytes_ = 0;
};

TEST_P(RocksDiskStoreCapTest, FiveTimesTheCapLeavesTheFilesBelowCapAndOneEpoch) {
  OpenCounting();
  const std::uint64_t blocks = 5 * options_.capacity_bytes / kBlockBytes;
  std::vector<TestBlock> hot;
  for (std::uint64_t i = 0; i < 10; ++i) hot.push_back(MakeBlock(i, kPages, kPageBytes));
  for (const TestBlock& block : hot) ASSERT_TRUE(Put(block).ok());
  Churn(hot.size(), blocks, [&] {
    for (const TestBlock& block : hot) ASSERT_EQ(Get(block), "right");
  });
  EXPECT_LE(peak_bytes_, options_.capacity_bytes + EpochBytes());
  EXPECT_GT(peak_bytes_, options_.capacity_bytes / 2);
  for (const TestBlock& block : hot) EXPECT_EQ(Get(block), "right");

  // Every block is there and right, or was reported. The evictor may be at work still: looked at
  // again until it did nothing meanwhile.
  bool changed = true;
  for (int tries = 0; changed && tries < 100; ++tries) {
    const DiskStore::Stats before = store_->stats();
    std::set<std::string> present;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      const TestBlock block = MakeBlock(i, kPages, kPageBytes);
      const std::string got = Get(block);
      EXPECT_TRUE(got == "right" || got == "absent") << i << " " << got;
      if (got == "right") present.insert(block.meta.id.key.ToHex());
    }
    const DiskStore::Stats stats = store_->stats();
    MutexLock lock(mutex_);
    changed = stats.evicted_blocks != before.evicted_blocks ||
              stats.evicted_blocks != evicted_count_ ||
              stats.reinserted_blocks != before.reinserted_blocks ||
              stats.block_count + stats.evicted_blocks != blocks;
    if (changed) continue;
    EXPECT_GT(stats.reinserted_blocks, 0u);
    EXPECT_EQ(present.size(), stats.block_count);
    for (std::uint64_t i = 0; i < blocks; ++i) {
      const std::string hex = MakeBlock(i, kPages, kPageBytes).meta.id.key.ToHex();
      EXPECT_TRUE(present.contains(hex) || evicted_.contains(hex)) << i;
    }
    EXPECT_GT(present.size() * kBlockBytes, options_.capacity_bytes * 3 / 4);
  }
  EXPECT_FALSE(changed) << "counts that do not agree, or a store that never rests";
}

// The evictor locks every block that it saw in the oldest epoch. One that was removed since and
// comes again waits for room, that is, for the evictor, which must not wait for it in turn.
TEST_P(RocksDiskStoreCapTest, ARemovedBlockThatComesAgainDuringADropDoesNotHoldItUp) {
  constexpr std::size_t kSmallBytes = 2048;  // An epoch has more blocks than go at once (256).
  constexpr std::uint64_t kOfFirstEpoch = 300;
  const std::uint64_t blocks = 2 * options_.capacity_bytes / kSmallBytes;
  Open();
  std::atomic<std::uint64_t> written{0};
  std::thread again;
  absl::Status stored_again = absl::UnknownError("not tried");
  store_->SetEvictedCallback([&](absl::Span<const DiskBlockId> ids) {
    if (again.joinable()) return;
    std::set<std::string> gone;
    for (const DiskBlockId& id : ids) gone.insert(id.key.ToHex());
    std::uint64_t number = 0;
    while (gone.contains(MakeBlock(number, 1, kSmallBytes).meta.id.key.ToHex())) ++number;
    ASSERT_LT(number, kOfFirstEpoch);
    // Until there is no room left: the other writer stands still.
    for (std::uint64_t before = ~std::uint64_t{0}; before != written;) {
      before = written;
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    ASSERT_TRUE(store_->Remove({MakeBlock(number, 1, kSmallBytes).meta.id}).ok());
    again = std::thread([&, number] { stored_again = Put(MakeBlock(number, 1, kSmallBytes)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // Now it waits, too.
  });
  for (; written < blocks && !HasFailure(); ++written) {
    ASSERT_TRUE(Put(MakeBlock(written, 1, kSmallBytes)).ok()) << written;
  }
  ASSERT_TRUE(again.joinable());
  again.join();
  EXPECT_TRUE(stored_again.ok()) << stored_again;
}

TEST_P(RocksDiskStoreCapTest, ReadingEverythingStillMakesRoom) {
  OpenCounting();
  const std::uint64_t blocks = 3 * options_.capacity_bytes / kBlockBytes;
  std::uint64_t written = 0;
  // All blocks are hot: more than may be carried over.
  for (; written < blocks; ++written) {
    ASSERT_TRUE(Put(MakeBlock(written, kPages, kPageBytes)).ok());
    if (written % 64 == 63) {
      for (std::uint64_t i = written - 63; i <= written; ++i) {
        Get(MakeBlock(i, kPages, kPageBytes));
      }
      peak_bytes_ = std::max(peak_bytes_, store_->stats().used_bytes);
    }
  }
  EXPECT_LE(peak_bytes_, options_.capacity_bytes + EpochBytes());
  EXPECT_GT(store_->stats().evicted_blocks, blocks / 3);
}

TEST_P(RocksDiskStoreCapTest, ASmallerCapTakesEffectAtTheNextStart) {
  options_.capacity_bytes = 2 * kDiskCapacityBytesMin;
  OpenCounting();
  const std::uint64_t blocks = options_.capacity_bytes * 3 / 4 / kBlockBytes;
  Churn(0, blocks, [] {});
  Close();
  options_.capacity_bytes /= 2;
  OpenCounting();
  for (int i = 0; i < 6000; ++i) {
    if (store_->stats().used_bytes <= options_.capacity_bytes) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(store_->stats().used_bytes, options_.capacity_bytes);
  EXPECT_EQ(Get(MakeBlock(blocks - 1, kPages, kPageBytes)), "right");
}

TEST_P(RocksDiskStoreCapTest, SealedEpochsWithoutBlocksGiveTheirFilesBack) {
  OpenCounting();
  const std::uint64_t blocks = options_.capacity_bytes / 2 / kBlockBytes;
  Churn(0, blocks, [] {});
  std::vector<DiskBlockId> ids;
  for (std::uint64_t i = 0; i < blocks; ++i) ids.push_back(TestId(i));
  ASSERT_TRUE(store_->Remove(ids).ok());
  WaitForBlocks(0);
  for (int i = 0; i < 6000 && store_->stats().used_bytes > 2 * EpochBytes(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(store_->stats().used_bytes, 2 * EpochBytes());
  EXPECT_EQ(store_->stats().evicted_blocks, 0u);
}

// What is to be kept is, without ever being read; what is to be dropped goes, however much it is.
TEST_P(RocksDiskStoreCapTest, AdviceSaysWhatIsKept) {
  OpenCounting();
  constexpr std::uint64_t kKept = 10;
  store_->SetKeepAdvice([](const DiskBlockId& id) {
    for (std::uint64_t i = 0; i < kKept; ++i) {
      if (id == TestId(i)) return DiskStore::KeepAdvice::kKeep;
    }
    return DiskStore::KeepAdvice::kDrop;
  });
  std::vector<TestBlock> read;
  for (std::uint64_t i = kKept; i < 2 * kKept; ++i) {
    read.push_back(MakeBlock(i, kPages, kPageBytes));
  }
  for (std::uint64_t i = 0; i < 2 * kKept; ++i) {
    ASSERT_TRUE(Put(MakeBlock(i, kPages, kPageBytes)).ok());
  }
  Churn(2 * kKept, 3 * options_.capacity_bytes / kBlockBytes, [&] {
    for (const TestBlock& block : read) Get(block);
  });
  EXPECT_LE(peak_bytes_, options_.capacity_bytes + EpochBytes());
  for (std::uint64_t i = 0; i < kKept; ++i) {
    EXPECT_EQ(Get(MakeBlock(i, kPages, kPageBytes)), "right") << i;
  }
  for (const TestBlock& block : read) EXPECT_EQ(Get(block), "absent");
}

TEST_P(RocksDiskStoreCapTest, CarriedOverBlocksAreDurable) {
  OpenCounting();
  const TestBlock hot = MakeBlock(0, kPages, kPageBytes);
  Churn(0, 3 * options_.capacity_bytes / kBlockBytes, [&] { Get(hot); });
  EXPECT_GT(store_->stats().reinserted_blocks, 0u);
  Reopen();
  EXPECT_EQ(Get(hot), "right");
}

INSTANTIATE_TEST_SUITE_P(Files, RocksDiskStoreCapTest, ::testing::Bool(), EncryptionName);

}  // namespace
}  // namespace kvmill
