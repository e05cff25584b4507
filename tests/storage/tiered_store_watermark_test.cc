// Watermarks: room is made in the background, from the high mark to the low one, and nothing that
// would be lost, is read, or waits for the disk leaves for it.
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "tests/storage/tiered_store_gpu_fixture.h"

namespace kvmill {
namespace {

class WatermarkTest : public TieredStoreGpuTest {
 protected:
  // Three extents for pages, so that percents mean something.
  WatermarkTest() {
    options_.host_bytes = options_.arena_bytes = 8 << 20;
    options_.gpu_bytes = options_.gpu_arena_bytes = 8 << 20;
  }
  double Used(Tier tier) {
    const TierStats& now = TierNow(tier);
    return 100.0 * static_cast<double>(now.used_bytes) / static_cast<double>(now.capacity_bytes);
  }
  static bool Within(std::chrono::milliseconds limit, const std::function<bool()>& is_so) {
    const auto give_up = std::chrono::steady_clock::now() + limit;
    while (!is_so()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  static bool Soon(const std::function<bool()>& is_so) {
    return Within(std::chrono::seconds(30), is_so);
  }
  // Long enough for a look of the background that it does without being told.
  static void Rest() { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); }
  // Until the tier has so much; the next number.
  std::uint64_t FillTo(Tier tier, double percent, std::uint64_t number = 0) {
    while (Used(tier) < percent) EXPECT_TRUE(PutAndSettle(number++).ok());
    return number;
  }
};

TEST_F(WatermarkTest, OccupancyReturnsToTheLowMarkAndNoStoreEvicts) {
  Open(true);
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 80, .low_percent = 50}).ok());
  std::uint64_t count = FillTo(Tier::kHost, 75);
  Rest();
  EXPECT_GE(Used(Tier::kHost), 75) << "not above the mark";
  while (EvictedFrom(Tier::kHost, EvictReason::kWatermark) == 0) {
    ASSERT_TRUE(PutAndSettle(count++).ok());
    ASSERT_LT(Used(Tier::kHost), 95);
  }
  // No call waits for it.
  EXPECT_TRUE(Soon([&] { return Used(Tier::kHost) <= 50; })) << Used(Tier::kHost);
  EXPECT_GT(Used(Tier::kHost), 40) << "it went on";
  // Many times what fits: stores find the room made.
  for (const std::uint64_t end = count + 400; count < end; ++count) {
    ASSERT_TRUE(PutAndSettle(count).ok());
    ASSERT_TRUE(Soon([&] { return Used(Tier::kHost) < 85; }));
  }
  EXPECT_EQ(EvictedFrom(Tier::kHost, EvictReason::kCapacity), 0u);
  EXPECT_EQ(store_->stats().blocks, count);
  for (std::uint64_t i = 0; i < count; i += 7) EXPECT_TRUE(GetIs(i)) << i;
}

TEST_F(WatermarkTest, MarksChangeWhileItRuns) {
  Open(true);
  FillTo(Tier::kHost, 90);
  Rest();
  EXPECT_GE(Used(Tier::kHost), 90) << "without marks nothing leaves";
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 100, .low_percent = 10}).ok());
  Rest();
  EXPECT_GE(Used(Tier::kHost), 90) << "100 is no mark";
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 60, .low_percent = 30}).ok());
  EXPECT_TRUE(Soon([&] { return Used(Tier::kHost) <= 30; }));
}

TEST_F(WatermarkTest, BadMarksAreRefused) {
  Open(true);
  for (const Watermarks& bad : {Watermarks{101, 50}, Watermarks{0, 0}, Watermarks{50, 50},
                                Watermarks{50, 60}, Watermarks{100, 100}}) {
    EXPECT_EQ(store_->SetWatermarks(Tier::kHost, bad).code(), absl::StatusCode::kInvalidArgument)
        << bad.high_percent << " " << bad.low_percent;
  }
  EXPECT_EQ(store_->SetWatermarks(Tier::kDisk, {90, 80}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->SetWatermarks(Tier::kGpu, {90, 80}).ok()) << "there is none to keep";
}

TEST_F(WatermarkTest, WhatWouldBeLostStays) {
  Open(false);
  const std::uint64_t count = FillTo(Tier::kHost, 90);
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 50, .low_percent = 10}).ok());
  Rest();
  EXPECT_EQ(store_->stats().blocks, count);
  EXPECT_GE(Used(Tier::kHost), 90);
  // As it does when the disk takes nothing.
  store_.reset();
  Open(true);
  disk_.hold_writes = true;
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 50, .low_percent = 10}).ok());
  for (std::uint64_t i = 0; Used(Tier::kHost) < 90; ++i) ASSERT_TRUE(Put(i).ok());
  Rest();
  EXPECT_GE(Used(Tier::kHost), 90) << "a block left before it was on disk";
  disk_.hold_writes = false;
  EXPECT_TRUE(Soon([&] { return Used(Tier::kHost) <= 10; }));
  for (std::uint64_t i = 0; i < count; i += 7) EXPECT_TRUE(GetIs(i)) << i;
}

