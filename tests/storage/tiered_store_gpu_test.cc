// The tiers gpu, host and disk, with a device whose memory the CPU cannot touch.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "tests/storage/tiered_store_gpu_fixture.h"

namespace kvmill {
namespace {

// Its kernels have none, so engines could not attend to what is up there.
TEST_F(TieredStoreGpuTest, ThreeBitKeysAreRefused) {
  OpenWithGpu(false);
  NamespaceSpec spec = Spec();
  spec.key_bits = 3;
  const absl::Status status = store_->OpenNamespace("three", spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("key_bits 3"), absl::string_view::npos) << status;
  EXPECT_FALSE(store_->FindNamespace(spec.tenant, "three").ok());
  options_.gpu = nullptr;
  options_.gpu_bytes = 0;
  Open(false, spec);
  EXPECT_TRUE(Put(1).ok());
}

TEST_F(TieredStoreGpuTest, SealedBlockMovesToTheGpuAndReadersGetACopy) {
  for (const bool with_disk : {false, true}) {
    OpenWithGpu(with_disk);
    ASSERT_TRUE(PutAndSettle(1).ok());
    EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
    EXPECT_EQ(HostUsedBytes(), 0u);
    const std::uint64_t block_bytes = TierNow(Tier::kGpu).used_bytes;
    EXPECT_GT(block_bytes, 0u);
    EXPECT_EQ(TierNow(Tier::kGpu).blocks, 1u);
    EXPECT_EQ(TierNow(Tier::kHost).blocks, 0u);
    EXPECT_EQ(TierNow(Tier::kDisk).blocks, with_disk ? 1u : 0u);
    {
      auto ref = store_->Fetch(Id(1));
      ASSERT_TRUE(ref.ok()) << ref.status();
      EXPECT_EQ(ref->tier(), Tier::kGpu);
      EXPECT_EQ(ref->memory(), Tier::kHost);
      EXPECT_EQ(ref->token_count(), kTokens);
      EXPECT_TRUE(Holds(*ref, 1));
      EXPECT_EQ(HostUsedBytes(), block_bytes);
      EXPECT_EQ(store_->stats().references, 1u);
      EXPECT_GT(store_->stats().referenced_bytes, 0u);
    }
    EXPECT_EQ(HostUsedBytes(), 0u) << "a copy goes with its reader";
    EXPECT_EQ(store_->stats().references, 0u);
    EXPECT_EQ(store_->stats().referenced_bytes, 0u);
    EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
    const StoreStats stats = store_->stats();
    EXPECT_EQ(stats.fetched_blocks[0][static_cast<std::size_t>(Tier::kGpu)], 1u);
    EXPECT_EQ(stats.moved_blocks[static_cast<std::size_t>(Tier::kGpu)], 1u);
    EXPECT_EQ(stats.pages, kLayers);
    EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
    EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
    EXPECT_EQ(TierNow(Tier::kGpu).blocks, 0u);
    EXPECT_EQ(EvictedFrom(Tier::kGpu, EvictReason::kRemoved), 1u);
    EXPECT_EQ(store_->stats().pages, 0u);
  }
}

TEST_F(TieredStoreGpuTest, WithoutAGpuTheTierIsRefused) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(store_->FetchOnGpu(Id(1)).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Evict(Tier::kGpu, kAll).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(TierNow(Tier::kGpu).capacity_bytes, 0u);
  EXPECT_EQ(TierOfBlock(1), Tier::kHost);
}

TEST_F(TieredStoreGpuTest, FetchOnGpuHoldsTheBlockThereFromEveryTier) {
  OpenWithGpu(true);
  ASSERT_TRUE(PutAndSettle(1).ok());
  {
    auto ref = store_->FetchOnGpu(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kGpu);
    EXPECT_TRUE(HoldsOnGpu(*ref, 1));
    EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 0u) << "a held block stays";
  }
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 1u);
  EXPECT_EQ(TierOfBlock(1), Tier::kHost);
  {
    auto ref = store_->FetchOnGpu(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kHost);
    EXPECT_TRUE(HoldsOnGpu(*ref, 1));
    EXPECT_EQ(TierOfBlock(1), Tier::kGpu) << "it was promoted";
    EXPECT_EQ(HostUsedBytes(), 0u);
  }
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 1u);
  EXPECT_EQ(*store_->Evict(Tier::kHost, kAll), 1u);
  EXPECT_EQ(TierOfBlock(1), Tier::kDisk);
  {
    auto ref = store_->FetchOnGpu(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kDisk);
    EXPECT_TRUE(HoldsOnGpu(*ref, 1));
    EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
    // Hidden now, freed with its last holder.
    EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
    EXPECT_EQ(TierOfBlock(1), Tier::kPeer);
    EXPECT_TRUE(HoldsOnGpu(*ref, 1));
    EXPECT_GT(TierNow(Tier::kGpu).used_bytes, 0u);
  }
  EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  EXPECT_EQ(store_->FetchOnGpu(Id(1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->stats().references, 0u);
}

TEST_F(TieredStoreGpuTest, ReadersInOtherProcessesFindPagesOnTheGpu) {
  OpenWithGpu(false);
  ASSERT_TRUE(PutAndSettle(1).ok());
  EXPECT_FALSE(store_->FetchFromMemory(Id(1), FetchPath::kMap).valid()) << "that means the host's";
  auto on_gpu = store_->FetchOnGpu(Id(1));
  ASSERT_TRUE(on_gpu.ok()) << on_gpu.status();
  auto in_host = store_->Fetch(Id(1), FetchPath::kMap);  // A copy has a place, too.
  ASSERT_TRUE(in_host.ok()) << in_host.status();
  for (const BlockRef* ref : {&*on_gpu, &*in_host}) {
    std::vector<TieredStore::PageRun> runs;
    store_->Locate(*ref, &runs);
    std::vector<std::uint64_t> generations;
    store_->LoadGenerations(*ref, &generations);
    ASSERT_EQ(generations.size(), kLayers);
    std::size_t i = 0;
    for (const TieredStore::PageRun& run : runs) {
      EXPECT_EQ(run.tier, ref->memory());
      const TieredStore::Arena arena = store_->ArenaOf(run);
      const TieredStore::Arena words = store_->GenerationsOf(run);
      EXPECT_EQ(arena.fd == words.fd, ref->memory() == Tier::kHost);
      for (std::uint32_t p = 0; p < run.page_count; ++p, ++i) {
        ASSERT_LT(i, kLayers);
        ASSERT_EQ(run.page_bytes, ref->pages()[i].size());
        const std::uint64_t offset = run.offset_bytes + std::uint64_t{p} * run.stride_bytes;
        const std::uint64_t word = run.generation_offset_bytes + p * kGenerationBytes;
        ASSERT_LE(offset + run.page_bytes, arena.bytes);
        ASSERT_LE(word + kGenerationBytes, words.bytes);
        std::vector<std::byte> page(run.page_bytes);
        ASSERT_EQ(pread(arena.fd, page.data(), page.size(), static_cast<off_t>(offset)),
                  static_cast<ssize_t>(page.size()));
        EXPECT_EQ(std::memcmp(page.data(), in_host->pages()[i].data(), page.size()), 0);
        std::uint64_t generation = 0;
        ASSERT_EQ(pread(words.fd, &generation, sizeof(generation), static_cast<off_t>(word)),
                  static_cast<ssize_t>(sizeof(generation)));
        EXPECT_EQ(generation, generations[i]);
        EXPECT_EQ(generation % 2, 0u);
      }
    }
    EXPECT_EQ(i, kLayers);
  }
  EXPECT_TRUE(Holds(*in_host, 1));
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.fetched_blocks[static_cast<std::size_t>(FetchPath::kMap)]
                                [static_cast<std::size_t>(Tier::kGpu)],
            2u);
}

