// What is counted of each tenant is what a walk over all blocks finds, after any sequence of
// stores, loads, moves, removals, evictions of memory and disk, failed writes and restarts.
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/long_form.h"
#include "tests/storage/tiered_store_gpu_fixture.h"

namespace kvmill {
namespace {

class TenantHoldingTest : public TieredStoreGpuTest {
 protected:
  static constexpr const char* kTenants[] = {"default", "team-a", "team-b"};
  static constexpr std::uint64_t kNumbers = 200;  // Keys of each tenant.

  TenantHoldingTest() {
    // An arena for each tenant.
    options_.host_bytes = options_.gpu_bytes = 12 << 20;
    options_.room_wait = absl::ZeroDuration();
  }
  void OpenAll(bool with_gpu, bool with_disk) {
    with_disk_ = with_disk;
    options_.gpu = with_gpu ? &gpu_ : nullptr;
    Open(with_disk);
    spaces_.clear();
    for (const char* tenant : kTenants) {
      NamespaceSpec spec = Spec();
      spec.tenant = tenant;
      const auto info = store_->OpenNamespace("ns", spec);
      ASSERT_TRUE(info.ok()) << info.status();
      spaces_[tenant] = *info;
    }
  }
  BlockId BlockOf(const std::string& tenant, std::uint64_t number) {
    return {spaces_[tenant].id, 0, Key(number)};
  }
  DiskBlockId OnDisk(const BlockId& id) {
    for (const auto& [tenant, space] : spaces_) {
      if (space.id == id.namespace_id) return {space.fingerprint, id.group, id.key};
    }
    return {};
  }

