// Threads write, read, remove, flush and scan the same few keys while the cap drops epochs, against
// a shadow model. Each key belongs to one thread that changes it, so the model is exact; every
// thread reads all keys. Goal: a read returns bytes of one version that was current at some moment
// of the read, whole, or nothing; a key whose owner holds it as written is there unless it was
// evicted; nothing deadlocks. `--seconds N`, `--seed N`.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/long_form.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

int seconds = ShortOrLong(4, 120);
std::uint64_t seed = 1;

constexpr std::size_t kThreads = 4;
constexpr std::uint64_t kKeysPerThread = 60;
constexpr std::size_t kPageBytes = 14 * 1024;

TestBlock Version(std::uint64_t key, std::uint64_t version) {
  return MakeBlock(key, 1 + (key + version) % 4, kPageBytes, version);
}

// What the owner knows: version 0 is none.
struct Shadow {
  std::atomic<std::uint64_t> version{0};  // Written or being written.
  std::atomic<std::uint64_t> oldest{1};   // Versions before are removed for good.
  std::atomic<bool> present{false};
};

class RocksDiskStoreStressTest : public DiskStoreTest {
 protected:
  RocksDiskStoreStressTest() {
    options_.capacity_bytes = kDiskCapacityBytesMin;
    options_.memtable_bytes = 256 << 10;
  }

  void CheckRead(std::uint64_t key) {
    const std::uint64_t oldest = shadows_[key].oldest.load();
    const auto pages = ReadBlock(*store_, TestId(key));
    const std::uint64_t newest = shadows_[key].version.load();
    if (absl::IsNotFound(pages.status())) return;
    // Find and Read are two calls: between them the key may get another version with other pages.
    if (absl::IsDataLoss(pages.status()) && newest != oldest) return;
    ASSERT_TRUE(pages.ok()) << "key " << key << ": " << pages.status();
    for (std::uint64_t version = oldest; version <= newest; ++version) {
      if (*pages == Version(key, version).pages) return;
    }
    FAIL() << "key " << key << ": bytes of no version from " << oldest << " to " << newest;
  }

  void Change(std::uint64_t key) {
    Shadow& shadow = shadows_[key];
    if (shadow.present) {
      ASSERT_TRUE(store_->Remove({TestId(key)}).ok());
      shadow.present = false;
      shadow.oldest.store(shadow.version.load() + 1);
      ASSERT_TRUE(absl::IsNotFound(store_->Find(TestId(key)).status()));
      return;
    }
    const std::uint64_t version = shadow.version.load() + 1;
    shadow.version.store(version);
    const absl::Status status = Put(Version(key, version));
    ASSERT_TRUE(status.ok()) << status;
    shadow.present = true;
    ++writes_;
  }

  void Run(std::size_t thread, std::uint64_t thread_seed) {
    std::mt19937_64 random(thread_seed);
    while (!stop_ && !HasFatalFailure()) {
      const std::uint64_t own = thread * kKeysPerThread + random() % kKeysPerThread;
      switch (random() % 16) {
        case 0:
          ASSERT_TRUE(store_->Flush().ok());
          break;
        case 1:
          // The first bytes of a key are kept.
          if (shadows_[own].present && store_->Find(TestId(own)).ok()) {
            const absl::Status again = Put(Version(own, shadows_[own].version + 1000));
            if (again.ok()) {  // The cap dropped it in between.
              ASSERT_TRUE(store_->Remove({TestId(own)}).ok());
              shadows_[own].present = false;
            } else {
              ASSERT_TRUE(absl::IsAlreadyExists(again)) << again;
            }
          }
          break;
        case 2:
          if (random() % 8 == 0) {
            ASSERT_TRUE(store_->Scan([](const DiskBlockMeta&) { return true; }).ok());
          }
          break;
        case 3:
        case 4:
        case 5:
        case 6:
        case 7:
          ASSERT_NO_FATAL_FAILURE(Change(own));
          break;
        default:
          ASSERT_NO_FATAL_FAILURE(CheckRead(random() % (kThreads * kKeysPerThread)));
      }
    }
  }

  std::vector<Shadow> shadows_ = std::vector<Shadow>(kThreads * kKeysPerThread);
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> writes_{0};
};

TEST_P(RocksDiskStoreStressTest, ThreadsAgreeWithTheShadowModel) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Open();
  std::atomic<std::uint64_t> evicted{0};
  store_->SetEvictedCallback([&](absl::Span<const DiskBlockId> ids) { evicted += ids.size(); });
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] { Run(thread, seed * 1000 + thread); });
  }
  std::this_thread::sleep_for(std::chrono::seconds(seconds));
  // A busy machine, or a sanitizer, gets more time for what the test needs to mean something.
  for (int waits = 0; writes_ <= 100 && waits < 600; ++waits) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  stop_ = true;
  for (std::thread& thread : threads) thread.join();
  ASSERT_FALSE(HasFailure());
  std::printf("%llu writes, %llu evicted\n", static_cast<unsigned long long>(writes_.load()),
              static_cast<unsigned long long>(store_->stats().evicted_blocks));
  EXPECT_GT(writes_.load(), 100u);
  // An epoch that is being dropped is still there for a moment, beside what was written meanwhile.
  const std::uint64_t most =
      options_.capacity_bytes + options_.capacity_bytes / options_.epoch_count;
  const std::uint64_t at_end = store_->stats().used_bytes;
  EXPECT_LE(at_end, most + options_.capacity_bytes / options_.epoch_count);
  const auto begin = std::chrono::steady_clock::now();
  while (store_->stats().used_bytes > most &&
         std::chrono::steady_clock::now() - begin < std::chrono::seconds(10)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(store_->stats().used_bytes, most);
  Reopen();
  std::uint64_t present = 0;
  for (std::uint64_t key = 0; key < shadows_.size(); ++key) {
    const Shadow& shadow = shadows_[key];
    const std::string got = Get(Version(key, shadow.version));
    EXPECT_TRUE(got == "absent" || (got == "right" && shadow.present)) << key << " " << got;
    present += got == "right" ? 1 : 0;
  }
  EXPECT_EQ(store_->stats().block_count, present);
}

INSTANTIATE_TEST_SUITE_P(Files, RocksDiskStoreStressTest, ::testing::Bool(), EncryptionName);

}  // namespace
}  // namespace kvmill

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) kvmill::seconds = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) {
      kvmill::seed = std::strtoull(argv[i + 1], nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
