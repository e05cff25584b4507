// The tiered store over a disk that can be told to fail.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/long_form.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

class TieredStoreDiskTest : public TieredStoreTest {
 protected:
  absl::Status Durable(std::uint64_t number) {
    absl::Status result;
    absl::Status status = store_->MakeDurable({Id(number)}, absl::MakeSpan(&result, 1));
    return status.ok() ? result : status;
  }
  void Restart() {
    store_.reset();
    Open(true);
  }
};

TEST_F(TieredStoreDiskTest, DurableNeedsADisk) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(Durable(1).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(TieredStoreDiskTest, DurableBlockSurvivesACrash) {
  Open(true);
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_TRUE(Put(i).ok());
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(Durable(i).ok());
  disk_.Crash();
  store_.reset();  // The destructor's flush covers nothing that Crash forgot.
  Open(true);
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(GetIs(i));
  for (std::uint64_t i = 10; i < 20; ++i) {
    auto ref = store_->Fetch(Id(i));
    if (ref.ok()) {
      EXPECT_TRUE(Holds(*ref, i));
    }
  }
}

TEST_F(TieredStoreDiskTest, AFlushCoversWhatWasWrittenBefore) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  while (store_->stats().unwritten_blocks > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  disk_.fail_flush = 1;
  EXPECT_EQ(store_->Flush().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(*store_->Flush(), 0u);
  disk_.Crash();
  store_.reset();
  Open(true);
  EXPECT_TRUE(GetIs(1));
}

// Others remove it and store it again, or the disk's cap drops it, while the flush is waited for.
TEST_F(TieredStoreDiskTest, ABlockThatLeftTheDiskMeanwhileIsWrittenAgain) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Durable(1).ok());
  disk_.InNextFlush([&] {
    disk_.write_ms = 50;  // Not there yet when the flush is over.
    EXPECT_TRUE(store_->Remove(space_, {Key(1)}).ok());
    EXPECT_TRUE(Put(1).ok());
  });
  EXPECT_TRUE(Durable(1).ok());
  disk_.write_ms = 0;
  const Fingerprint fingerprint = store_->Namespaces()[0].fingerprint;
  disk_.InNextFlush([&] { disk_.Evict({DiskBlockId{fingerprint, 0, Key(1)}}); });
  EXPECT_TRUE(Durable(1).ok());
  disk_.Crash();
  store_.reset();
  Open(true);
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreDiskTest, NamespacesAndBlocksAreKnownAfterARestart) {
  Open(true);
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(Put(i).ok());
  store_.reset();
  auto store = TieredStore::Create(options_, clock_, std::make_unique<DiskHandle>(disk_));
  ASSERT_TRUE(store.ok());
  store_ = *std::move(store);
  auto info = store_->FindNamespace("default", "test");
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->spec, Spec());
  space_ = info->id;
  EXPECT_EQ(store_->Lookup(space_, {Key(0), Key(1)}).tiers,
            (std::vector<Tier>{Tier::kDisk, Tier::kDisk}));
  auto ref = store_->Fetch(Id(3));
  ASSERT_TRUE(ref.ok());
  EXPECT_EQ(ref->tier(), Tier::kDisk);
  EXPECT_TRUE(Holds(*ref, 3));
  EXPECT_EQ(store_->Fetch(Id(3))->tier(), Tier::kHost);
}

TEST_F(TieredStoreDiskTest, MoreBlocksThanMemoryAreAllThere) {
  Open(true);
  ASSERT_TRUE(Put(0).ok());
  const std::uint64_t fit = store_->stats().tiers[1].capacity_bytes / HostUsedBytes();
  for (std::uint64_t i = 1; i < 2 * fit; ++i) ASSERT_TRUE(Put(i).ok()) << i;
  for (std::uint64_t i = 0; i < 2 * fit; ++i) EXPECT_TRUE(GetIs(i));
  EXPECT_EQ(store_->stats().blocks, 2 * fit);
}

TEST_F(TieredStoreDiskTest, EvictWritesFirstAndLosesNothing) {
  Open(true);
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_TRUE(Put(i).ok());
  EXPECT_EQ(*store_->Evict(Tier::kHost, std::uint64_t{1} << 40), 20u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(GetIs(i));
  EXPECT_EQ(store_->Evict(Tier::kDisk, 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TieredStoreDiskTest, DamagedCopyIsAMissAndIsDropped) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Durable(1).ok());
  store_->Evict(Tier::kHost, std::uint64_t{1} << 40).IgnoreError();
  disk_.flip_read = true;
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound);
  disk_.flip_read = false;
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound)
      << "a damaged copy must not come back";
  EXPECT_EQ(store_->stats().checksum_failures[2], 1u);
  EXPECT_EQ(store_->stats().blocks, 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreDiskTest, ShortReadIsAMissToo) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  store_->Evict(Tier::kHost, std::uint64_t{1} << 40).IgnoreError();
  disk_.short_read = true;
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->stats().checksum_failures[2], 1u);
}