TEST_F(TieredStoreGpuTest, CapacitiesAddUpAndTheOldestGoDown) {
  OpenWithGpu(false);
  const std::uint64_t fit = Fit(Tier::kGpu);
  // One block stays free in host memory for the one that moves.
  for (std::uint64_t i = 0; i < 2 * fit - 1; ++i) ASSERT_TRUE(PutAndSettle(i).ok()) << i;
  EXPECT_EQ(store_->stats().blocks, 2 * fit - 1);
  EXPECT_EQ(TierNow(Tier::kGpu).blocks, fit);
  EXPECT_EQ(TierNow(Tier::kHost).blocks, fit - 1);
  EXPECT_EQ(EvictedFrom(Tier::kGpu, EvictReason::kCapacity), fit - 1);
  EXPECT_EQ(EvictedFrom(Tier::kHost, EvictReason::kCapacity), 0u);
  EXPECT_EQ(TierOfBlock(0), Tier::kHost);
  EXPECT_EQ(TierOfBlock(2 * fit - 2), Tier::kGpu);
  for (std::uint64_t i = 0; i < 2 * fit - 1; i += 7) EXPECT_TRUE(GetIs(i)) << i;
  // More: what leaves is gone from host memory, never from the GPU.
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_TRUE(PutAndSettle(2 * fit + i).ok());
  EXPECT_EQ(TierNow(Tier::kGpu).blocks, fit);
  EXPECT_GE(store_->stats().blocks, 2 * fit - 2);
  EXPECT_EQ(EvictedFrom(Tier::kHost, EvictReason::kCapacity),
            2 * fit - 1 + 20 - store_->stats().blocks);
  EXPECT_EQ(TierOfBlock(2 * fit + 19), Tier::kGpu);
}