TEST_F(WatermarkTest, WhatSomebodyReadsStays) {
  Open(true);
  const std::uint64_t count = FillTo(Tier::kHost, 90);
  std::vector<BlockRef> refs;
  for (std::uint64_t i = 0; i < count; ++i) refs.push_back(*store_->Fetch(Id(i)));
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 50, .low_percent = 10}).ok());
  Rest();
  EXPECT_GE(Used(Tier::kHost), 90);
  for (std::uint64_t i = 0; i < count; i += 9) EXPECT_TRUE(Holds(refs[i], i)) << i;
  refs.clear();  // Nobody says so: it looks by itself.
  EXPECT_TRUE(Soon([&] { return Used(Tier::kHost) <= 10; }));
}

TEST_F(WatermarkTest, TheGpuMovesBlocksToFreeHostMemory) {
  OpenWithGpu(false);
  const std::uint64_t count = FillTo(Tier::kGpu, 80);
  ASSERT_TRUE(store_->SetWatermarks(Tier::kGpu, {.high_percent = 60, .low_percent = 40}).ok());
  EXPECT_TRUE(Soon([&] { return Used(Tier::kGpu) <= 40; }));
  EXPECT_GT(EvictedFrom(Tier::kGpu, EvictReason::kWatermark), 0u);
  EXPECT_EQ(store_->stats().blocks, count);
  EXPECT_GT(TierNow(Tier::kHost).blocks, 0u);
  for (std::uint64_t i = 0; i < count; i += 5) EXPECT_TRUE(GetIs(i)) << i;
}

TEST_F(WatermarkTest, WithoutFreeHostMemoryOrADiskTheGpuKeepsItsBlocks) {
  OpenWithGpu(false);
  std::uint64_t count = FillTo(Tier::kGpu, 95);
  while (Used(Tier::kHost) < 97) ASSERT_TRUE(PutAndSettle(count++).ok());
  ASSERT_TRUE(store_->SetWatermarks(Tier::kGpu, {.high_percent = 60, .low_percent = 1}).ok());
  Rest();
  EXPECT_EQ(store_->stats().blocks, count) << "a block was lost";
  EXPECT_EQ(EvictedFrom(Tier::kHost, EvictReason::kCapacity), 0u);
}

TEST_F(WatermarkTest, WithAFullDiskAndHostTheGpuKeepsItsBlocks) {
  OpenWithGpu(true);
  disk_.full = true;
  std::uint64_t count = FillTo(Tier::kGpu, 95);
  while (Used(Tier::kHost) < 97) ASSERT_TRUE(PutAndSettle(count++).ok());
  ASSERT_TRUE(store_->SetWatermarks(Tier::kGpu, {.high_percent = 60, .low_percent = 1}).ok());
  Rest();
  EXPECT_EQ(store_->stats().blocks, count) << "a block was lost";
  EXPECT_EQ(EvictedFrom(Tier::kHost, EvictReason::kCapacity), 0u);
}

TEST_F(WatermarkTest, WithADiskTheGpuReachesItsMarkAndNothingIsLost) {
  OpenWithGpu(true);
  ASSERT_TRUE(store_->SetWatermarks(Tier::kGpu, {.high_percent = 80, .low_percent = 50}).ok());
  ASSERT_TRUE(store_->SetWatermarks(Tier::kHost, {.high_percent = 80, .low_percent = 50}).ok());
  constexpr std::uint64_t kCount = 700;
  for (std::uint64_t i = 0; i < kCount; ++i) ASSERT_TRUE(PutAndSettle(i).ok());
  EXPECT_TRUE(Soon([&] { return Used(Tier::kGpu) <= 80 && Used(Tier::kHost) <= 80; }));
  EXPECT_EQ(store_->stats().blocks, kCount);
  for (std::uint64_t i = 0; i < kCount; i += 5) EXPECT_TRUE(GetIs(i)) << i;
}

}  // namespace
}  // namespace kvmill
