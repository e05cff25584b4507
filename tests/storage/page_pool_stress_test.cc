// The page pool under threads: a shadow model of who has which bytes, and readers against reuse.
// Prints its seed; --seed=N repeats it.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "storage/core/mutex.h"
#include "storage/page_pool.h"
#include "tests/long_form.h"

namespace kvmill {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::uint64_t Seed() {
  for (const std::string& arg : ::testing::internal::GetArgvs()) {
    if (arg.rfind("--seed=", 0) == 0) return std::stoull(arg.substr(7));
  }
  return std::random_device{}();
}

std::unique_ptr<PagePool> Open(std::uint64_t arenas, std::uint64_t arena_bytes) {
  PagePool::Options options;
  options.capacity_bytes = arenas * arena_bytes;
  options.arena_bytes = arena_bytes;
  options.prefault = false;
  auto pool = PagePool::Create(options);
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

// Who has which bytes, kept beside the pool: a slot is in the model from after Acquire until before
// Release, so whatever is in it is truly held.
class Shadow {
 public:
  explicit Shadow(const PagePool& pool) : pool_(pool) {}

  void Add(TenantId tenant, SlotRef slot) {
    const auto bytes = pool_.Bytes(slot);
    const PagePool::Location where = pool_.Locate(slot);
    MutexLock lock(mu_);
    const auto next = held_.lower_bound(bytes.data());
    if (next != held_.end()) {
      ASSERT_LE(bytes.data() + bytes.size(), next->first) << "slots overlap";
    }
    if (next != held_.begin()) {
      ASSERT_LE(std::prev(next)->second, bytes.data()) << "slots overlap";
    }
    held_[bytes.data()] = bytes.data() + bytes.size();
    Arena& arena = arenas_[where.arena];
    ASSERT_TRUE(arena.slots == 0 || arena.tenant == tenant) << "tenants share an arena";
    arena.tenant = tenant;
    ++arena.slots;
    ASSERT_TRUE(generations_.insert({where.arena, where.generation_offset_bytes}).second)
        << "slots share a generation";
  }
  void Remove(SlotRef slot) {
    const PagePool::Location where = pool_.Locate(slot);
    MutexLock lock(mu_);
    ASSERT_EQ(held_.erase(pool_.Bytes(slot).data()), 1u);
    --arenas_[where.arena].slots;
    generations_.erase({where.arena, where.generation_offset_bytes});
  }

 private:
  struct Arena {
    TenantId tenant = 0;
    std::size_t slots = 0;
  };
  const PagePool& pool_;
  Mutex mu_;
  std::map<std::byte*, std::byte*> held_;
  std::map<std::uint32_t, Arena> arenas_;
  std::set<std::pair<std::uint32_t, std::uint64_t>> generations_;
};

// Threads take and return runs of slots of many sizes for several tenants, near and over capacity.
// Every slot carries its owner's stamp at both ends, so bytes given out twice are seen too.
TEST(PagePoolStress, NoSlotsOverlapAndEverythingReturns) {
  const std::uint64_t seed = Seed();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const std::unique_ptr<PagePool> pool = Open(6, 16 * kMiB);
  Shadow shadow(*pool);
  std::atomic<std::uint64_t> stamps{1};
  std::atomic<std::uint64_t> acquired{0};
  std::atomic<std::uint64_t> refused{0};
  const auto work = [&](std::uint64_t thread) {
    std::mt19937_64 random(seed * 31 + thread);
    constexpr std::size_t kSizes[] = {700,    4096,   30000,   110912,       110912,
                                      110912, 300000, 1200000, 2 * kMiB + 1, 5 * kMiB};
    struct Held {
      std::vector<SlotRef> slots;
      std::uint64_t stamp = 0;
    };
    std::vector<Held> held;
    const auto release = [&](std::size_t i) {
      for (SlotRef slot : held[i].slots) {
        const auto bytes = pool->Bytes(slot);
        std::uint64_t first = 0;
        std::uint64_t last = 0;
        std::memcpy(&first, bytes.data(), 8);
        std::memcpy(&last, bytes.data() + bytes.size() - 8, 8);
        ASSERT_EQ(first, held[i].stamp);
        ASSERT_EQ(last, held[i].stamp);
        shadow.Remove(slot);
        pool->Release(slot);
      }
      held[i] = std::move(held.back());
      held.pop_back();
    };
    const int rounds = ShortOrLong(1500, 50'000);
    for (int round = 0; round < rounds && !::testing::Test::HasFatalFailure(); ++round) {
      if (held.size() > 10 || (!held.empty() && random() % 2 == 0)) {
        release(random() % held.size());
        continue;
      }
      Held take;
      const TenantId tenant = static_cast<TenantId>(random() % 3);
      const std::size_t size = kSizes[random() % std::size(kSizes)];
      const std::size_t count = 1 + random() % (size > kMiB ? 3 : 40);
      const absl::Status status = pool->Acquire(tenant, size, count, &take.slots);
      if (!status.ok()) {
        ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
        ASSERT_TRUE(take.slots.empty());
        refused.fetch_add(1);
        continue;
      }
      ASSERT_EQ(take.slots.size(), count);
      acquired.fetch_add(1);
      take.stamp = stamps.fetch_add(1);
      for (SlotRef slot : take.slots) {
        shadow.Add(tenant, slot);
        ASSERT_EQ(pool->Generation(slot) % 2, 1u);
        const auto bytes = pool->Bytes(slot);
        ASSERT_GE(bytes.size(), size);
        std::memcpy(bytes.data(), &take.stamp, 8);
        std::memcpy(bytes.data() + bytes.size() - 8, &take.stamp, 8);
        if (random() % 2 == 0) pool->Publish(slot);
      }
      held.push_back(std::move(take));
    }
    while (!held.empty() && !::testing::Test::HasFatalFailure()) release(0);
  };
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(acquired.load(), 100u);
  EXPECT_GT(refused.load(), 0u) << "the test should reach capacity";
  const PagePool::Stats stats = pool->stats();
  EXPECT_EQ(stats.used_bytes, 0u);
  EXPECT_EQ(stats.slots_used, 0u);
  EXPECT_EQ(stats.extents_free, stats.capacity_bytes / kExtentBytes);
}

// Writers reuse a handful of slots as fast as they can; readers with a read-only mapping of their
// own follow the protocol of the header. Every 8 bytes of a slot hold the same number, so a read
// that the protocol calls whole must see that number everywhere.
TEST(PagePoolStress, ReadersNeverTakeTornBytesForWhole) {
  constexpr std::size_t kSlotBytes = 8192;
  constexpr std::size_t kWords = kSlotBytes / 8;
  constexpr std::uint64_t kArenaBytes = 4 * kMiB;
  const std::unique_ptr<PagePool> pool = Open(1, kArenaBytes);
  const auto* arena = static_cast<std::byte*>(
      mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, pool->ArenaFd(0), 0));
  ASSERT_NE(arena, MAP_FAILED);

  struct Notice {  // Of a published slot: where it is and what it holds.
    PagePool::Location where;
    std::uint64_t generation = 0;
    std::uint64_t value = 0;
  };
  Mutex mu;
  std::vector<Notice> notices(4);
  std::atomic<std::uint64_t> values{1};
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> whole{0};
  std::atomic<std::uint64_t> overtaken{0};

  const auto write = [&](std::size_t place) {
    std::vector<SlotRef> slots;
    while (!stop.load()) {
      slots.clear();
      ASSERT_TRUE(pool->Acquire(1, kSlotBytes, 1, &slots).ok());
      const std::uint64_t value = values.fetch_add(1);
      auto* words = reinterpret_cast<std::uint64_t*>(pool->Bytes(slots[0]).data());
      for (std::size_t i = 0; i < kWords; ++i) {
        std::atomic_ref<std::uint64_t>(words[i]).store(value, std::memory_order_relaxed);
      }
      pool->Publish(slots[0]);
      {
        MutexLock lock(mu);
        notices[place] = {pool->Locate(slots[0]), pool->Generation(slots[0]), value};
      }
      std::this_thread::yield();
      pool->Release(slots[0]);
    }
  };
  const auto word_at = [&](std::uint64_t offset) {
    // Acquire, so that the second look at the generation stays behind the bytes; a plain copy needs
    // a fence there.
    return std::atomic_ref<std::uint64_t>(
               *const_cast<std::uint64_t*>(reinterpret_cast<const std::uint64_t*>(arena + offset)))
        .load(std::memory_order_acquire);
  };
  const auto read = [&](std::uint64_t thread) {
    std::mt19937_64 random(thread);
    std::vector<std::uint64_t> copy(kWords);
    while (!stop.load()) {
      Notice notice;
      {
        MutexLock lock(mu);
        notice = notices[random() % notices.size()];
      }
      if (notice.value == 0) continue;
      const std::uint64_t before = word_at(notice.where.generation_offset_bytes);
      for (std::size_t i = 0; i < kWords; ++i) copy[i] = word_at(notice.where.offset_bytes + 8 * i);
      const std::uint64_t after = word_at(notice.where.generation_offset_bytes);
      if (before != notice.generation || after != before) {
        overtaken.fetch_add(1);
        continue;
      }
      whole.fetch_add(1);
      for (std::uint64_t word : copy) ASSERT_EQ(word, notice.value);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < notices.size(); ++i) threads.emplace_back(write, i);
  for (std::uint64_t i = 0; i < 3; ++i) threads.emplace_back(read, i);
  std::this_thread::sleep_for(std::chrono::milliseconds(ShortOrLong(1500, 60'000)));
  // A busy machine gets more time for what the test needs to mean something.
  for (int i = 0; i < 600 && (whole.load() == 0 || overtaken.load() == 0); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(whole.load(), 0u);
  EXPECT_GT(overtaken.load(), 0u) << "readers never met reuse: the test saw nothing";
  munmap(const_cast<std::byte*>(arena), kArenaBytes);
}

}  // namespace
}  // namespace kvmill
