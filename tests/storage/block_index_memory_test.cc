// What the index says that it takes, and what the process really grows by. A program of its own:
// other tests' freed memory would hide growth.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "storage/block_index.h"
#include "storage/eviction/policy.h"

namespace kvmill {
namespace {

constexpr std::uint32_t kBlocks = 1'000'000;
constexpr std::uint64_t kBudgetBytes = 192;  // A block, with the policy's share.
constexpr std::uint64_t kPageBudgetBytes = 16;

std::uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t total_pages = 0;
  std::uint64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

BlockId IdOf(std::uint32_t n, std::size_t key_bytes) {
  std::string bytes(key_bytes, 'k');
  std::memcpy(bytes.data(), &n, sizeof(n));
  return {1, 0, *BlockKey::FromBytes(bytes)};
}

struct Growth {
  std::uint64_t resident_bytes = 0;
  std::uint64_t claimed_bytes = 0;  // metadata_bytes() and the policy's.
};

Growth Fill(std::uint64_t page_count, std::size_t key_bytes) {
  const std::uint64_t before = ResidentBytes();
  const std::unique_ptr<BlockIndex> index =
      *BlockIndex::Create({.entries_max = kBlocks, .keeps_links = true});
  const std::unique_ptr<EvictionPolicy> policy = *CreateEvictionPolicy(
      kDefaultEvictionPolicy, {.entries_max = index->ids_max(), .capacity_blocks = kBlocks});
  for (std::uint32_t n = 0; n < kBlocks; ++n) {
    const BlockId id = IdOf(n, key_bytes);
    const absl::StatusOr<EntryId> entry =
        index->Insert(id, page_count, [](BlockEntry& e) { e.flags = kInHost; });
    EXPECT_TRUE(entry.ok()) << entry.status();
    if (!entry.ok()) return {};
    policy->Insert(*entry, {.key_hash = HashOf(id)});
  }
  return {ResidentBytes() - before,
          index->metadata_bytes() + policy->bytes_per_entry() * index->ids_max()};
}

// A child process each, so that every case starts from fresh memory.
void ExpectWithinBudget(std::uint64_t page_count, std::size_t key_bytes, std::uint64_t budget) {
  EXPECT_EXIT(
      {
        const Growth growth = Fill(page_count, key_bytes);
        const double resident = static_cast<double>(growth.resident_bytes);
        const double claimed = static_cast<double>(growth.claimed_bytes);
        std::fprintf(stderr, "%zu-byte keys, %zu pages: %.1f bytes a block resident, %.1f claimed",
                     key_bytes, static_cast<std::size_t>(page_count), resident / kBlocks,
                     claimed / kBlocks);
        const bool within = growth.resident_bytes <= budget * kBlocks;
        // The allocator's headers and rounding, and pages that are not full yet.
        const bool honest = resident <= claimed * 1.03 && resident >= claimed * 0.97;
        std::_Exit(within && honest ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(BlockIndexMemoryTest, MillionBlocksGrowTheProcessByWhatIsClaimedAndByNoMoreThanTheBudget) {
  GTEST_FLAG_SET(death_test_style, "fast");
  ExpectWithinBudget(36, 32, kBudgetBytes + 36 * kPageBudgetBytes);
  ExpectWithinBudget(1, 16, kBudgetBytes + kPageBudgetBytes);
  ExpectWithinBudget(36, 64, kBudgetBytes + 36 * kPageBudgetBytes);
}

}  // namespace
}  // namespace kvmill
