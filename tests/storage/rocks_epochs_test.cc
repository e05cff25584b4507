// Which epoch goes next, and how much is carried over. Nothing is on a disk here.
#include "storage/rocks_epochs.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kBlockBytes = 40;  // Two in an epoch.

RocksEpochs::Options SmallEpochs() {
  return {.capacity_bytes = 300,
          .epoch_bytes = 100,
          .reinsert_bytes = 50,
          .reinsert_window_epochs = 2,
          .wait_ms = 0,
          .begin = [](std::uint64_t) { return absl::StatusOr<ColumnFamily>(ColumnFamily()); },
          .other_bytes = [] { return std::uint64_t{0}; }};
}
// The epoch that the block went to; 0: none had room.
std::uint64_t Put(RocksEpochs& epochs, bool reinsert = false) {
  const auto place = epochs.Acquire(kBlockBytes, reinsert);
  if (!place.ok()) return 0;
  epochs.Complete(*place, true);
  return place->epoch;
}

TEST(RocksEpochsTest, AnEmptyEpochGoesBeforeTheOldest) {
  RocksEpochs epochs(SmallEpochs());
  ASSERT_TRUE(epochs.Start().ok());
  std::vector<std::uint64_t> of;
  for (int i = 0; i < 7; ++i) of.push_back(Put(epochs));
  // The fourth is over the cap: 3 sealed ones and itself.
  ASSERT_EQ(of, (std::vector<std::uint64_t>{1, 1, 2, 2, 3, 3, 4}));
  EXPECT_EQ(epochs.WaitForDoomed()->epoch, 1u);
  epochs.Removed(2);
  EXPECT_EQ(epochs.WaitForDoomed()->epoch, 1u) << "the second has another block";
  epochs.Removed(2);
  ASSERT_EQ(epochs.WaitForDoomed()->epoch, 2u);
  epochs.Dropped(2);
  EXPECT_EQ(Put(epochs), 4u) << "the cap is kept: nothing of the first has to go";
}

TEST(RocksEpochsTest, AnEpochTakesNoMoreOfOldOnesThanIsKeptForThem) {
  RocksEpochs epochs(SmallEpochs());
  ASSERT_TRUE(epochs.Start().ok());
  for (int i = 0; i < 6; ++i) ASSERT_NE(Put(epochs), 0u);
  ASSERT_EQ(Put(epochs), 4u);
  EXPECT_EQ(Put(epochs, true), 4u);
  EXPECT_EQ(Put(epochs, true), 0u);
  epochs.Dropped(1);
  ASSERT_EQ(Put(epochs), 5u);
  EXPECT_EQ(Put(epochs, true), 5u);
  EXPECT_EQ(epochs.Acquire(20, true).status().code(), absl::StatusCode::kResourceExhausted)
      << "80 of 100 bytes are used, 40 of 50 of them for what was carried over";
}

}  // namespace
}  // namespace kvmill
