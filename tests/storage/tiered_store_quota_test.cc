// Quotas: what is counted, who has to make room, and how a tenant comes to its first arena.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "gmock/gmock.h"
#include "tests/storage/tiered_store_quota_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

TEST_F(TieredStoreQuotaTest, HardMakesRoomAmongTheTenantsOwnBlocks) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 4 * block + block / 2}}}).ok());
  PutSome("b", 0, 5);
  PutSome("a", 0, 4);
  // Used again, and by that the last of the four to leave.
  EXPECT_TRUE(store_->Fetch(IdOf("a", 0)).ok());
  PutSome("a", 4, 3);
  EXPECT_EQ(Numbers("a"), (std::set<std::uint64_t>{0, 4, 5, 6}));
  EXPECT_EQ(Numbers("b"), (std::set<std::uint64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(Usage("a").used_bytes, 4 * block);
  EXPECT_EQ(Usage("a").rejections, 0u);
  EXPECT_EQ(Evicted(EvictReason::kQuota), 3u);
  EXPECT_EQ(Evicted(EvictReason::kCapacity), 0u);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, WhatIsElsewhereIsPromisedAsFarAsHardHasRoom) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  std::vector<BlockKey> keys;
  for (std::uint64_t i = 0; i < 8; ++i) keys.push_back(Key(i));
  const std::vector<bool> elsewhere(keys.size(), true);
  TieredStore::LookupOptions options;
  options.elsewhere = &elsewhere;
  const auto hits = [&] { return store_->Lookup(Space("a"), keys, {}, options).hit_blocks; };
  EXPECT_EQ(hits(), 8u);
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 3 * block + block / 2}}}).ok());
  EXPECT_EQ(hits(), 3u);
  PutSome("a", 0, 2);
  EXPECT_EQ(hits(), 3u);
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = block}}}).ok());
  EXPECT_LE(hits(), 2u);
  ASSERT_TRUE(store_->SetQuotas({{"b", {.hard_bytes = block}}}).ok());
  EXPECT_EQ(hits(), 8u);
}

