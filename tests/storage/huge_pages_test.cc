// Huge pages under the page pool, as the kernel accounts for them.
#include "storage/huge_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "storage/page_pool.h"
#include "tests/storage/huge_memory.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using testing::HugeBytesAt;

constexpr std::uint64_t kArenaBytes = 4 * kExtentBytes;
constexpr std::uint64_t kPoolBytes = 2 * kArenaBytes;

absl::StatusOr<std::unique_ptr<PagePool>> Open(HugePages huge_pages) {
  PagePool::Options options;
  options.capacity_bytes = kPoolBytes;
  options.arena_bytes = kArenaBytes;
  options.huge_pages = huge_pages;
  return PagePool::Create(options);
}

// Everything that tenant can have in one arena, and where it begins.
std::byte* Fill(PagePool& pool, TenantId tenant, std::vector<SlotRef>* slots) {
  EXPECT_TRUE(pool.Acquire(tenant, kExtentBytes, 3, slots).ok());
  std::byte* begin = pool.Bytes(slots->back()).data();
  for (const SlotRef slot : *slots) begin = std::min(begin, pool.Bytes(slot).data());
  return begin;
}

TEST(HugePagesTest, MemoryThatIsTouchedLiesInHugePages) {
  auto pool = Open(HugePages::kAuto);
  ASSERT_TRUE(pool.ok()) << pool.status();
  if ((*pool)->stats().huge_bytes == 0) {
    GTEST_SKIP() << "this kernel gives none: " << std::strerror((*pool)->stats().huge_error);
  }
  EXPECT_EQ((*pool)->stats().huge_bytes, kPoolBytes);
  EXPECT_EQ((*pool)->stats().memory_bytes, kPoolBytes);
  EXPECT_TRUE(Open(HugePages::kOn).ok());
  std::vector<SlotRef> slots;
  std::byte* begin = Fill(**pool, 1, &slots);
  EXPECT_EQ(HugeBytesAt(begin), kArenaBytes);
  const auto all_zero = [](absl::Span<const std::byte> bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; });
  };
  for (const SlotRef slot : slots) {
    EXPECT_TRUE(all_zero((*pool)->Bytes(slot)));
    EXPECT_EQ((*pool)->Generation(slot), 1u);
    std::memset((*pool)->Bytes(slot).data(), 1, kExtentBytes);
    (*pool)->Publish(slot);
  }
  // A reader has it; then another tenant takes the arena, which gets other memory.
  EXPECT_GE((*pool)->ArenaFd((*pool)->Locate(slots[0]).arena), 0);
  for (const SlotRef slot : slots) (*pool)->Release(slot);
  std::vector<SlotRef> first;
  std::vector<SlotRef> second;
  Fill(**pool, 2, &first);
  Fill(**pool, 2, &second);
  EXPECT_EQ((*pool)->stats().huge_bytes, kPoolBytes);
  EXPECT_EQ(HugeBytesAt(begin), kArenaBytes);
  for (const SlotRef slot : first) EXPECT_TRUE(all_zero((*pool)->Bytes(slot)));
  for (const SlotRef slot : second) EXPECT_TRUE(all_zero((*pool)->Bytes(slot)));
}

TEST(HugePagesTest, OffMeansSmallPages) {
  auto pool = Open(HugePages::kOff);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ((*pool)->stats().huge_bytes, 0u);
  if (testing::SharedMemoryIsHugeAnyway()) GTEST_SKIP() << "shmem_enabled gives huge pages unasked";
  std::vector<SlotRef> slots;
  EXPECT_EQ(HugeBytesAt(Fill(**pool, 1, &slots)), 0u);
}

// As of a kernel that has none to give.
TEST(HugePagesTest, WithoutHugePagesAutoTakesSmallOnesAndOnRefuses) {
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  auto pool = Open(HugePages::kAuto);
  const absl::Status refused = Open(HugePages::kOn).status();
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ((*pool)->stats().huge_bytes, 0u);
  EXPECT_NE((*pool)->stats().huge_error, 0);
  std::vector<SlotRef> slots;
  Fill(**pool, 1, &slots);
  for (const SlotRef slot : slots) std::memset((*pool)->Bytes(slot).data(), 1, kExtentBytes);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("0 of 8 huge pages"));
}

}  // namespace
}  // namespace kvmill
