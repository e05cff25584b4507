// Page pools in a device's memory that the CPU cannot touch, and arenas that are pinned for one.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "storage/page_pool.h"
#include "tests/storage/hidden_device.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kArenaBytes = std::uint64_t{8} << 20;

class PagePoolDeviceTest : public testing::Test {
 protected:
  void Open(std::uint64_t arenas) {
    PagePool::Options options;
    options.capacity_bytes = arenas * kArenaBytes;
    options.arena_bytes = kArenaBytes;
    options.prefault = false;
    options.device = &device_;
    auto pool = PagePool::Create(options);
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
  }
  std::vector<SlotRef> Take(TenantId tenant, std::size_t bytes, std::size_t count) {
    std::vector<SlotRef> slots;
    const absl::Status acquired = pool_->Acquire(tenant, bytes, count, &slots);
    EXPECT_TRUE(acquired.ok()) << acquired;
    return slots;
  }
  // The 64-bit word at an offset in a descriptor's memory.
  static std::uint64_t WordIn(int fd, std::uint64_t offset_bytes) {
    std::uint64_t word = 0;
    EXPECT_EQ(pread(fd, &word, sizeof(word), static_cast<off_t>(offset_bytes)),
              static_cast<ssize_t>(sizeof(word)));
    return word;
  }

  HiddenDevice device_;
  std::unique_ptr<PagePool> pool_;
};

TEST_F(PagePoolDeviceTest, SlotsLieInTheDevicesMemoryAndGenerationsInTheHosts) {
  Open(2);
  EXPECT_EQ(device_.allocations, 2);
  EXPECT_EQ(pool_->stats().capacity_bytes, 2 * (kArenaBytes - kExtentBytes));
  for (const std::size_t bytes : {std::size_t{5000}, std::size_t{3} << 20}) {
    const std::vector<SlotRef> slots = Take(1, bytes, 2);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const absl::Span<std::byte> at = pool_->Bytes(slots[i]);
      ASSERT_GE(at.size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at.data()) % 64, 0u);
      // The last byte, too, is the device's.
      ASSERT_NE(device_.Real(at.data()), nullptr);
      ASSERT_EQ(device_.Real(at.data() + at.size() - 1), device_.Real(at.data()) + at.size() - 1);
      const std::uint64_t mark = 0x1234567800 + i;
      std::memcpy(device_.Real(at.data()), &mark, sizeof(mark));

      // What a reader in another process would see.
      const PagePool::Location where = pool_->Locate(slots[i]);
      const int arena = pool_->ArenaFd(where.arena);
      const int generations = pool_->GenerationFd(where.arena);
      ASSERT_NE(arena, generations);
      EXPECT_EQ(WordIn(arena, where.offset_bytes), mark);
      EXPECT_EQ(WordIn(generations, where.generation_offset_bytes) % 2, 1u);
      pool_->Publish(slots[i]);
      EXPECT_EQ(WordIn(generations, where.generation_offset_bytes), pool_->Generation(slots[i]));
      EXPECT_EQ(pool_->Generation(slots[i]) % 2, 0u);
      EXPECT_EQ(fcntl(generations, F_GET_SEALS) & F_SEAL_FUTURE_WRITE, F_SEAL_FUTURE_WRITE);
      EXPECT_EQ(mmap(nullptr, kExtentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, generations, 0),
                MAP_FAILED);
      pool_->Release(slots[i]);
      EXPECT_EQ(WordIn(generations, where.generation_offset_bytes) % 2, 1u);
    }
  }
  EXPECT_EQ(pool_->stats().used_bytes, 0u);
}