TEST_F(TieredStoreQuotaTest, HardRefusesAtOnceWhatFindsNoRoom) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 2 * block}}}).ok());
  PutSome("b", 0, 1);
  PutSome("a", 0, 2);
  {
    const auto first = store_->Fetch(IdOf("a", 0));
    const auto second = store_->Fetch(IdOf("a", 1));
    const absl::Status refused = Put("a", 2);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    for (const std::string& part :
         {std::string("tenant \"a\""), absl::StrFormat("%d of %d bytes", 2 * block, 2 * block),
          std::string("raise quota.hard"), std::string("end leases")}) {
      EXPECT_THAT(std::string(refused.message()), HasSubstr(part));
    }
    EXPECT_EQ(Usage("a").rejections, 1u);
    EXPECT_EQ(Usage("b").rejections, 0u);
    EXPECT_EQ(store_->stats().rejected_blocks, 1u);
    EXPECT_EQ(Numbers("a").size(), 2u);
    EXPECT_EQ(Numbers("b").size(), 1u);
  }
  PutSome("a", 2, 1);
  // Never, whatever leaves.
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = block - 1}}}).ok());
  const absl::Status never = Put("a", 3);
  EXPECT_TRUE(absl::IsResourceExhausted(never)) << never;
  EXPECT_THAT(std::string(never.message()),
              HasSubstr(absl::StrFormat("this block alone is larger, %d bytes", block)));
  ASSERT_TRUE(store_->SetQuotas({}).ok());
  PutSome("a", 3, 1);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, WhatIsOnItsWayAndWhatIsStillReadCounts) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 3 * block}}}).ok());
  std::vector<BlockWriter> writers;
  for (std::uint64_t i = 0; i < 3; ++i) {
    auto writer = store_->BeginStore(IdOf("a", i), {.token_count = kTokens});
    ASSERT_TRUE(writer.ok()) << writer.status();
    writers.push_back(*std::move(writer));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(
      store_->BeginStore(IdOf("a", 3), {.token_count = kTokens}).status()));
  // Who writes other heads of one of them joins it.
  EXPECT_TRUE(store_->BeginStore(IdOf("a", 2), {.token_count = kTokens}).ok());
  EXPECT_EQ(Usage("a").used_bytes, 0u) << "only sealed blocks are used bytes";
  EXPECT_EQ(store_->Remove(Space("a"), {Key(0), Key(1), Key(2)}).value(), 0u);
  writers.clear();

  PutSome("a", 0, 3);
  auto read = store_->Fetch(IdOf("a", 1));
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(store_->Remove(Space("a"), {Key(0), Key(1), Key(2)}).value(), 3u);
  EXPECT_EQ(Usage("a").used_bytes, 0u);
  PutSome("a", 3, 2);
  const auto third = store_->Fetch(IdOf("a", 3));
  const auto fourth = store_->Fetch(IdOf("a", 4));
  EXPECT_TRUE(absl::IsResourceExhausted(Put("a", 5))) << "its removed block is still read";
  *read = BlockRef();
  PutSome("a", 5, 1);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, ManyAtOnceDoNotOvershoot) {
  options_.host_bytes = 12 * kArena;
  OpenAll(false);
  const std::uint64_t hard = 7 * BlockBytes() + 100;
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = hard}}}).ok());
  Space("a");
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> most{0};
  std::thread watcher([&] {
    while (!stop) most = std::max<std::uint64_t>(most, Usage("a").used_bytes);
  });
  std::atomic<int> stored{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 60; ++i) {
        const absl::Status put = Put("a", t * 1000 + i);
        // All room can be of blocks that others are storing.
        EXPECT_TRUE(put.ok() || absl::IsResourceExhausted(put)) << put;
        if (put.ok()) ++stored;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  watcher.join();
  EXPECT_LE(most, hard);
  EXPECT_GT(stored, 100);
  EXPECT_GE(Usage("a").used_bytes, BlockBytes());
  EXPECT_LE(Usage("a").used_bytes, hard);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, RawHeadsCountWithTheBytesThatTheyTake) {
  OpenAll(false);
  // One head that no tile holds makes its page longer, after the fact.
  Values raw = values_;
  for (std::size_t i = 0; i < std::size_t{2} * kTokens * kDim; ++i) {
    raw[i] = FloatToFloat16(60000.0f);
  }
  const auto put = [&](std::uint64_t number) {
    return TieredStoreTest::Put(IdOf("a", number), {.token_count = kTokens}, raw);
  };
  ASSERT_TRUE(put(0).ok());
  ASSERT_EQ(store_->stats().raw_blocks, 1u);
  const std::uint64_t bytes = Usage("a").used_bytes;
  EXPECT_GT(bytes, BlockBytes());
  EXPECT_TRUE(Agrees());
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = bytes + BlockBytes()}}}).ok());
  const auto held = store_->Fetch(IdOf("a", 0));
  const absl::Status refused = put(1);  // It would fit as tiles.
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(Usage("a").used_bytes, bytes);
  EXPECT_EQ(store_->stats().assembling_blocks, 0u);
  PutSome("a", 2, 1);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, SoftKeepsOthersOutOfIt) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  const std::uint64_t block = BlockBytes();
  // "a" may keep two arenas' worth and takes all six; "b" and "c" come later.
  ASSERT_TRUE(store_->SetQuotas({{"a", {.soft_bytes = 2 * arena * block}}}).ok());
  PutSome("a", 0, 6 * arena);
  EXPECT_EQ(Evicted(EvictReason::kCapacity), 0u);
  PutSome("b", 0, arena);
  PutSome("c", 0, arena);
  EXPECT_EQ(Numbers("a").size(), 4 * arena);
  // Stores of who is over push out its own, though others are older by now.
  PutSome("a", 1000, 2 * arena);
  EXPECT_EQ(Numbers("a").size(), 4 * arena);
  EXPECT_EQ(Numbers("b").size(), arena);
  EXPECT_EQ(Numbers("c").size(), arena);
  // Down to its soft quota, and no further.
  PutSome("b", 1000, 2 * arena);
  EXPECT_EQ(Numbers("a").size(), 2 * arena);
  EXPECT_EQ(Numbers("b").size(), 3 * arena);
  EXPECT_EQ(Numbers("c").size(), arena);
  PutSome("b", 2000, 1);  // As the policy says, from now on.
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, TheFurthestOverGoesFirst) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  const std::uint64_t bytes = arena * BlockBytes();
  ASSERT_TRUE(store_
                  ->SetQuotas({{"a", {.soft_bytes = 2 * bytes}},   // 3 of 2: 1.5.
                               {"b", {.soft_bytes = bytes / 2}}})  // 1 of 0.5: 2.
                  .ok());
  PutSome("a", 0, 3 * arena);
  PutSome("b", 0, arena);
  PutSome("c", 0, 2 * arena);
  PutSome("d", 0, 1);
  EXPECT_EQ(Numbers("a").size(), 3 * arena);
  EXPECT_EQ(Numbers("b").size(), 0u);
  PutSome("e", 0, 1);
  EXPECT_EQ(Numbers("a").size(), 2 * arena);
  EXPECT_EQ(Numbers("c").size(), 2 * arena);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, WhoIsOverTakesNothingOfThoseWhoAreNot) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.soft_bytes = BlockBytes()}}}).ok());
  PutSome("b", 0, 4 * arena);
  PutSome("a", 0, 2 * arena);
  std::vector<BlockRef> held;
  for (std::uint64_t i = 0; i < 2 * arena; ++i) held.push_back(*store_->Fetch(IdOf("a", i)));
  // Waits for its own, which stay: the clock has to go on.
  std::atomic<bool> done{false};
  std::thread time([&] {
    while (!done) {
      clock_.AdvanceNanos(100'000'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const absl::Status refused = Put("a", 1000);
  done = true;
  time.join();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(Usage("a").rejections, 0u) << "it is no hard quota";
  EXPECT_EQ(Numbers("b").size(), 4 * arena);
  held.clear();
  PutSome("a", 1000, 1);
  EXPECT_EQ(Numbers("b").size(), 4 * arena);
}

// Without any quota: the tenant that comes last gets an arena, though nobody leaves one.
TEST_F(TieredStoreQuotaTest, ANewTenantGetsTheArenaThatIsWorthLeast) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  PutSome("a", 0, 4 * arena);
  PutSome("b", 0, 2 * arena);
  // Of each arena of "a" but one all blocks are used; of that one a few. What is of "b" is older in
  // no sense: "a" has more.
  for (std::uint64_t i = 0; i < 4 * arena; ++i) {
    if (i / arena == 2 && i % 4 != 0) continue;
    EXPECT_TRUE(store_->Fetch(IdOf("a", i)).ok());
  }
  PutSome("c", 0, 1);
  const std::set<std::uint64_t> left = Numbers("a");
  EXPECT_EQ(left.size(), 3 * arena);
  EXPECT_FALSE(left.contains(2 * arena));
  EXPECT_FALSE(left.contains(3 * arena - 1));
  EXPECT_EQ(Numbers("b").size(), 2 * arena);
  EXPECT_EQ(Evicted(EvictReason::kCapacity), arena);
  PutSome("c", 1, arena - 1);
  EXPECT_EQ(Evicted(EvictReason::kCapacity), arena) << "the rest of its arena is its own";
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, ArenasThatSomebodyReadsOrWritesStay) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  PutSome("a", 0, 6 * arena - 1);
  auto writer = store_->BeginStore(IdOf("a", 6 * arena - 1), {.token_count = kTokens});
  ASSERT_TRUE(writer.ok());
  std::vector<BlockRef> held;
  for (std::uint64_t i = 0; i < 4; ++i) held.push_back(*store_->Fetch(IdOf("a", i * arena)));
  PutSome("b", 0, 1);
  const std::set<std::uint64_t> left = Numbers("a");
  EXPECT_EQ(left.size(), 5 * arena - 1);
  EXPECT_FALSE(left.contains(4 * arena)) << "the one arena of which all may leave";
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(left.contains(i * arena));
}

// When something in every arena still waits for the disk, one is closed, and empty when that is
// written.
TEST_F(TieredStoreQuotaTest, AnArenaIsEmptiedAsItsBlocksAreWritten) {
  OpenAll(true);
  const std::uint64_t arena = BlocksOfArena();
  PutSome("a", 0, 6 * arena);
  Written();
  disk_.hold_writes = true;
  for (std::uint64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(store_->Remove(Space("a"), {Key(i * arena)}).value(), 1u);
    PutSome("a", 2000 + i, 1);  // In that one's place.
  }
  Space("b");
  std::atomic<bool> stored{false};
  std::thread storing([&] {
    PutSome("b", 0, 1);
    stored = true;
  });
  const auto in_host = [&] { return Usage("a").tier_bytes[static_cast<std::size_t>(Tier::kHost)]; };
  while (in_host() > (5 * arena + 1) * BlockBytes()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(stored);
  disk_.hold_writes = false;
  storing.join();
  EXPECT_TRUE(stored);
  EXPECT_EQ(in_host(), 5 * arena * BlockBytes()) << "one arena, and nothing else";
  Written();
  EXPECT_EQ(Numbers("a").size(), 6 * arena) << "all of it is on disk";
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, ManyNewTenantsGetTheirArenasAtOnce) {
  OpenAll(false);
  const std::uint64_t arena = BlocksOfArena();
  PutSome("a", 0, 6 * arena);
  std::atomic<bool> stop{false};
  // Whose freed room the largest holder must not take back meanwhile.
  std::thread storing([&] {
    // So many that those who come are not the oldest at the end.
    for (std::uint64_t i = 6 * arena; i < 8 * arena && !stop; ++i) {
      const absl::Status put = Put("a", i);
      EXPECT_TRUE(put.ok()) << put;
    }
  });
  for (const char* tenant : {"b", "c", "d"}) Space(tenant);
  std::vector<std::thread> threads;
  for (const char* tenant : {"b", "c", "d"}) {
    threads.emplace_back([&, tenant] { PutSome(tenant, 0, 5); });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  storing.join();
  for (const char* tenant : {"b", "c", "d"}) EXPECT_EQ(Numbers(tenant).size(), 5u);
  EXPECT_LE(Numbers("a").size(), 3 * arena) << "an arena each";
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, ALowerHardQuotaTakesEffectInTheBackground) {
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 8);
  PutSome("b", 0, 8);
  Written();
  EXPECT_TRUE(store_->Evict(Tier::kHost, 3 * block).ok());
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 3 * block}}}).ok());
  while (Usage("a").used_bytes > 3 * block)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(Usage("a").used_bytes, 3 * block);
  EXPECT_EQ(Numbers("b").size(), 8u);
  while (!Agrees()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // The disk is last.

  // A wrong one changes nothing.
  EXPECT_TRUE(absl::IsInvalidArgument(
      store_->SetQuotas({{"a", {.soft_bytes = 2 * block, .hard_bytes = block}}})));
  EXPECT_EQ(Usage("a").quota.hard_bytes, 3 * block);
}

