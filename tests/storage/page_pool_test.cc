#include "storage/page_pool.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/slot_classes.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kArenaBytes = 8 * kMiB;  // One extent of generations, three for slots.

class PagePoolTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  void Open(std::uint64_t arenas, std::uint64_t arena_bytes = kArenaBytes) {
    PagePool::Options options;
    options.capacity_bytes = arenas * arena_bytes;
    options.arena_bytes = arena_bytes;
    options.prefault = false;
    auto pool = PagePool::Create(options);
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
  }
  std::vector<SlotRef> Acquire(std::size_t slot_bytes, std::size_t count, TenantId tenant = 1) {
    std::vector<SlotRef> slots;
    const absl::Status status = pool_->Acquire(tenant, slot_bytes, count, &slots);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(slots.size(), count);
    return slots;
  }
  absl::Status TryAcquire(std::size_t slot_bytes, std::size_t count, TenantId tenant = 1) {
    std::vector<SlotRef> slots;
    const absl::Status status = pool_->Acquire(tenant, slot_bytes, count, &slots);
    if (!status.ok()) {
      EXPECT_TRUE(slots.empty()) << "all or none";
    }
    Release(slots);
    return status;
  }
  void Release(const std::vector<SlotRef>& slots) {
    for (SlotRef slot : slots) pool_->Release(slot);
  }
  void Fill(SlotRef slot, int byte) {
    std::memset(pool_->Bytes(slot).data(), byte, pool_->Bytes(slot).size());
  }
  ino_t ArenaInode(std::uint32_t arena) {
    struct stat info {};
    EXPECT_EQ(fstat(pool_->ArenaFd(arena), &info), 0);
    return info.st_ino;
  }
  void ExpectEmpty() {
    const PagePool::Stats stats = pool_->stats();
    EXPECT_EQ(stats.used_bytes, 0u);
    EXPECT_EQ(stats.slots_used, 0u);
    EXPECT_EQ(stats.extents_free, stats.capacity_bytes / kExtentBytes);
  }

  std::unique_ptr<PagePool> pool_;
};

TEST_F(PagePoolTest, RefusesBadOptionsNamingValueAndLimit) {
  const struct {
    std::uint64_t capacity_bytes, arena_bytes;
    const char* message;
  } cases[] = {
      {0, kArenaBytes, "capacity_bytes 0: want at least one arena, 8388608"},
      {kArenaBytes - 1, kArenaBytes, "capacity_bytes 8388607"},
      {kArenaBytes, 0, "arena_bytes 0: want a multiple of 2097152 from 4194304"},
      {kArenaBytes, 2 * kMiB, "arena_bytes 2097152"},
      {kArenaBytes, 5 * kMiB, "arena_bytes 5242880"},
      {std::uint64_t{1} << 40, std::uint64_t{32} << 30, "to 17179869184"},
      {~std::uint64_t{0}, kArenaBytes, "capacity_bytes 18446744073709551615"},
  };
  for (const auto& c : cases) {
    PagePool::Options options;
    options.capacity_bytes = c.capacity_bytes;
    options.arena_bytes = c.arena_bytes;
    options.prefault = false;
    const absl::Status status = PagePool::Create(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
}

TEST_F(PagePoolTest, RefusesMoreMemoryThanTheMachineHasBeforeTakingAny) {
  PagePool::Options options;
  options.capacity_bytes = std::uint64_t{1} << 50;
  const absl::Status status = PagePool::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::ContainsRegex("1125899906842624 bytes: only [0-9]+ bytes"));
}

TEST_F(PagePoolTest, NamesTheLimitOfOpenFiles) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit low = old;
  low.rlim_cur = 12;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  PagePool::Options options;
  options.capacity_bytes = 16 * kArenaBytes;
  options.arena_bytes = kArenaBytes;
  options.prefault = false;
  const absl::Status status = PagePool::Create(options).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("open files"));
}

TEST_F(PagePoolTest, CapacityIsRoundedDownToArenasAndLeavesOutGenerations) {
  PagePool::Options options;
  options.capacity_bytes = 2 * kArenaBytes + kArenaBytes / 2;
  options.arena_bytes = kArenaBytes;
  options.prefault = false;
  auto pool = PagePool::Create(options);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ((*pool)->stats().capacity_bytes, 2 * 3 * kExtentBytes);
  EXPECT_EQ((*pool)->stats().extents_free, 6u);
}