TEST_F(TieredStoreGpuTest, WithADiskNothingIsLost) {
  OpenWithGpu(true);
  const std::uint64_t fit = Fit(Tier::kGpu);
  for (std::uint64_t i = 0; i < 3 * fit; ++i) ASSERT_TRUE(PutAndSettle(i).ok()) << i;
  EXPECT_EQ(store_->stats().blocks, 3 * fit);
  for (std::uint64_t i = 0; i < 3 * fit; i += 5) EXPECT_TRUE(GetIs(i)) << i;
  for (std::uint64_t i = 0; i < 3 * fit; i += 5) EXPECT_TRUE(GetOnGpuIs(i)) << i;
  EXPECT_EQ(store_->stats().blocks, 3 * fit);
}

TEST_F(TieredStoreGpuTest, EvictMovesToHostMemoryAndCountsAge) {
  OpenWithGpu(true);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  clock_.AdvanceNanos(100'000'000'000);
  EXPECT_EQ(*store_->Evict(Tier::kGpu, 1), 1u);
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 9u);
  EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
  EXPECT_EQ(TierNow(Tier::kHost).blocks, 10u);
  EXPECT_EQ(EvictedFrom(Tier::kGpu, EvictReason::kAdmin), 10u);
  const auto ages = store_->stats().eviction_age_seconds[static_cast<std::size_t>(Tier::kGpu)];
  EXPECT_EQ(std::accumulate(ages.counts.begin(), ages.counts.end(), std::uint64_t{0}), 10u);
  EXPECT_NEAR(ages.sum, 1000, 50);
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(GetIs(i));
  EXPECT_EQ(store_->Evict(Tier::kDisk, 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TieredStoreGpuTest, DamageOnTheGpuIsAMissOrTheNextCopy) {
  for (const bool with_disk : {false, true}) {
    OpenWithGpu(with_disk);
    ASSERT_TRUE(PutAndSettle(1).ok());
    Damage(1);
    auto ref = store_->Fetch(Id(1));
    if (with_disk) {
      ASSERT_TRUE(ref.ok()) << ref.status();
      EXPECT_EQ(ref->tier(), Tier::kDisk);
      EXPECT_TRUE(Holds(*ref, 1));
    } else {
      EXPECT_EQ(ref.status().code(), absl::StatusCode::kNotFound);
      EXPECT_EQ(store_->stats().blocks, 0u);
    }
    EXPECT_EQ(ChecksumFailures(Tier::kGpu), 1u);
    EXPECT_EQ(EvictedFrom(Tier::kGpu, EvictReason::kCorrupt), 1u);
    EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
    EXPECT_EQ(TierNow(Tier::kGpu).blocks, 0u);
    ref = BlockRef();
    EXPECT_EQ(HostUsedBytes() == 0, !with_disk);
  }
}

TEST_F(TieredStoreGpuTest, DamageIsFoundWhenABlockIsDemoted) {
  OpenWithGpu(true);
  ASSERT_TRUE(PutAndSettle(1).ok());
  ASSERT_TRUE(PutAndSettle(2).ok());
  Damage(1);
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 2u);
  EXPECT_EQ(ChecksumFailures(Tier::kGpu), 1u);
  EXPECT_EQ(TierOfBlock(1), Tier::kDisk);
  EXPECT_EQ(TierOfBlock(2), Tier::kHost);
  EXPECT_TRUE(GetIs(1));
  EXPECT_TRUE(GetIs(2));
}

TEST_F(TieredStoreGpuTest, VerifyLooksAtTheGpuToo) {
  OpenWithGpu(false);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  EXPECT_EQ(*store_->Evict(Tier::kGpu, 1), 1u);
  // Scratch memory of Verify is not pinned, which a copy allows.
  auto clean = store_->Verify();
  gpu_.unpinned_copies = 0;
  ASSERT_TRUE(clean.ok()) << clean.status();
  EXPECT_EQ(clean->records_checked, std::uint64_t{4} * kLayers * kHeads);
  EXPECT_EQ(clean->failures, 0u);
  Damage(3);
  auto damaged = store_->Verify();
  gpu_.unpinned_copies = 0;
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  EXPECT_EQ(damaged->failures, 1u);
  EXPECT_EQ(ChecksumFailures(Tier::kGpu), 1u);
  EXPECT_EQ(store_->Fetch(Id(3)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->stats().blocks, 3u);
}

TEST_F(TieredStoreGpuTest, CopyThatFailsOrCorruptsLeavesTheBlockInHostMemory) {
  OpenWithGpu(false);
  gpu_.fail_to_device = 1;
  ASSERT_TRUE(PutAndSettle(1).ok());
  EXPECT_EQ(TierOfBlock(1), Tier::kHost);
  gpu_.flip_to_device = 1;
  ASSERT_TRUE(PutAndSettle(2).ok());
  EXPECT_EQ(TierOfBlock(2), Tier::kHost);
  EXPECT_EQ(ChecksumFailures(Tier::kGpu), 1u);
  EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
  EXPECT_EQ(store_->stats().skipped_promotions, 2u);
  EXPECT_TRUE(GetIs(1));
  EXPECT_TRUE(GetIs(2));
  gpu_.flip_to_device = 1;
  EXPECT_EQ(store_->FetchOnGpu(Id(1)).status().code(), absl::StatusCode::kDataLoss);
  gpu_.fail_to_device = 1;
  EXPECT_EQ(store_->FetchOnGpu(Id(1)).status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(GetOnGpuIs(1)) << "a stream with an error was replaced";
  EXPECT_TRUE(GetOnGpuIs(2));
}

TEST_F(TieredStoreGpuTest, CopyBackThatFailsOrCorruptsIsAMissOrTheNextCopy) {
  for (std::atomic<int>* fault : {&gpu_.fail_to_host, &gpu_.flip_to_host}) {
    OpenWithGpu(true);
    ASSERT_TRUE(PutAndSettle(1).ok());
    ASSERT_EQ(TierOfBlock(1), Tier::kGpu);
    *fault = 1;
    auto ref = store_->Fetch(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kDisk);
    EXPECT_TRUE(Holds(*ref, 1));
    EXPECT_EQ(ChecksumFailures(Tier::kGpu), 1u);
    *ref = BlockRef();

    ASSERT_TRUE(GetOnGpuIs(1));
    *fault = 1;
    EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 1u);
    EXPECT_EQ(TierOfBlock(1), Tier::kDisk);
    EXPECT_TRUE(GetIs(1));
    EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);

    OpenWithGpu(false);
    ASSERT_TRUE(PutAndSettle(2).ok());
    *fault = 1;
    EXPECT_EQ(store_->Fetch(Id(2)).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(store_->stats().blocks, 0u);
    EXPECT_EQ(HostUsedBytes(), 0u);
    EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
  }
}

TEST_F(TieredStoreGpuTest, DeviceThatLosesItsStreamsIsLeftAloneUntilItHasSome) {
  OpenWithGpu(false);
  ASSERT_TRUE(PutAndSettle(1).ok());
  gpu_.no_streams = true;
  gpu_.fail_to_device = 1;
  for (std::uint64_t i = 2; i < 5; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  for (std::uint64_t i = 2; i < 5; ++i) EXPECT_TRUE(GetIs(i));
  gpu_.no_streams = false;
  gpu_.fail_to_device = 0;
  for (std::uint64_t i = 2; i < 5; ++i) EXPECT_TRUE(GetOnGpuIs(i));
}

TEST_F(TieredStoreGpuTest, TwoTiersFullOfHeldBlocksDoNotWaitForEachOther) {
  options_.room_wait = absl::ZeroDuration();
  OpenWithGpu(false);
  const std::uint64_t fit = Fit(Tier::kGpu);
  std::vector<BlockRef> held;
  std::uint64_t number = 0;
  for (; number < fit; ++number) {
    ASSERT_TRUE(PutAndSettle(number).ok()) << number;
    auto ref = store_->FetchOnGpu(Id(number));
    ASSERT_TRUE(ref.ok()) << ref.status();
    held.push_back(*std::move(ref));
  }
  // Now host memory, with blocks and copies that are held, too.
  absl::Status put;
  for (;; ++number) {
    put = PutAndSettle(number);
    if (!put.ok()) break;
    auto ref = store_->Fetch(Id(number));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kHost);
    held.push_back(*std::move(ref));
    ASSERT_LE(held.size(), 2 * fit + 1);
  }
  EXPECT_EQ(put.code(), absl::StatusCode::kResourceExhausted) << put;
  EXPECT_EQ(held.size(), 2 * fit);
  const auto on_gpu = store_->FetchOnGpu(Id(fit));
  EXPECT_EQ(on_gpu.status().code(), absl::StatusCode::kResourceExhausted) << on_gpu.status();
  EXPECT_NE(on_gpu.status().message().find("--gpu-bytes"), absl::string_view::npos);
  const auto in_host = store_->Fetch(Id(0));
  EXPECT_EQ(in_host.status().code(), absl::StatusCode::kResourceExhausted) << in_host.status();
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 0u);
  EXPECT_EQ(*store_->Evict(Tier::kHost, kAll), 0u);

  // The GPU is full of blocks that may leave, host memory of held ones: a reader on the GPU gets
  // its block at the cost of another, the background does not.
  held.erase(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(fit));
  ASSERT_TRUE(GetOnGpuIs(fit));
  EXPECT_EQ(EvictedFrom(Tier::kGpu, EvictReason::kCapacity), 1u);
  EXPECT_EQ(store_->stats().blocks, 2 * fit - 1);
  held.clear();
  EXPECT_TRUE(PutAndSettle(5000).ok());
  EXPECT_TRUE(GetOnGpuIs(5000));
  EXPECT_TRUE(GetIs(5000));
}

TEST_F(TieredStoreGpuTest, ReadersOnAFullGpuWaitForRoomAndNotForEver) {
  options_.room_wait = absl::Seconds(20);
  OpenWithGpu(true);
  const std::uint64_t fit = Fit(Tier::kGpu);
  std::vector<BlockRef> held;
  for (std::uint64_t i = 0; i < fit; ++i) {
    ASSERT_TRUE(PutAndSettle(i).ok());
    auto ref = store_->FetchOnGpu(Id(i));
    ASSERT_TRUE(ref.ok()) << ref.status();
    held.push_back(*std::move(ref));
  }
  ASSERT_TRUE(PutAndSettle(fit).ok());
  EXPECT_EQ(TierOfBlock(fit), Tier::kHost);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    EXPECT_TRUE(GetOnGpuIs(fit));
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(done);
  held.pop_back();  // Room comes free.
  reader.join();
  EXPECT_TRUE(done);
}

TEST_F(TieredStoreGpuTest, BlockInUseStaysWhereItIsAndAReaderOnTheGpuGetsACopy) {
  OpenWithGpu(true);
  disk_.hold_writes = true;
  ASSERT_TRUE(Put(1).ok());
  auto reader = store_->Fetch(Id(1));  // Before it is written.
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(reader->tier(), Tier::kHost);
  {
    auto ref = store_->FetchOnGpu(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_EQ(ref->tier(), Tier::kHost);
    EXPECT_TRUE(HoldsOnGpu(*ref, 1));
    EXPECT_EQ(TierOfBlock(1), Tier::kHost) << "the writer needs it";
  }
  EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u) << "the copy goes with its reader";
  disk_.hold_writes = false;
  Settle();
  EXPECT_EQ(TierOfBlock(1), Tier::kHost);
  EXPECT_EQ(store_->stats().skipped_promotions, 1u);
  EXPECT_TRUE(Holds(*reader, 1));
  *reader = BlockRef();
  EXPECT_TRUE(GetOnGpuIs(1));
  EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
}

TEST_F(TieredStoreGpuTest, RemovalWhileABlockMovesLeavesNothingBehind) {
  OpenWithGpu(false);
  gpu_.copy_ms = 30;
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Put(1).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(10 + 15 * round));
    EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
    // Another block under the same key, while the old one may still be on its way.
    ASSERT_TRUE(Put(Id(1), {.token_count = kTokens}, ValuesOf(7)).ok());
    Settle();
    auto ref = store_->Fetch(Id(1));
    ASSERT_TRUE(ref.ok()) << ref.status();
    EXPECT_TRUE(Holds(*ref, 7));
    *ref = BlockRef();
    // The same on its way back.
    std::thread evict([&] { EXPECT_LE(*store_->Evict(Tier::kGpu, kAll), 1u); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
    evict.join();
    EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
    EXPECT_EQ(HostUsedBytes(), 0u);
    EXPECT_EQ(store_->stats().pages, 0u);
  }
}

TEST_F(TieredStoreGpuTest, ReaderThatComesWhileABlockLeavesKeepsItThere) {
  OpenWithGpu(false);
  ASSERT_TRUE(PutAndSettle(1).ok());
  gpu_.hold_copies = true;
  std::thread evict([&] { EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 0u); });
  while (gpu_.held_copies == 0) std::this_thread::yield();
  auto ref = store_->FetchOnGpu(Id(1));
  gpu_.hold_copies = false;
  evict.join();
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(ref->tier(), Tier::kGpu);
  EXPECT_TRUE(HoldsOnGpu(*ref, 1));
  EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
  EXPECT_EQ(HostUsedBytes(), 0u);
  *ref = BlockRef();
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 1u) << "it is in the order again";
}