  // Whether the counters of every tenant are what a walk finds. Nothing runs.
  void Compare(const std::string& step) {
    Settle();
    std::map<NamespaceId, TenantHolding> walked;
    unwritten_.clear();
    store_->List([&](const TieredStore::BlockInfo& block) {
      TenantHolding& of = walked[block.namespace_id];
      ++of.blocks;
      ++of.tier_blocks[static_cast<std::size_t>(block.tier)];
      of.tier_bytes[static_cast<std::size_t>(block.tier)] += block.bytes;
      const BlockId id{block.namespace_id, block.group, block.key};
      if (with_disk_ && !disk_.Find(OnDisk(id)).ok()) ++unwritten_[block.namespace_id];
      return true;
    });
    for (const auto& [tenant, space] : spaces_) {
      const TenantHolding counted = store_->Holding(tenant);
      const TenantHolding& found = walked[space.id];
      ASSERT_EQ(counted.blocks, found.blocks) << step << ": " << tenant;
      ASSERT_EQ(counted.tier_blocks, found.tier_blocks) << step << ": " << tenant;
      ASSERT_EQ(counted.tier_bytes, found.tier_bytes) << step << ": " << tenant;
    }
  }
  // One step of those that change what is where; its name.
  std::string Step() {
    const std::string tenant = kTenants[random_() % 3];
    const std::uint64_t number = random_() % kNumbers;
    const BlockId id = BlockOf(tenant, number);
    switch (random_() % 12) {
      case 0:
        EXPECT_TRUE(store_->Remove(id.namespace_id, {id.key}).ok());
        return absl::StrCat("remove ", tenant, " ", number);
      case 1:
        EXPECT_TRUE(store_->Evict(Tier::kHost, 200'000).ok());
        return "evict from host memory";
      case 2:
        if (gpu_tier()) {
          EXPECT_TRUE(store_->Evict(Tier::kGpu, 200'000).ok());
        }
        return "evict from the GPU";
      case 3:
        store_->Fetch(id).IgnoreError();  // Perhaps it is not there.
        return absl::StrCat("fetch ", tenant, " ", number);
      case 4:
        if (gpu_tier()) store_->FetchOnGpu(id).IgnoreError();
        return absl::StrCat("fetch on the GPU ", tenant, " ", number);
      case 5:
        if (with_disk_) disk_.Evict({OnDisk(id), OnDisk(BlockOf(tenant, number / 2))});
        return absl::StrCat("the disk drops ", tenant, " ", number);
      case 6:
        disk_.fail_write = 1;
        Put(id, {.token_count = kTokens}, values_).IgnoreError();  // It may be there.
        Settle();
        disk_.fail_write = 0;
        return absl::StrCat("store in vain to disk ", tenant, " ", number);
      case 7: {
        const std::uint64_t unwritten = unwritten_[id.namespace_id];
        const auto flushed = store_->Flush(tenant);
        EXPECT_EQ(flushed.ok(), with_disk_) << flushed.status();
        if (with_disk_) {
          EXPECT_EQ(*flushed, unwritten) << tenant;
          EXPECT_EQ(*store_->Flush(tenant), 0u);
        }
        return absl::StrCat("flush ", tenant);
      }
      case 8:
        if (random_() % 8 == 0) {
          EXPECT_TRUE(store_->Clear(id.namespace_id).ok());
        }
        return absl::StrCat("clear ", tenant);
      default:
        Put(id, {.token_count = kTokens}, values_).IgnoreError();  // It may be there.
        return absl::StrCat("store ", tenant, " ", number);
    }
  }
  bool gpu_tier() const { return options_.gpu != nullptr; }
  void RunSteps(bool with_gpu, bool with_disk, int steps) {
    for (unsigned seed = 1; seed <= ShortOrLong(1u, 20u); ++seed) {
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      random_.seed(seed);
      store_.reset();
      ASSERT_NO_FATAL_FAILURE(OpenAll(with_gpu, with_disk));
      for (int i = 0; i < steps; ++i) {
        std::string step = absl::StrCat("step ", i, ", ");
        if (with_disk && i % 250 == 249) {
          store_.reset();
          ASSERT_NO_FATAL_FAILURE(OpenAll(with_gpu, with_disk));
          step += "restart";
        } else {
          step += Step();
        }
        ASSERT_NO_FATAL_FAILURE(Compare(step));
      }
    }
  }

  std::mt19937 random_;
  const Values values_ = ValuesOf(1);
  bool with_disk_ = false;
  std::map<std::string, TieredStore::NamespaceInfo> spaces_;
  std::map<NamespaceId, std::uint64_t> unwritten_;  // At the last Compare: in memory only.
};

TEST_F(TenantHoldingTest, IsWhatAWalkFindsInHostMemory) { RunSteps(false, false, 500); }
TEST_F(TenantHoldingTest, IsWhatAWalkFindsWithADisk) { RunSteps(false, true, 1500); }
TEST_F(TenantHoldingTest, IsWhatAWalkFindsWithAGpuAndADisk) { RunSteps(true, true, 1500); }
TEST_F(TenantHoldingTest, IsWhatAWalkFindsWithAGpu) { RunSteps(true, false, 500); }

TEST_F(TenantHoldingTest, OfAnUnknownTenantThereIsNothing) {
  OpenAll(false, true);
  EXPECT_EQ(store_->Holding("nobody").blocks, 0u);
  EXPECT_EQ(*store_->Flush("nobody"), 0u);
}

// Another tenant's blocks, however many, are no work for a flush.
TEST_F(TenantHoldingTest, AFlushWritesTheTenantsBlocksOnly) {
  OpenAll(false, true);
  for (std::uint64_t i = 0; i < 3; ++i) {
    for (const char* tenant : kTenants) {
      disk_.fail_write = 1;
      ASSERT_TRUE(Put(BlockOf(tenant, i), {.token_count = kTokens}, values_).ok());
      Settle();
    }
  }
  EXPECT_EQ(disk_.stats().block_count, 0u);
  EXPECT_EQ(*store_->Flush("team-a"), 3u);
  EXPECT_EQ(disk_.stats().block_count, 3u);
  EXPECT_EQ(*store_->Flush(), 6u);
  EXPECT_EQ(disk_.stats().block_count, 9u);
}

}  // namespace
}  // namespace kvmill
