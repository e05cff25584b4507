// What a daemon says of the blocks of a store, and what becomes of answers that make no sense.
#include "client/store_results.h"

#include <gtest/gtest.h>

#include <iterator>

namespace kvmill {
namespace {

v1::StoreResult Said(std::uint32_t block, std::uint32_t group, int outcome, int code = 0) {
  v1::StoreResult result;
  result.set_sequence(block);
  result.set_group(group);
  result.set_outcome(static_cast<v1::StoreOutcome>(outcome));
  result.mutable_status()->set_code(code);
  result.set_stored_bytes(10);
  return result;
}

TEST(StoreResultsTest, ABlockIsWhatItsWorstGroupIs) {
  StoreResults results(3, 2);
  results.Add(Said(0, 0, v1::STORE_EXISTING));
  results.Add(Said(0, 1, v1::STORE_STORED));
  results.Add(Said(1, 1, v1::STORE_FAILED, static_cast<int>(absl::StatusCode::kAborted)));
  results.Add(Said(1, 0, v1::STORE_STORED));
  results.Add(Said(2, 0, v1::STORE_STORED));
  const StoreResult result = results.Take();
  EXPECT_EQ(result.blocks[0].outcome, StoreOutcome::kStored);
  EXPECT_TRUE(result.blocks[0].status.ok());
  EXPECT_EQ(result.blocks[1].outcome, StoreOutcome::kFailed);
  EXPECT_TRUE(absl::IsAborted(result.blocks[1].status));
  EXPECT_EQ(result.blocks_stored, 1u);
  EXPECT_EQ(result.blocks_failed, 1u);
  EXPECT_EQ(result.stored_bytes, 30u);
}

TEST(StoreResultsTest, OutcomesThatNoDaemonGivesAreFailures) {
  const int outcomes[] = {v1::STORE_FAILED, -1, 4, 256 + v1::STORE_STORED};
  StoreResults results(std::size(outcomes), 1);
  for (std::uint32_t i = 0; i < std::size(outcomes); ++i) results.Add(Said(i, 0, outcomes[i]));
  results.Add(Said(99, 0, v1::STORE_STORED));  // Nobody asked for it.
  results.Add(Said(0, 7, v1::STORE_STORED));
  const StoreResult result = results.Take();
  for (const StoreBlockResult& block : result.blocks) {
    EXPECT_EQ(block.outcome, StoreOutcome::kFailed);
    EXPECT_TRUE(absl::IsInternal(block.status)) << block.status;
  }
  EXPECT_EQ(result.blocks_failed, std::size(outcomes));
  EXPECT_EQ(result.stored_bytes, 0u);
}

}  // namespace
}  // namespace kvmill