TEST_F(TieredStoreDiskTest, FailedReadIsAnErrorAndTheBlockStays) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  store_->Evict(Tier::kHost, std::uint64_t{1} << 40).IgnoreError();
  disk_.fail_read = 1;
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(HostUsedBytes(), 0u);
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreDiskTest, FullDiskIsSaidAndTheCacheGoesOn) {
  Open(true);
  disk_.full = true;
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(Durable(1).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(GetIs(1));
  disk_.full = false;
  EXPECT_TRUE(Durable(1).ok()) << "the next attempt writes it";
  disk_.Crash();
  Restart();
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreDiskTest, NothingIsDurableWithoutItsNamespace) {
  disk_.full = true;
  auto store = TieredStore::Create(options_, clock_, std::make_unique<DiskHandle>(disk_));
  ASSERT_TRUE(store.ok()) << store.status();
  store_ = *std::move(store);
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_EQ(store_->OpenNamespace("test", Spec()).status().code(),
              absl::StatusCode::kResourceExhausted)
        << "attempt " << attempt;
  }
  // Whoever knows the name can use it meanwhile.
  space_ = store_->FindNamespace("default", "test")->id;
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(Durable(1).code(), absl::StatusCode::kResourceExhausted);
  while (store_->stats().unwritten_blocks > 0) std::this_thread::yield();  // Its write failed too.
  const std::uint64_t failures = store_->stats().disk_write_failures;
  EXPECT_GE(failures, 1u);
  disk_.full = false;
  const absl::Status durable = Durable(1);
  ASSERT_TRUE(durable.ok()) << durable;
  EXPECT_EQ(store_->stats().disk_write_failures, failures);
  disk_.Crash();
  store_.reset();
  auto again = TieredStore::Create(options_, clock_, std::make_unique<DiskHandle>(disk_));
  ASSERT_TRUE(again.ok()) << again.status();
  store_ = *std::move(again);
  const auto info = store_->FindNamespace("default", "test");
  ASSERT_TRUE(info.ok()) << info.status();
  space_ = info->id;
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreDiskTest, ARemovalDoesNotTakeWhatWasStoredAnew) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Durable(1).ok());
  disk_.remove_ms = 200;
  std::thread remover([&] { EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u); });
  while (store_->Lookup(space_, {Key(1)}).hit_blocks > 0) std::this_thread::yield();
  ASSERT_TRUE(Put(Id(1), {.token_count = kTokens}, ValuesOf(2)).ok());
  EXPECT_TRUE(Durable(1).ok());
  remover.join();
  disk_.Crash();
  EXPECT_EQ(*store_->Evict(Tier::kHost, std::uint64_t{1} << 40), 1u);
  auto ref = store_->Fetch(Id(1));
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_TRUE(Holds(*ref, 2));
}

TEST_F(TieredStoreDiskTest, EvictReturnsWhileOthersStore) {
  Open(true);
  disk_.write_ms = 2;
  ASSERT_TRUE(Put(0).ok());
  constexpr std::uint64_t kPutsMax = 5000;
  std::atomic<bool> evicted{false};
  std::uint64_t puts = 1;
  std::thread putter([&] {
    while (!evicted && puts < kPutsMax) {
      // Three at a time: what is queued never runs out.
      for (int i = 0; i < 3; ++i) ASSERT_TRUE(Put(puts++).ok());
    }
  });
  EXPECT_TRUE(store_->Evict(Tier::kHost, std::uint64_t{1} << 40).ok());
  evicted = true;
  putter.join();
  EXPECT_LT(puts, kPutsMax);
}

TEST_F(TieredStoreDiskTest, FailedFlushIsNotDurable) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  disk_.fail_flush = 1;
  EXPECT_FALSE(Durable(1).ok());
  EXPECT_EQ(store_->stats().disk_write_failures, 1u) << "the block was written, the flush failed";
  EXPECT_TRUE(Durable(1).ok());
  EXPECT_EQ(store_->stats().disk_write_failures, 1u);
}

