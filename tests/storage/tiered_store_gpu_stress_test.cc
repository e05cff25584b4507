// Random use of three tiers from many threads, against a shadow model.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "tests/long_form.h"
#include "tests/storage/tiered_store_gpu_fixture.h"

namespace kvmill {
namespace {

class TieredStoreGpuStressTest : public TieredStoreGpuTest {
 protected:
  static constexpr unsigned kThreads = 4;
  static constexpr std::uint64_t kKeysPerThread = 60;
  static constexpr std::uint64_t kKeys = kThreads * kKeysPerThread;
  static constexpr std::uint64_t kVersions = 3;

  // What the thread that owns a key stored last; 0: removed. A version is a block of other values.
  struct Model {
    std::uint64_t version = 0;
  };

  static std::uint64_t ContentOf(std::uint64_t key, std::uint64_t version) {
    return key * kVersions + version % kVersions;
  }
  // Records of every content, encoded once: encoding is what takes the time.
  void Prepare() {
    for (std::uint64_t i = 0; i < kKeys * kVersions; ++i) values_.push_back(ValuesOf(i));
  }
  absl::Status PutVersion(std::uint64_t key, std::uint64_t version) {
    return Put(Id(key), {.token_count = kTokens}, values_[ContentOf(key, version)]);
  }
  testing::AssertionResult RefHolds(const BlockRef& ref, std::uint64_t content) {
    return ref.memory() == Tier::kGpu ? HoldsOnGpu(ref, content) : Holds(ref, content);
  }