TEST_F(PagePoolTest, PrefaultAllocatesEverythingAndReportsProgress) {
  PagePool::Options options;
  options.capacity_bytes = 12 * kArenaBytes;
  options.arena_bytes = 3 * kArenaBytes;
  std::uint64_t last_done = 0;
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_EQ(total, 12 * kArenaBytes);
    EXPECT_GE(done, last_done);
    last_done = done;
  };
  auto pool = PagePool::Create(options);
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(last_done, 12 * kArenaBytes);
  for (std::uint32_t arena = 0; arena < 4; ++arena) {
    struct stat info {};
    ASSERT_EQ(fstat((*pool)->ArenaFd(arena), &info), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(info.st_blocks) * 512, 3 * kArenaBytes);
  }
}

// A process that was given an arena's descriptor tries everything to change the arena.
TEST_F(PagePoolTest, ArenaCannotBeChangedThroughItsDescriptor) {
  Open(1);
  const SlotRef slot = Acquire(4096, 1)[0];
  Fill(slot, 0x5A);
  const PagePool::Location where = pool_->Locate(slot);
  const int given = pool_->ArenaFd(where.arena);
  const int reopened = open(absl::StrCat("/proc/self/fd/", given).c_str(), O_RDWR | O_CLOEXEC);
  std::vector<int> fds = {given};
  if (reopened >= 0) fds.push_back(reopened);
  for (int fd : fds) {
    const char byte = 'x';
    EXPECT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(where.offset_bytes)), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(ftruncate(fd, 0), -1);
    EXPECT_EQ(ftruncate(fd, 2 * kArenaBytes), -1);
    EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kExtentBytes), -1);
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);

    void* mapped = mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    EXPECT_EQ(static_cast<unsigned char*>(mapped)[where.offset_bytes], 0x5A);
    EXPECT_EQ(mprotect(mapped, kArenaBytes, PROT_READ | PROT_WRITE), -1);
    EXPECT_EQ(errno, EACCES);
    munmap(mapped, kArenaBytes);
  }
  // The pool itself still can.
  Fill(slot, 0xA5);
  EXPECT_EQ(pool_->Bytes(slot)[0], std::byte{0xA5});
  if (reopened >= 0) close(reopened);
}

TEST_F(PagePoolTest, SlotsHoldTheirBytesAndAreAligned) {
  Open(4, 32 * kMiB);
  for (std::size_t bytes :
       {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{65}, std::size_t{1023},
        std::size_t{1024}, std::size_t{1025}, std::size_t{110912}, kExtentBytes / 2,
        kExtentBytes / 2 + 1, kExtentBytes - 1, kExtentBytes, kExtentBytes + 1, 3 * kExtentBytes,
        15 * kExtentBytes}) {
    const std::vector<SlotRef> slots = Acquire(bytes, 2);
    for (SlotRef slot : slots) {
      const auto span = pool_->Bytes(slot);
      EXPECT_GE(span.size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(span.data()) % 64, 0u);
    }
    Fill(slots[0], 1);
    Fill(slots[1], 2);
    EXPECT_EQ(pool_->Bytes(slots[0]).back(), std::byte{1});
    Release(slots);
    ExpectEmpty();
  }
}

TEST_F(PagePoolTest, EverySizeFitsItsClassAndWastesLittle) {
  for (std::size_t bytes = 64; bytes <= kExtentBytes; bytes += 64) {
    const std::uint32_t slot_class = SlotClassOf(bytes, kSlotsPerExtentMax);
    ASSERT_LT(slot_class, kSlotClassCount);
    ASSERT_GE(SlotStrideBytes(slot_class), bytes);
    ASSERT_LE(SlotsPerExtent(slot_class) * SlotStrideBytes(slot_class), kExtentBytes);
    const std::size_t fit = std::min<std::size_t>(kExtentBytes / bytes, kSlotsPerExtentMax);
    ASSERT_GE(SlotsPerExtent(slot_class) * 17, fit * 16) << bytes;
    if (fit <= 32) {
      ASSERT_EQ(SlotsPerExtent(slot_class), fit) << bytes;
    }
  }
}

