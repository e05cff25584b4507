// Changed, odd and unchanged generations, over more checks than a grid has threads.
#include "kernels/generation_check.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cuda_harness/harness.h"

namespace kvmill {
namespace {

using cuda_harness::Harness;

// Returns what the reference and the CUDA kernel count for the words of `now`, read at `before`.
void ExpectChanged(const std::vector<std::uint64_t>& before, const std::vector<std::uint64_t>& now,
                   std::uint32_t want) {
  Harness harness;
  const auto words = harness.Copy(absl::MakeConstSpan(now), "words");
  std::vector<GenerationCheck> checks;
  for (std::size_t i = 0; i < now.size(); ++i) checks.push_back({&words[i], before[i]});
  std::uint32_t changed = 0;
  CheckGenerationsReference(checks.data(), checks.size(), &changed);
  EXPECT_EQ(changed, want);

  const auto device_checks = harness.Copy(absl::MakeConstSpan(checks), "checks");
  const auto device_changed = harness.Allocate<std::uint32_t>(1, "changed");
  absl::Status status =
      CheckGenerationsCuda(device_checks.data(), checks.size(), device_changed.data(), nullptr);
  status.Update(harness.Finish());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(device_changed[0], want);
}

TEST(GenerationCheckTest, CountsWhatChangedOrIsBeingWritten) {
  ExpectChanged({2, 4, 6, 8}, {2, 4, 6, 8}, 0);
  ExpectChanged({2, 4, 6, 8}, {2, 6, 6, 9}, 2);
  ExpectChanged({3}, {3}, 1);  // Odd before and after: it was never there.
  ExpectChanged({2}, {std::uint64_t{1} << 32 | 2}, 1);
  ExpectChanged({}, {}, 0);
}

TEST(GenerationCheckTest, TakesMoreChecksThanTheGridHasThreads) {
  const std::size_t count = 1024 * 128 + 77;
  std::vector<std::uint64_t> before(count, 10);
  std::vector<std::uint64_t> now = before;
  now.front() = now.back() = now[count / 2] = 12;
  ExpectChanged(before, now, 3);
}

}  // namespace
}  // namespace kvmill