  // One thread's part. It alone stores and removes its own keys, so it knows what each must hold;
  // of the others' it knows that they hold one of their versions.
  void Use(unsigned thread, int steps, bool faults) {
    std::mt19937 random(thread);
    std::array<Model, kKeysPerThread> own{};
    std::vector<std::pair<BlockRef, std::uint64_t>> held;  // With the content it must keep.
    for (int i = 0; i < steps && !failed_; ++i) {
      const std::uint64_t index = random() % kKeysPerThread;
      const std::uint64_t key = index * kThreads + thread;
      Model& model = own[index];
      switch (random() % 12) {
        case 0:
        case 1:
        case 2: {
          if (model.version != 0) break;
          const std::uint64_t version = 1 + random() % 1000;
          const absl::Status put = PutVersion(key, version);
          if (put.ok()) {
            model.version = version;
          } else if (!absl::IsResourceExhausted(put)) {
            Fail(testing::AssertionFailure() << "put: " << put);
          }
          break;
        }
        case 3: {
          const auto removed = store_->Remove(space_, {Key(key)});
          if (!removed.ok() || (model.version == 0 && *removed != 0)) {
            Fail(testing::AssertionFailure() << "remove: " << removed.status());
          }
          model.version = 0;
          break;
        }
        case 4:
          store_->Evict(Tier::kHost, 50'000).status().IgnoreError();
          break;
        case 5:
          store_->Evict(Tier::kGpu, 50'000).status().IgnoreError();
          break;
        case 6:
          Durable(key).IgnoreError();
          break;
        case 7: {
          const std::uint64_t other = random() % kKeys;
          auto ref = random() % 2 == 0 ? store_->Fetch(Id(other)) : store_->FetchOnGpu(Id(other));
          if (!ref.ok()) break;
          bool any = false;
          for (std::uint64_t v = 0; v < kVersions && !any; ++v) {
            any = static_cast<bool>(RefHolds(*ref, ContentOf(other, v)));
          }
          if (!any) Fail(testing::AssertionFailure() << "no version of block " << other);
          break;
        }
        default: {
          const bool on_gpu = random() % 2 == 0;
          auto ref = on_gpu ? store_->FetchOnGpu(Id(key)) : store_->Fetch(Id(key));
          if (ref.ok()) {
            if (model.version == 0) {
              Fail(testing::AssertionFailure() << "block " << key << " was removed");
              break;
            }
            const std::uint64_t content = ContentOf(key, model.version);
            Fail(RefHolds(*ref, content));
            if (random() % 4 == 0) held.emplace_back(*std::move(ref), content);
          } else if (model.version != 0 && absl::IsNotFound(ref.status())) {
            if (!faults) Fail(testing::AssertionFailure() << "block " << key << " is lost");
            store_->Remove(space_, {Key(key)}).status().IgnoreError();
            model.version = 0;
          }
        }
      }
      if (held.size() > 8 || (!held.empty() && random() % 8 == 0)) {
        const std::size_t at = random() % held.size();
        Fail(RefHolds(held[at].first, held[at].second));  // Still, whatever came of the block.
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
  }

  void Fail(const testing::AssertionResult& result) {
    if (result) return;
    if (!failed_.exchange(true)) ADD_FAILURE() << result.message();
  }

  // Until `enough`, too: on a busy machine the threads of the store are late.
  void RunThreads(int steps, bool faults, const std::function<bool()>& enough) {
    RunThreads(steps, faults);
    for (int i = 0; i < 20 && !failed_ && !enough(); ++i) {
      ASSERT_TRUE(store_->Clear(space_).ok());
      RunThreads(steps, faults);
    }
    EXPECT_TRUE(failed_ || enough());
  }
  void RunThreads(int steps, bool faults) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t, steps, faults] { Use(t, steps, faults); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Nothing is referenced and all memory can be given back.
  void ExpectEmptyAfterClear() {
    ASSERT_TRUE(store_->Clear(space_).ok());
    Settle();
    EXPECT_EQ(store_->stats().references, 0u);
    EXPECT_EQ(store_->stats().referenced_bytes, 0u);
    EXPECT_EQ(HostUsedBytes(), 0u);
    EXPECT_EQ(TierNow(Tier::kGpu).used_bytes, 0u);
    EXPECT_EQ(store_->stats().blocks, 0u);
    EXPECT_EQ(store_->stats().pages, 0u);
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      EXPECT_EQ(store_->stats().tiers[tier].blocks, 0u) << tier;
    }
  }

  std::vector<Values> values_;
  std::atomic<bool> failed_{false};
};

TEST_F(TieredStoreGpuStressTest, NothingIsLostOrWrongWhileBlocksMoveBetweenThreeTiers) {
  options_.room_wait = absl::Seconds(10);
  OpenWithGpu(true);
  Prepare();
  RunThreads(ShortOrLong(500, 20'000), false, [this] {
    const auto& moved = store_->stats().moved_blocks;
    return moved[static_cast<std::size_t>(Tier::kGpu)] > 20 &&
           moved[static_cast<std::size_t>(Tier::kHost)] > 20;
  });
  EXPECT_EQ(ChecksumFailures(Tier::kGpu), 0u);
  ExpectEmptyAfterClear();
}

TEST_F(TieredStoreGpuStressTest, WithoutADiskBlocksGoMissingAndAreNeverWrong) {
  options_.room_wait = absl::Milliseconds(50);
  OpenWithGpu(false);
  Prepare();
  RunThreads(ShortOrLong(500, 20'000), true);
  ExpectEmptyAfterClear();
}

TEST_F(TieredStoreGpuStressTest, FaultyCopiesAreMissesAndNeverWrongBytes) {
  options_.room_wait = absl::Milliseconds(50);
  OpenWithGpu(true);
  Prepare();
  std::atomic<bool> stop{false};
  std::thread faults([&] {
    std::mt19937 random(1);
    while (!stop) {
      switch (random() % 4) {
        case 0:
          gpu_.fail_to_device = 1;
          break;
        case 1:
          gpu_.fail_to_host = 1;
          break;
        case 2:
          gpu_.flip_to_device = 1;
          break;
        default:
          gpu_.flip_to_host = 1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  RunThreads(ShortOrLong(500, 20'000), true, [this] { return ChecksumFailures(Tier::kGpu) > 0; });
  stop = true;
  faults.join();
  gpu_.fail_to_device = gpu_.fail_to_host = gpu_.flip_to_device = gpu_.flip_to_host = 0;
  ExpectEmptyAfterClear();
}

}  // namespace
}  // namespace kvmill