TEST_F(TieredStoreQuotaTest, WhatIsOnDiskOnlyLeavesFirstAndCountsAfterARestart) {
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 6);
  PutSome("b", 0, 3);
  Written();
  EXPECT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  EXPECT_EQ(Usage("a").used_bytes, 6 * block);
  EXPECT_EQ(Usage("a").tier_bytes[static_cast<std::size_t>(Tier::kHost)], 0u);
  EXPECT_TRUE(store_->Fetch(IdOf("a", 0)).ok());
  EXPECT_TRUE(Agrees()) << "a block in two tiers is used once";
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 6 * block}}}).ok());
  PutSome("a", 6, 2);
  Written();
  EXPECT_TRUE(Agrees());
  EXPECT_EQ(Numbers("a").size(), 6u);
  EXPECT_TRUE(Numbers("a").contains(0)) << "it is in memory";

  store_.reset();
  OpenAll(true);
  EXPECT_EQ(Usage("a").used_bytes, 6 * block);
  EXPECT_EQ(Usage("b").used_bytes, 3 * block);
  EXPECT_EQ(Numbers("a").size(), 6u);
  EXPECT_TRUE(Agrees());
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 6 * block}}}).ok());
  PutSome("a", 8, 1);
  Written();
  EXPECT_EQ(Usage("a").used_bytes, 6 * block);
  EXPECT_EQ(Numbers("b").size(), 3u);
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, ABlockThatComesAgainWhileItLeavesForTheQuotaStaysOnDisk) {
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  PutSome("a", 0, 2);
  Written();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 2 * block}}}).ok());
  disk_.remove_ms = 20;
  std::thread other([&] { EXPECT_TRUE(Put("a", 2).ok()); });
  // As soon as the first one is out of the index it is stored again, while the disk removes it.
  while (Numbers("a").contains(0)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  absl::Status again;
  do {
    again = Put("a", 0);
  } while (!again.ok());
  other.join();
  Written();
  absl::Status durable;
  ASSERT_TRUE(store_->MakeDurable({IdOf("a", 0)}, absl::MakeSpan(&durable, 1)).ok());
  EXPECT_TRUE(durable.ok() || absl::IsNotFound(durable)) << durable;
  EXPECT_TRUE(Agrees());
}

