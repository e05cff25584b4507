// Quotas where others are slow: leases that do not end, disks that stand still, and what one tenant
// costs another meanwhile.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/tiered_store_quota_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

class TieredStoreFairnessTest : public TieredStoreQuotaTest {
 protected:
  // A lease on one block of every arena.
  std::vector<BlockRef> LeaseOfEach(const std::string& tenant, std::uint64_t arenas) {
    const std::uint64_t in_each = Numbers(tenant).size() / arenas;
    std::vector<BlockRef> leases;
    for (std::uint64_t i = 0; i < arenas; ++i) {
      leases.push_back(*store_->Fetch(IdOf(tenant, i * in_each)));
    }
    return leases;
  }
  // The pages of one block, removed again: for copies.
  std::vector<std::uint32_t> PageBytes(const std::string& tenant) {
    std::vector<std::uint32_t> sizes;
    EXPECT_TRUE(Put(tenant, 4000).ok());
    {
      const auto ref = store_->Fetch(IdOf(tenant, 4000));
      for (const auto& page : ref->pages()) {
        sizes.push_back(static_cast<std::uint32_t>(page.size()));
      }
    }
    EXPECT_TRUE(store_->Remove(Space(tenant), {Key(4000)}).ok());
    return sizes;
  }
  absl::Status Copy(const std::string& tenant, std::uint64_t number,
                    const std::vector<std::uint32_t>& page_bytes) {
    return store_
        ->BeginCopy(IdOf(tenant, number), {.token_count = kTokens}, page_bytes,
                    absl::ZeroDuration())
        .status();
  }
  DiskBlockId OnDisk(const std::string& tenant, std::uint64_t number) {
    return {store_->FindNamespace(Space(tenant))->fingerprint, 0, Key(number)};
  }
};

TEST_F(TieredStoreFairnessTest, LeasesOfWhoIsOverHoldNobodyUp) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  ASSERT_TRUE(store_->SetQuotas({{"over", {.soft_bytes = BlockBytes()}}}).ok());
  PutSome("over", 0, 4 * arena);
  PutSome("x", 0, 2 * arena);
  const std::vector<BlockRef> leases = LeaseOfEach("over", 4);
  PutSome("x", 1000, 3);  // Which would wait for ever.
  EXPECT_EQ(Numbers("x").size(), 2 * arena);
  EXPECT_GT(Numbers("over").size(), 3 * arena) << "nothing of it made room for that";
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreFairnessTest, WhatWouldLeaveInVainStays) {
  for (const bool limited : {false, true}) {
    SCOPED_TRACE(limited);
    store_.reset();
    OpenAll(false);
    const std::uint64_t arena = BlocksOfArena();
    if (limited) {  // And far from it.
      ASSERT_TRUE(store_->SetQuotas({{"x", {.soft_bytes = std::uint64_t{1} << 40}}}).ok());
    }
    PutSome("y", 0, 5 * arena);
    const std::vector<BlockRef> leases = LeaseOfEach("y", 5);
    PutSome("x", 0, arena);
    PutSome("x", 1000, 1);
    const std::uint64_t left = Numbers("y").size();
    EXPECT_GT(left, 4 * arena);
    EXPECT_EQ(Numbers("x").size(), arena);
    PutSome("x", 2000, arena / 2);
    EXPECT_EQ(Numbers("y").size(), left) << "its own are the next ones from now on";
    EXPECT_EQ(Numbers("x").size(), arena);
    EXPECT_TRUE(Agrees());
  }
}

TEST_F(TieredStoreFairnessTest, WhoMustNotWaitDoesNotWaitForTheDisk) {
  OpenAll(true);
  const std::vector<std::uint32_t> page_bytes = PageBytes("a");
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 2 * BlockBytes()}}}).ok());
  PutSome("a", 0, 2);
  Written();
  EXPECT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  disk_.hold_removes = true;
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status refused = Copy("a", 2, page_bytes);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("in the background"));
  EXPECT_EQ(Usage("a").rejections, 1u);
  // The room is there though the disk still stands.
  absl::Status again = refused;
  while (absl::IsResourceExhausted(again)) again = Copy("a", 2, page_bytes);
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50)) << "it waited";
  EXPECT_EQ(Numbers("a").size(), 1u);
  disk_.hold_removes = false;
}