TEST_F(TieredStoreGpuTest, DurableBlocksSurviveACrashAndOthersAreMisses) {
  OpenWithGpu(true);
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(Put(i).ok());
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_TRUE(Durable(i).ok());
  disk_.full = true;
  for (std::uint64_t i = 10; i < 20; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  EXPECT_EQ(TierOfBlock(15), Tier::kGpu) << "what cannot be written moves on all the same";
  EXPECT_TRUE(GetIs(15));
  disk_.Crash();
  Restart();
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(GetIs(i));
  for (std::uint64_t i = 10; i < 20; ++i) {
    EXPECT_EQ(store_->Fetch(Id(i)).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(TieredStoreGpuTest, WhatIsOnlyOnTheGpuCanBeMadeDurable) {
  OpenWithGpu(true);
  disk_.full = true;
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  EXPECT_EQ(TierNow(Tier::kGpu).blocks, 5u);
  EXPECT_EQ(Durable(1).code(), absl::StatusCode::kResourceExhausted);
  disk_.full = false;
  EXPECT_TRUE(Durable(1).ok());
  EXPECT_EQ(*store_->Flush(), 4u);
  EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
  EXPECT_EQ(TierNow(Tier::kDisk).blocks, 5u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  disk_.Crash();
  Restart();
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_TRUE(GetIs(i));
}

TEST_F(TieredStoreGpuTest, BlocksThatTheDisksCapDroppedStayOnTheGpu) {
  OpenWithGpu(true);
  ASSERT_TRUE(PutAndSettle(1).ok());
  disk_.Evict({DiskBlockId{FingerprintOf(Spec()), 0, Key(1)}});
  EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
  EXPECT_TRUE(GetIs(1));
  EXPECT_EQ(*store_->Evict(Tier::kGpu, kAll), 1u);
  EXPECT_TRUE(GetIs(1));
  EXPECT_EQ(*store_->Evict(Tier::kHost, kAll), 1u);
  EXPECT_EQ(store_->stats().blocks, 0u);
}

TEST_F(TieredStoreGpuTest, TenantsShareNoArena) {
  OpenWithGpu(false);
  NamespaceSpec other = Spec();
  other.tenant = "other";
  const NamespaceId second = store_->OpenNamespace("other", other)->id;
  ASSERT_TRUE(PutAndSettle(1).ok());
  EXPECT_EQ(gpu_.allocations, 1);
  // One arena each: the tenants take turns, on both tiers, and never see the other's memory.
  ASSERT_TRUE(Put({second, 0, Key(2)}, {.token_count = kTokens}, ValuesOf(2)).ok());
  Settle();
  EXPECT_EQ(store_->Lookup(second, {Key(2)}).tiers, std::vector<Tier>{Tier::kHost})
      << "the only arena on the GPU is in use";
  EXPECT_EQ(*store_->Clear(space_), 1u);
  auto ref = store_->FetchOnGpu({second, 0, Key(2)});
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(gpu_.allocations, 2) << "fresh memory for another tenant";
  const std::byte* page = gpu_.Real(ref->pages()[0].data());
  ASSERT_NE(page, nullptr);
  EXPECT_EQ(page[ref->pages()[0].size()], std::byte{0}) << "nothing of the first tenant's";
}

// Two arenas on the GPU, one of each of two tenants.
TEST_F(TieredStoreGpuTest, SoftQuotasSayWhoLeavesTheGpu) {
  options_.host_bytes = 16 << 20;
  options_.gpu_bytes = 8 << 20;
  OpenWithGpu(false);
  NamespaceSpec spec = Spec();
  spec.tenant = "b";
  const NamespaceId other = store_->OpenNamespace("other", spec)->id;
  const auto put_other = [&](std::uint64_t number) {
    const absl::Status put =
        Put({other, 0, Key(number)}, {.token_count = kTokens}, ValuesOf(number));
    Settle();
    return put;
  };
  const auto on_gpu = [&](NamespaceId space, std::uint64_t count) {
    std::uint64_t found = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto tiers = store_->Lookup(space, {Key(i)}).tiers;
      found += !tiers.empty() && tiers[0] == Tier::kGpu ? 1 : 0;
    }
    return found;
  };
  ASSERT_TRUE(put_other(0).ok());
  const std::uint64_t arena = kExtentBytes / TierNow(Tier::kGpu).used_bytes;
  for (std::uint64_t i = 1; i < arena; ++i) ASSERT_TRUE(put_other(i).ok());
  for (std::uint64_t i = 0; i < arena; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  ASSERT_EQ(on_gpu(other, arena), arena);
  ASSERT_EQ(on_gpu(space_, arena), arena);
  ASSERT_TRUE(store_->SetQuotas({{"default", {.soft_bytes = 1}}}).ok());
  // Who is over takes of its own, though those of the other one are older.
  ASSERT_TRUE(PutAndSettle(arena).ok());
  EXPECT_EQ(on_gpu(other, arena), arena);
  EXPECT_EQ(on_gpu(space_, arena + 1), arena);
  // And leaves for who is not.
  ASSERT_TRUE(put_other(arena).ok());
  EXPECT_EQ(on_gpu(other, arena + 1), arena + 1);
  EXPECT_LT(on_gpu(space_, arena + 1), arena);
}

TEST_F(TieredStoreGpuTest, ListAndClearKnowTheTier) {
  OpenWithGpu(false);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  EXPECT_EQ(*store_->Evict(Tier::kGpu, 1), 1u);
  int on_gpu = 0;
  int in_host = 0;
  store_->List([&](const TieredStore::BlockInfo& info) {
    on_gpu += info.tier == Tier::kGpu ? 1 : 0;
    in_host += info.tier == Tier::kHost ? 1 : 0;
    EXPECT_GT(info.bytes, 0u);
    return true;
  });
  EXPECT_EQ(on_gpu, 2);
  EXPECT_EQ(in_host, 1);
  store_->Lookup(space_, {Key(0), Key(1), Key(2)});
  const auto found = store_->Lookup(space_, {Key(0), Key(1), Key(2)});
  EXPECT_EQ(found.hit_blocks, 3u);
  EXPECT_EQ(store_->stats().hit_blocks[static_cast<std::size_t>(Tier::kGpu)], 4u);
  EXPECT_EQ(*store_->Clear(space_), 3u);
  EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);
}

TEST_F(TieredStoreGpuTest, GpuWithoutSoMuchMemoryIsSaidAtStart) {
  gpu_.no_memory = true;
  options_.gpu = &gpu_;
  const auto store = TieredStore::Create(options_, clock_, nullptr);
  EXPECT_EQ(store.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(store.status().message().find("4194304 bytes on device hidden"),
            absl::string_view::npos)
      << store.status();
}

}  // namespace
}  // namespace kvmill