TEST_F(PagePoolDeviceTest, AllOfTheCapacityCanBeUsed) {
  Open(2);
  const std::vector<SlotRef> slots = Take(1, kExtentBytes, 2 * (kArenaBytes / kExtentBytes - 1));
  EXPECT_EQ(pool_->stats().used_bytes, pool_->stats().capacity_bytes);
  std::vector<SlotRef> more;
  EXPECT_EQ(pool_->Acquire(1, 1000, 1, &more).code(), absl::StatusCode::kResourceExhausted);
  for (SlotRef slot : slots) {
    std::memset(device_.Real(pool_->Bytes(slot).data()), 7, kExtentBytes);
    pool_->Release(slot);
  }
}

TEST_F(PagePoolDeviceTest, AnotherTenantGetsFreshMemoryAndGenerationsOfItsOwn) {
  Open(1);
  const SlotRef first = Take(1, 5000, 1)[0];
  const PagePool::Location where = pool_->Locate(first);
  std::memset(device_.Real(pool_->Bytes(first).data()), 7, 5000);
  pool_->Publish(first);
  // A reader of the first tenant's keeps what it mapped.
  const int generations = dup(pool_->GenerationFd(where.arena));
  const std::uint64_t seen = WordIn(generations, where.generation_offset_bytes);
  std::vector<SlotRef> none;
  EXPECT_EQ(pool_->Acquire(2, 5000, 1, &none).code(), absl::StatusCode::kResourceExhausted)
      << "an arena has one tenant";
  pool_->Release(first);
  const std::uint64_t released = WordIn(generations, where.generation_offset_bytes);
  EXPECT_EQ(released % 2, 1u);
  EXPECT_GT(released, seen);

  const SlotRef second = Take(2, 5000, 1)[0];
  EXPECT_EQ(device_.allocations, 2);
  const std::byte* bytes = device_.Real(pool_->Bytes(second).data());
  ASSERT_NE(bytes, nullptr);
  for (std::size_t i = 0; i < 5000; ++i) ASSERT_EQ(bytes[i], std::byte{0}) << i;
  pool_->Publish(second);
  EXPECT_EQ(WordIn(generations, where.generation_offset_bytes), released)
      << "the first tenant's reader sees nothing of the second";
  close(generations);
}

TEST_F(PagePoolDeviceTest, ArenaWithoutFreshMemoryIsTriedAgainLater) {
  Open(1);
  pool_->Release(Take(1, 5000, 1)[0]);
  device_.no_memory = true;
  std::vector<SlotRef> slots;
  EXPECT_EQ(pool_->Acquire(2, 5000, 1, &slots).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(slots.empty());
  device_.no_memory = false;
  const SlotRef slot = Take(2, 5000, 1)[0];
  EXPECT_NE(device_.Real(pool_->Bytes(slot).data()), nullptr);
}

TEST_F(PagePoolDeviceTest, ArenasOfHostMemoryArePinnedAlsoAfterTheyWereRenewed) {
  PagePool::Options options;
  options.capacity_bytes = 2 * kArenaBytes;
  options.arena_bytes = kArenaBytes;
  options.prefault = false;
  options.pin_for = &device_;
  {
    auto pool = PagePool::Create(options);
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    EXPECT_EQ(device_.pinned_ranges(), 2u);
    EXPECT_EQ(device_.allocations, 0);
    // Both arenas pass from one tenant to another after their descriptors were handed out.
    for (const SlotRef slot : Take(1, kArenaBytes - kExtentBytes, 2)) {
      EXPECT_GE(pool_->ArenaFd(pool_->Locate(slot).arena), 0);
      EXPECT_EQ(pool_->ArenaFd(pool_->Locate(slot).arena),
                pool_->GenerationFd(pool_->Locate(slot).arena));
      pool_->Release(slot);
    }
    const std::vector<SlotRef> slots = Take(2, kArenaBytes - kExtentBytes, 2);
    EXPECT_EQ(device_.pinned_ranges(), 2u);
    for (const SlotRef slot : slots) std::memset(pool_->Bytes(slot).data(), 1, kExtentBytes);
  }
  pool_ = nullptr;
  EXPECT_EQ(device_.pinned_ranges(), 0u);
}

}  // namespace
}  // namespace kvmill