TEST_F(TieredStoreQuotaTest, CopiesFromOtherNodesCount) {
  OpenAll(false);
  const std::uint64_t block = BlockBytes();
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 2 * block}}}).ok());
  std::vector<std::vector<std::byte>> pages;
  std::vector<std::uint32_t> sizes;
  PutSome("a", 0, 1);
  {
    const auto ref = store_->Fetch(IdOf("a", 0));
    for (const auto& page : ref->pages()) {
      pages.emplace_back(page.begin(), page.end());
      sizes.push_back(static_cast<std::uint32_t>(page.size()));
    }
  }
  ASSERT_TRUE(store_->Remove(Space("a"), {Key(0)}).ok());
  const BlockOrigin origin{.token_count = kTokens};
  auto copy = store_->BeginCopy(IdOf("a", 0), origin, sizes, absl::ZeroDuration());
  ASSERT_TRUE(copy.ok()) << copy.status();
  PutSome("a", 1, 1);
  const auto held = store_->Fetch(IdOf("a", 1));
  EXPECT_TRUE(absl::IsResourceExhausted(
      store_->BeginCopy(IdOf("a", 2), origin, sizes, absl::ZeroDuration()).status()));
  EXPECT_EQ(Usage("a").rejections, 1u);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    std::copy(pages[i].begin(), pages[i].end(), copy->pages()[i].begin());
  }
  EXPECT_TRUE(copy->Commit().ok());
  EXPECT_EQ(Usage("a").used_bytes, 2 * block);
  EXPECT_TRUE(Agrees());
  {
    auto dropped = store_->BeginCopy(IdOf("a", 2), origin, sizes, absl::ZeroDuration());
    EXPECT_TRUE(dropped.ok()) << "in place of the first";
  }
  EXPECT_EQ(Usage("a").used_bytes, block);
  PutSome("a", 3, 1);
  EXPECT_TRUE(Agrees());
}