TEST_F(PagePoolTest, RefusesWhatCouldNeverFit) {
  Open(2);
  EXPECT_EQ(TryAcquire(0, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TryAcquire(3 * kExtentBytes + 1, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TryAcquire(kExtentBytes, 7).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TryAcquire(2 * kExtentBytes, 3).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TryAcquire(~std::size_t{0}, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TryAcquire(64, ~std::size_t{0} / 16).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(TryAcquire(64, 0).ok());
  EXPECT_TRUE(TryAcquire(kExtentBytes, 6).ok());
  EXPECT_TRUE(TryAcquire(2 * kExtentBytes, 2).ok());
  ExpectEmpty();
}

TEST_F(PagePoolTest, AcquireTakesAllOrNone) {
  Open(1);
  const std::vector<SlotRef> most = Acquire(kExtentBytes / 2, 5);
  const PagePool::Stats before = pool_->stats();
  const absl::Status status = TryAcquire(kExtentBytes / 2, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 slots of 1048576 bytes"));
  EXPECT_EQ(pool_->stats().used_bytes, before.used_bytes);
  EXPECT_EQ(pool_->stats().slots_used, 5u);
  EXPECT_TRUE(TryAcquire(kExtentBytes / 2, 1).ok());
  Release(most);
  ExpectEmpty();
}

TEST_F(PagePoolTest, WholePoolCanBeUsedToTheLastSlotInAnyOrder) {
  Open(3);
  const std::size_t bytes = kExtentBytes / 18 - 64;
  std::vector<SlotRef> all;
  std::set<std::byte*> addresses;
  for (std::size_t taken = 0; taken < 9 * 18;) {
    const std::size_t count = std::min<std::size_t>(9 * 18 - taken, 7);
    for (SlotRef slot : Acquire(bytes, count)) {
      all.push_back(slot);
      EXPECT_TRUE(addresses.insert(pool_->Bytes(slot).data()).second);
    }
    taken += count;
  }
  EXPECT_EQ(TryAcquire(bytes, 1).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_->stats().extents_free, 0u);
  std::shuffle(all.begin(), all.end(), std::mt19937_64(1));
  Release(all);
  ExpectEmpty();
}

TEST_F(PagePoolTest, SlotsOfABlockAreAdjacent) {
  Open(1, 64 * kMiB);
  const std::size_t bytes = 110912;  // 18 an extent.
  const std::vector<SlotRef> block = Acquire(bytes, 36);
  EXPECT_EQ(block.back().extent, block.front().extent + 1);
  for (std::size_t i = 1; i < block.size(); ++i) {
    const std::size_t distance =
        static_cast<std::size_t>(pool_->Bytes(block[i]).data() - pool_->Bytes(block[i - 1]).data());
    EXPECT_GE(distance, pool_->Bytes(block[i - 1]).size());
    EXPECT_LT(distance, 2 * pool_->Bytes(block[i - 1]).size());
  }
  // Smaller blocks share an extent; a hole of the right size is used again.
  const std::vector<SlotRef> a = Acquire(bytes, 5);
  const std::vector<SlotRef> b = Acquire(bytes, 5);
  const std::vector<SlotRef> c = Acquire(bytes, 5);
  EXPECT_EQ(a[0].extent, c[4].extent);
  Release(b);
  EXPECT_EQ(Acquire(bytes, 5), b);
}

TEST_F(PagePoolTest, EmptyExtentsServeOtherSizes) {
  Open(1);
  const std::vector<SlotRef> small = Acquire(kExtentBytes / 4, 12);
  EXPECT_EQ(TryAcquire(kExtentBytes, 1).code(), absl::StatusCode::kResourceExhausted);
  for (std::size_t i = 4; i < 8; ++i) pool_->Release(small[i]);
  EXPECT_TRUE(TryAcquire(kExtentBytes, 1).ok());
  EXPECT_EQ(TryAcquire(2 * kExtentBytes, 1).code(), absl::StatusCode::kResourceExhausted);
  for (std::size_t i = 8; i < 12; ++i) pool_->Release(small[i]);
  EXPECT_TRUE(TryAcquire(2 * kExtentBytes, 1).ok());
  EXPECT_TRUE(TryAcquire(kExtentBytes + 1, 1).ok());
}

TEST_F(PagePoolTest, TenantsNeverShareAnArena) {
  Open(2);
  const std::vector<SlotRef> one = Acquire(4096, 1, 1);
  const std::vector<SlotRef> two = Acquire(4096, 1, 2);
  EXPECT_NE(pool_->Locate(one[0]).arena, pool_->Locate(two[0]).arena);
  EXPECT_EQ(TryAcquire(4096, 1, 3).code(), absl::StatusCode::kResourceExhausted);
  Release(one);
  EXPECT_TRUE(TryAcquire(4096, 1, 3).ok());
  Release(two);
  ExpectEmpty();
}

// An old client keeps its mapping of tenant 1's arena while the arena goes to tenant 2.
TEST_F(PagePoolTest, ArenaThatChangesItsTenantIsFreshMemory) {
  Open(1);
  const std::vector<SlotRef> secret = Acquire(kExtentBytes, 3, 1);
  for (SlotRef slot : secret) {
    Fill(slot, 0x77);
    pool_->Publish(slot);
  }
  const PagePool::Location where = pool_->Locate(secret[1]);
  const ino_t inode = ArenaInode(0);
  const auto* old_client = static_cast<const unsigned char*>(
      mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, pool_->ArenaFd(0), 0));
  ASSERT_NE(old_client, MAP_FAILED);
  Release(secret);

  const std::vector<SlotRef> slots = Acquire(kExtentBytes, 3, 2);
  EXPECT_NE(ArenaInode(0), inode);
  EXPECT_NE(pool_->Locate(slots[0]).arena_epoch, where.arena_epoch);
  for (SlotRef slot : slots) {
    const auto bytes = pool_->Bytes(slot);
    EXPECT_TRUE(
        std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; }));
    Fill(slot, 0x22);
    pool_->Publish(slot);
  }
  EXPECT_EQ(old_client[where.offset_bytes], 0x77);
  std::uint64_t old_generation = 0;
  std::memcpy(&old_generation, old_client + where.generation_offset_bytes, sizeof(old_generation));
  EXPECT_EQ(old_generation % 2, 1u) << "a late reader must not take the old bytes for whole";
  Release(slots);
  munmap(const_cast<unsigned char*>(old_client), kArenaBytes);
}

TEST_F(PagePoolTest, ArenaThatReturnsToItsTenantKeepsItsMemory) {
  Open(1);
  Release(Acquire(4096, 1, 1));
  const ino_t inode = ArenaInode(0);
  Release(Acquire(4096, 1, 1));
  EXPECT_EQ(ArenaInode(0), inode);
  Release(Acquire(4096, 1, 2));
  EXPECT_NE(ArenaInode(0), inode);
}

TEST_F(PagePoolTest, ArenaThatNobodyMappedIsZeroedForItsNextTenant) {
  Open(1);
  const std::vector<SlotRef> secret = Acquire(kExtentBytes, 3, 1);
  for (SlotRef slot : secret) Fill(slot, 0x77);
  pool_->Publish(secret[0]);
  const std::uint64_t generation = pool_->Generation(secret[0]);
  Release(secret);
  const SlotRef slot = Acquire(4096, 1, 2)[0];
  // Not only what tenant 2 holds: it may map the whole arena now.
  const auto* arena = static_cast<const std::byte*>(
      mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, pool_->ArenaFd(0), 0));
  ASSERT_NE(arena, MAP_FAILED);
  EXPECT_TRUE(std::all_of(arena + kExtentBytes, arena + kArenaBytes,
                          [](std::byte b) { return b == std::byte{}; }));
  EXPECT_GT(pool_->Generation(slot), generation);
  munmap(const_cast<std::byte*>(arena), kArenaBytes);
}

TEST_F(PagePoolTest, FreshMemoryIsSealedAndPrefaultedToo) {
  PagePool::Options options;
  options.capacity_bytes = options.arena_bytes = kArenaBytes;
  auto pool = PagePool::Create(options);
  ASSERT_TRUE(pool.ok());
  pool_ = *std::move(pool);
  Release(Acquire(4096, 1, 1));
  const ino_t inode = ArenaInode(0);
  Release(Acquire(4096, 1, 2));
  ASSERT_NE(ArenaInode(0), inode);
  struct stat info {};
  ASSERT_EQ(fstat(pool_->ArenaFd(0), &info), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(info.st_blocks) * 512, kArenaBytes);
  EXPECT_EQ(fcntl(pool_->ArenaFd(0), F_GET_SEALS),
            F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

TEST_F(PagePoolTest, GenerationIsOddWhileWrittenEvenWhileWholeAndNeverRepeats) {
  Open(1);
  std::set<std::uint64_t> seen;
  for (int round = 0; round < 100; ++round) {
    const SlotRef slot = Acquire(4096, 1)[0];
    ASSERT_EQ(slot, (SlotRef{1, 0})) << "the test needs the same slot again";
    EXPECT_EQ(pool_->Generation(slot) % 2, 1u);
    if (round % 3 != 0) {
      pool_->Publish(slot);
      EXPECT_EQ(pool_->Generation(slot) % 2, 0u);
      EXPECT_TRUE(seen.insert(pool_->Generation(slot)).second);
    }
    Release({slot});
  }
}

// The slot's place in the generation extent must not be shared with another slot, whatever sizes
// its extent had.
TEST_F(PagePoolTest, GenerationsOfAllSlotsLieApart) {
  for (std::uint64_t arena_bytes : {4 * kMiB, 32 * kMiB, 1024 * kMiB}) {
    Open(1, arena_bytes);
    const std::size_t count = 3 * SlotsPerExtent(SlotClassOf(1, kSlotsPerExtentMax)) / 2;
    std::set<std::uint64_t> offsets;
    std::vector<SlotRef> slots;
    ASSERT_TRUE(pool_->Acquire(1, 1, std::min<std::size_t>(count, 600), &slots).ok());
    for (SlotRef slot : slots) {
      const PagePool::Location where = pool_->Locate(slot);
      EXPECT_LE(where.generation_offset_bytes + 8, kExtentBytes);
      EXPECT_GE(where.offset_bytes, kExtentBytes);
      EXPECT_EQ(where.generation_offset_bytes % 8, 0u);
      EXPECT_TRUE(offsets.insert(where.generation_offset_bytes).second);
    }
  }
}

TEST_F(PagePoolTest, ReaderThatIsOvertakenNotices) {
  Open(1);
  const SlotRef slot = Acquire(4096, 1)[0];
  Fill(slot, 1);
  pool_->Publish(slot);
  const PagePool::Location where = pool_->Locate(slot);
  const auto* arena = static_cast<const std::byte*>(
      mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, pool_->ArenaFd(where.arena), 0));
  ASSERT_NE(arena, MAP_FAILED);
  const auto generation = [&] {
    std::uint64_t value = 0;
    std::memcpy(&value, arena + where.generation_offset_bytes, sizeof(value));
    return value;
  };
  const std::uint64_t before = generation();
  EXPECT_EQ(before % 2, 0u);
  EXPECT_EQ(arena[where.offset_bytes], std::byte{1});
  Release({slot});
  EXPECT_NE(generation(), before);
  // Reused by a smaller slot class: the same bytes under another slot.
  const SlotRef reused = Acquire(2048, 1)[0];
  Fill(reused, 2);
  pool_->Publish(reused);
  EXPECT_EQ(arena[where.offset_bytes], std::byte{2}) << "the test needs the bytes to be reused";
  EXPECT_NE(generation(), before);
  munmap(const_cast<std::byte*>(arena), kArenaBytes);
}

using PagePoolDeathTest = PagePoolTest;

TEST_F(PagePoolDeathTest, MisuseFailsACheck) {
  Open(1);
  const SlotRef slot = Acquire(4096, 2)[0];
  EXPECT_DEATH(pool_->Release(SlotRef{}), "IsUsed");
  EXPECT_DEATH(pool_->Release(SlotRef{slot.extent, 77}), "IsUsed");
  EXPECT_DEATH(pool_->Release(SlotRef{99, 0}), "IsUsed");
  EXPECT_DEATH(pool_->Release(SlotRef{slot.extent, 1u << 30}), "IsUsed");
  pool_->Publish(slot);
  EXPECT_DEATH(pool_->Publish(slot), "generation % 2 == 1");
  pool_->Release(slot);
  EXPECT_DEATH(pool_->Release(slot), "IsUsed");
  EXPECT_DEATH(pool_->Publish(slot), "IsUsed");
  EXPECT_DEATH(pool_->Bytes(slot), "IsUsed");
  EXPECT_DEATH(pool_->ArenaFd(1), "arena <");
}

}  // namespace
}  // namespace kvmill