TEST_F(TieredStoreFairnessTest, WaitingForOthersRoomEnds) {
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 2);
  Written();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 2 * block}}}).ok());
  const BlockRef lease = *store_->Fetch(IdOf("a", 0));
  disk_.hold_removes = true;
  std::thread first([&] { Put("a", 2).IgnoreError(); });
  while (Usage("a").charged_bytes > block)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // The room that the first one made is gone, and it stands in the disk.
  auto writer = store_->BeginStore(IdOf("a", 3), {.token_count = kTokens});
  EXPECT_TRUE(writer.ok()) << writer.status();
  std::atomic<bool> done{false};
  std::thread time([&] {
    while (!done) {
      clock_.AdvanceNanos(100'000'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status refused = Put("a", 4);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50)) << "it waited";
  done = true;
  time.join();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  disk_.hold_removes = false;
  first.join();
}

TEST_F(TieredStoreFairnessTest, AStoreThatEndsDoesNotEndItsTrimming) {
  OpenAll(true);
  constexpr std::uint64_t kBlocks = 384;  // Six batches.
  PutSome("a", 0, kBlocks);
  Written();
  disk_.remove_ms = 500;
  const std::uint64_t before = disk_.removes;
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 1}}}).ok());
  while (disk_.removes == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  store_.reset();
  EXPECT_LT(disk_.removes - before, 6u);
}

TEST_F(TieredStoreFairnessTest, WhatIsChargedIsShown) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 2);
  EXPECT_EQ(Usage("a").charged_bytes, 2 * block);
  {
    auto writer = store_->BeginStore(IdOf("a", 2), {.token_count = kTokens});
    ASSERT_TRUE(writer.ok());
    const BlockRef read = *store_->Fetch(IdOf("a", 0));
    ASSERT_TRUE(store_->Remove(Space("a"), {Key(0)}).ok());
    EXPECT_EQ(Usage("a").used_bytes, block);
    EXPECT_EQ(Usage("a").charged_bytes, 3 * block) << "one on its way, one removed and read";
  }
  EXPECT_EQ(Usage("a").charged_bytes, 2 * block) << "the assembly waits for its time-out";
}

TEST_F(TieredStoreFairnessTest, OrdersAreMetadata) {
  OpenAll(false);
  PutSome("a", 0, 1);
  const std::uint64_t before = store_->stats().metadata_bytes;
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = std::uint64_t{1} << 40}}}).ok());
  EXPECT_GE(store_->stats().metadata_bytes, before + 33 * options_.blocks_max);
  ASSERT_TRUE(store_->SetQuotas({}).ok());
  EXPECT_EQ(store_->stats().metadata_bytes, before);
}

// What the disk is told when it has to drop an epoch (what it does then:
// rocks_disk_store_cap_test).
TEST_F(TieredStoreFairnessTest, TheDiskKeepsWhatIsOfThoseWhoAreNotOver) {
  using Advice = DiskStore::KeepAdvice;
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 3);
  PutSome("b", 0, 3);
  PutSome("c", 0, 1);
  Written();
  EXPECT_EQ(disk_.Advice(OnDisk("a", 0)), Advice::kNone);
  ASSERT_TRUE(
      store_->SetQuotas({{"a", {.soft_bytes = 2 * block}}, {"b", {.soft_bytes = 3 * block}}}).ok());
  EXPECT_EQ(disk_.Advice(OnDisk("a", 0)), Advice::kDrop);
  EXPECT_EQ(disk_.Advice(OnDisk("b", 0)), Advice::kKeep);
  EXPECT_EQ(disk_.Advice(OnDisk("c", 0)), Advice::kKeep) << "who has no quota is not over it";
  ASSERT_TRUE(store_->Remove(Space("a"), {Key(0)}).ok());
  EXPECT_EQ(disk_.Advice(OnDisk("a", 1)), Advice::kNone) << "at it is not over it";
  EXPECT_EQ(disk_.Advice(OnDisk("b", 0)), Advice::kNone);
}

}  // namespace
}  // namespace kvmill