// Anything, in any order, against what List and the disk say; and no hard quota is passed.
TEST_F(TieredStoreQuotaTest, RandomOperationsAgreeWithAModel) {
  for (const char* policy : {"returns", "lru", "s3-fifo", "arc", "w-tinylfu", "sieve"}) {
    SCOPED_TRACE(policy);
    options_.eviction_policy = policy;
    options_.host_bytes = 3 * kArena;  // They cannot all be in memory.
    store_.reset();
    OpenAll(true);
    const std::uint64_t block = BlockBytes();
    std::mt19937_64 random(20);
    const std::vector<std::string> tenants = {"a", "b", "c"};
    TenantQuotas quotas;
    for (int step = 0; step < 1200; ++step) {
      const std::string& tenant = tenants[random() % tenants.size()];
      const std::uint64_t number = random() % 300;
      switch (random() % 16) {
        default: {
          absl::Status put = Put(tenant, number);
          // What has to leave may still be on its way to the disk.
          for (int i = 0; i < 500 && absl::IsResourceExhausted(put); ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            put = Put(tenant, number);
          }
          EXPECT_TRUE(put.ok() || absl::IsAlreadyExists(put)) << put;
          break;
        }
        case 1:
        case 2:
        case 3: {
          const auto ref = store_->Fetch(IdOf(tenant, number));
          EXPECT_TRUE(ref.ok() || absl::IsNotFound(ref.status())) << ref.status();
          break;
        }
        case 4:
          EXPECT_TRUE(store_->Remove(Space(tenant), {Key(number), Key(number + 1)}).ok());
          break;
        case 5:
          EXPECT_TRUE(store_->Evict(Tier::kHost, (random() % 20) * block).ok());
          break;
        case 6: {
          quotas.clear();
          for (const std::string& of : tenants) {
            if (random() % 4 == 0) continue;
            TenantQuota& quota = quotas[of];
            if (random() % 3 != 0) quota.hard_bytes = (5 + random() % 80) * block;
            if (random() % 3 != 0) {
              quota.soft_bytes = std::min(quota.hard_bytes, (1 + random() % 40) * block);
            }
          }
          EXPECT_TRUE(store_->SetQuotas(quotas).ok());
          break;
        }
        case 7: {
          Written();
          const auto info = store_->FindNamespace(Space(tenant));
          const DiskBlockId id{info->fingerprint, 0, Key(number)};
          if (disk_.Find(id).ok()) disk_.Evict({id});
          break;
        }
        case 8:
          if (random() % 8 == 0) {
            EXPECT_TRUE(store_->Clear(Space(tenant)).ok());
          }
          break;
        case 9:
          if (random() % 8 == 0) {
            Restart();
            for (const std::string& of : tenants) Space(of);
            EXPECT_TRUE(store_->SetQuotas(quotas).ok());
          }
          break;
      }
      for (const auto& [of, quota] : quotas) {
        if (quota.hard_bytes == kNoQuota) continue;
        while (Usage(of).used_bytes > quota.hard_bytes) std::this_thread::yield();
      }
      if (step % 10 != 0) continue;
      Written();
      ::testing::AssertionResult agrees = Agrees();
      // The background takes from the disk last.
      for (int i = 0; i < 2000 && !agrees; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        agrees = Agrees();
      }
      ASSERT_TRUE(agrees) << "step " << step;
    }
    EXPECT_EQ(store_->stats().references, 0u);
  }
}