TEST_F(TieredStoreDiskTest, UnwrittenBlocksDoNotLeaveMemory) {
  Open(true);
  disk_.write_ms = 3;
  ASSERT_TRUE(Put(0).ok());
  options_.room_wait = absl::Seconds(5);
  const std::uint64_t fit = store_->stats().tiers[1].capacity_bytes / HostUsedBytes();
  // Faster than the disk: the store must wait for it instead of dropping what is not written.
  for (std::uint64_t i = 1; i < fit + 50; ++i) ASSERT_TRUE(Put(i).ok()) << i;
  for (std::uint64_t i = 0; i < fit + 50; ++i) EXPECT_TRUE(GetIs(i));
}

TEST_F(TieredStoreDiskTest, RemoveIsDurable) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  ASSERT_TRUE(Durable(1).ok());
  EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
  disk_.Crash();
  Restart();
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TieredStoreDiskTest, BlocksThatTheCapDroppedAreMisses) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  ASSERT_TRUE(store_->Flush().ok());
  store_->Evict(Tier::kHost, std::uint64_t{1} << 40).IgnoreError();
  ASSERT_TRUE(GetIs(2));
  const Fingerprint fingerprint = FingerprintOf(Spec());
  disk_.Evict({DiskBlockId{fingerprint, 0, Key(1)}, DiskBlockId{fingerprint, 0, Key(2)}});
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  EXPECT_TRUE(GetIs(2)) << "it is still in memory";
  EXPECT_EQ(store_->stats().evicted_blocks[2][0], 2u);
  EXPECT_EQ(*store_->Evict(Tier::kHost, std::uint64_t{1} << 40), 1u);
  EXPECT_EQ(store_->stats().blocks, 0u);
}

TEST_F(TieredStoreDiskTest, VerifyCountsAndDropsDamage) {
  Open(true);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(Put(i).ok());
  ASSERT_TRUE(store_->Flush().ok());
  auto clean = store_->Verify();
  ASSERT_TRUE(clean.ok());
  EXPECT_EQ(clean->records_checked, 2u * 4 * kLayers * kHeads);
  EXPECT_EQ(clean->failures, 0u);
  {
    // A bit flips in memory under a block that nobody holds.
    auto ref = store_->Fetch(Id(2));
    const absl::Span<const std::byte> page = ref->pages()[1];
    const_cast<std::byte&>(page[page.size() / 2]) ^= std::byte{1};
  }
  auto damaged = store_->Verify();
  ASSERT_TRUE(damaged.ok());
  EXPECT_EQ(damaged->failures, 1u);
  auto ref = store_->Fetch(Id(2));
  ASSERT_TRUE(ref.ok());
  EXPECT_EQ(ref->tier(), Tier::kDisk) << "the copy on disk is the next one";
  EXPECT_TRUE(Holds(*ref, 2));
}

TEST_F(TieredStoreDiskTest, ConcurrentLoadsShareOneRead) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  store_->Evict(Tier::kHost, std::uint64_t{1} << 40).IgnoreError();
  disk_.reads = 0;
  disk_.read_ms = 50;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      if (GetIs(1)) ++right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4);
  EXPECT_EQ(disk_.reads, 1u);
}

// Threads store, fetch, remove and evict at random over a store that holds a fraction of the keys;
// every byte that comes back is checked, and at the end nothing is referenced and all memory can be
// given back.
TEST_F(TieredStoreDiskTest, RandomUseFromManyThreadsNeverShowsWrongBytes) {
  options_.room_wait = absl::Seconds(10);
  Open(true);
  constexpr std::uint64_t kKeys = 300;
  std::atomic<bool> wrong{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < ShortOrLong(250, 10'000) && !wrong; ++i) {
        const std::uint64_t number = random() % kKeys;
        switch (random() % 8) {
          case 0:
          case 1:
          case 2: {
            const absl::Status put = Put(number);
            if (!put.ok() && !absl::IsAlreadyExists(put) && !absl::IsAborted(put)) {
              ADD_FAILURE() << put;
              wrong = true;
            }
            break;
          }
          case 3:
            store_->Remove(space_, {Key(number)}).status().IgnoreError();
            break;
          case 4:
            store_->Evict(Tier::kHost, 50'000).status().IgnoreError();
            break;
          case 5:
            Durable(number).IgnoreError();
            break;
          default: {
            auto ref = store_->Fetch(Id(number));
            if (ref.ok() && !Holds(*ref, number)) {
              ADD_FAILURE() << "wrong bytes in block " << number;
              wrong = true;
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(store_->Clear(space_).ok());
  // The background writer holds the block that it is writing, removed or not.
  while (store_->stats().unwritten_blocks > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(store_->stats().references, 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  EXPECT_EQ(store_->stats().blocks, 0u);
  EXPECT_EQ(store_->stats().pages, 0u);
}

}  // namespace
}  // namespace kvmill
