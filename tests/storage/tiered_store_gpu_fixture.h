// A tiered store with a GPU tier on a HiddenDevice.
#ifndef KVMILL_TESTS_STORAGE_TIERED_STORE_GPU_FIXTURE_H_
#define KVMILL_TESTS_STORAGE_TIERED_STORE_GPU_FIXTURE_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "tests/storage/hidden_device.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {

class TieredStoreGpuTest : public TieredStoreTest {
 protected:
  static constexpr std::uint64_t kAll = std::uint64_t{1} << 40;

  // One arena of two extents in each tier, one of them for pages.
  TieredStoreGpuTest() {
    options_.host_bytes = options_.arena_bytes = 4 << 20;
    options_.gpu_bytes = options_.gpu_arena_bytes = 4 << 20;
  }
  ~TieredStoreGpuTest() override {
    store_.reset();
    EXPECT_EQ(gpu_.unpinned_copies, 0);
    EXPECT_EQ(gpu_.pinned_ranges(), 0u);
  }

  void OpenWithGpu(bool with_disk, const NamespaceSpec& spec = Spec()) {
    options_.gpu = &gpu_;
    Open(with_disk, spec);
  }
  void Restart() {
    store_.reset();
    Open(true);
  }
  absl::Status Durable(std::uint64_t number) {
    absl::Status result;
    absl::Status status = store_->MakeDurable({Id(number)}, absl::MakeSpan(&result, 1));
    return status.ok() ? result : status;
  }

  // Until everything stored so far was written, and promoted or left where it is.
  void Settle() {
    for (;;) {
      const StoreStats stats = store_->stats();
      if (stats.unwritten_blocks == 0 && stats.unpromoted_blocks == 0) return;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  absl::Status PutAndSettle(std::uint64_t number) {
    const absl::Status put = Put(number);
    Settle();
    return put;
  }

  Tier TierOfBlock(std::uint64_t number) {
    const auto found = store_->Lookup(space_, {Key(number)});
    return found.tiers.empty() ? Tier::kPeer : found.tiers[0];
  }
  const TierStats& TierNow(Tier tier) {
    stats_ = store_->stats();
    return stats_.tiers[static_cast<std::size_t>(tier)];
  }
  std::uint64_t EvictedFrom(Tier tier, EvictReason reason) {
    return store_->stats()
        .evicted_blocks[static_cast<std::size_t>(tier)][static_cast<std::size_t>(reason)];
  }
  std::uint64_t ChecksumFailures(Tier tier) {
    return store_->stats().checksum_failures[static_cast<std::size_t>(tier)];
  }
  // How many blocks of the default shape a tier holds.
  std::uint64_t Fit(Tier tier) {
    EXPECT_TRUE(PutAndSettle(1'000'000).ok());
    const std::uint64_t block_bytes = TierNow(Tier::kGpu).used_bytes;
    EXPECT_EQ(*store_->Remove(space_, {Key(1'000'000)}), 1u);
    return TierNow(tier).capacity_bytes / block_bytes;
  }

  // Whether pages on the device are those of block `number`: looked at where the device has them.
  testing::AssertionResult HoldsOnGpu(const BlockRef& ref, std::uint64_t number) {
    if (ref.memory() != Tier::kGpu) return testing::AssertionFailure() << "not on the GPU";
    std::vector<absl::Span<const std::byte>> pages;
    for (const auto& page : ref.pages()) {
      const std::byte* real = gpu_.Real(page.data());
      if (real == nullptr) return testing::AssertionFailure() << "not a device address";
      pages.emplace_back(real, page.size());
    }
    return PagesHold(pages, number);
  }
  testing::AssertionResult GetOnGpuIs(std::uint64_t number) {
    auto ref = store_->FetchOnGpu(Id(number));
    if (!ref.ok()) return testing::AssertionFailure() << ref.status();
    return HoldsOnGpu(*ref, number);
  }
  // Flips a bit of a block that is on the GPU.
  void Damage(std::uint64_t number) {
    auto ref = store_->FetchOnGpu(Id(number));
    ASSERT_TRUE(ref.ok()) << ref.status();
    const auto page = ref->pages()[1];
    gpu_.Real(page.data())[page.size() / 2] ^= std::byte{1};
  }

  HiddenDevice gpu_;
  StoreStats stats_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_TIERED_STORE_GPU_FIXTURE_H_