TEST_F(TieredStoreQuotaTest, ManyThreadsLeaveTheAccountsRight) {
  options_.host_bytes = 4 * kArena;
  OpenAll(true);
  const std::uint64_t block = BlockBytes();
  const std::vector<std::string> tenants = {"a", "b", "c"};
  for (const std::string& tenant : tenants) Space(tenant);
  std::atomic<bool> stop{false};
  // Waiting for room is bounded by this clock.
  std::thread time([&] {
    while (!stop) {
      clock_.AdvanceNanos(5'000'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int step = 0; step < 400; ++step) {
        const std::string& tenant = tenants[random() % tenants.size()];
        const std::uint64_t number = random() % 250;
        const std::uint64_t what = random() % 8;
        if (what < 4) {
          // Also when two store the same block, and when it is removed meanwhile.
          const absl::Status put = Put(tenant, number);
          EXPECT_TRUE(put.ok() || absl::IsAlreadyExists(put) || absl::IsAborted(put) ||
                      absl::IsResourceExhausted(put))
              << put;
        } else if (what < 6) {
          const auto ref = store_->Fetch(IdOf(tenant, number));
          if (!ref.ok()) continue;
          std::this_thread::yield();
        } else if (what == 6) {
          EXPECT_TRUE(store_->Remove(Space(tenant), {Key(number)}).ok());
        } else {
          const absl::Status set = store_->SetQuotas(
              {{"a", {.soft_bytes = 10 * block, .hard_bytes = (20 + random() % 60) * block}},
               {random() % 2 == 0 ? "b" : "c", {.soft_bytes = (1 + random() % 60) * block}}});
          EXPECT_TRUE(set.ok()) << set;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  time.join();
  Written();
  ::testing::AssertionResult agrees = Agrees();
  for (int i = 0; i < 5000 && !agrees; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    agrees = Agrees();
  }
  EXPECT_TRUE(agrees);
  // Nothing is charged that is not there: all of it can be used.
  ASSERT_TRUE(store_->SetQuotas({{"a", {.hard_bytes = 20 * block}}}).ok());
  EXPECT_TRUE(store_->Clear(Space("a")).ok());
  std::vector<BlockRef> held;
  for (std::uint64_t i = 0; i < 20; ++i) {
    const absl::Status put = Put("a", 2000 + i);
    ASSERT_TRUE(put.ok()) << i << ": " << put;
    held.push_back(*store_->Fetch(IdOf("a", 2000 + i)));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(Put("a", 3000)));
  held.clear();
}

}  // namespace
}  // namespace kvmill
