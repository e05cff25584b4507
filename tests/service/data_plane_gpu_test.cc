// Blocks on a GPU that the data plane sends. The GPU is a HiddenDevice, whose memory the CPU cannot
// touch, and the network is the fake one, told how to read it: no GPU has run this.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/service/data_plane_world.h"
#include "tests/storage/hidden_device.h"

namespace kvmill::testing {
namespace {

using stress::Space;

constexpr std::uint32_t kSegmentBytes = 64 << 10;
constexpr int kSequences = 6;

class DataPlaneGpuTest : public ::testing::Test {
 protected:
  void Make(bool plaintext) {
    world_ = std::make_unique<World>(1, plaintext, 1, kSegmentBytes, &gpu_);
  }
  // `act` once, when there is a connection, and until all of it has ended.
  void Do(const std::function<void(World::Peer& peer)>& act) {
    bool done = false;
    EXPECT_TRUE(world_->Run([&] { return done && world_->running() == 0; },
                            [&] {
                              World::Peer& peer = world_->peer(0);
                              world_->Connect(peer);
                              if (done || peer.connection == nullptr) return;
                              done = true;
                              act(peer);
                            }));
  }
  static std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (int i = 0; i < kSequences; ++i) names.push_back(absl::StrCat("s", i));
    return names;
  }
  void StoreOnTheGpu() {
    Do([&](World::Peer& peer) {
      for (const std::string& name : Names()) {
        world_->Store(peer, Space::kTiles, name, {}, /*encode=*/true);
      }
    });
    while (world_->store().stats().unpromoted_blocks > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::size_t groups = world_->space(Space::kTiles).spec.groups.size();
    ASSERT_EQ(BlocksIn(Tier::kGpu), kSequences * stress::kBlocks * groups);
  }
  std::uint64_t BlocksIn(Tier tier) {
    return world_->store().stats().tiers[static_cast<std::size_t>(tier)].blocks;
  }
  // The sink looks at every byte.
  void FetchAll() {
    const std::uint64_t before = Fetched();
    Do([&](World::Peer& peer) { world_->Fetch(peer, Space::kTiles, Names()); });
    EXPECT_EQ(Fetched() - before, kSequences * stress::kBlocks);
  }
  std::uint64_t Fetched() const {
    const auto found = world_->did().find("fetched blocks");
    return found == world_->did().end() ? 0 : found->second;
  }

  HiddenDevice gpu_;
  std::unique_ptr<World> world_;
};

TEST_F(DataPlaneGpuTest, BlocksAreSentFromTheGpuWhereTheTransportReadsIt) {
  Make(/*plaintext=*/true);
  EXPECT_TRUE(world_->plane().sends_gpu_memory());
  StoreOnTheGpu();
  FetchAll();
  DataPlane::Stats stats = world_->plane().stats();
  EXPECT_GT(stats.gpu_bytes_from_gpu, 0u);
  EXPECT_EQ(stats.gpu_bytes_from_gpu, world_->network().device_bytes());
  EXPECT_EQ(stats.gpu_bytes_from_host, 0u);

  // Some are in host memory now: a reply is of one kind of memory, and nothing is left out.
  const std::uint64_t all = stats.gpu_bytes_from_gpu;
  // What was sent is let go of when the network has said so.
  for (int i = 0; i < 1000 && BlocksIn(Tier::kHost) == 0; ++i) {
    Do([](World::Peer&) {});
    ASSERT_TRUE(world_->store().Evict(Tier::kGpu, all / 2).ok());
  }
  ASSERT_GT(BlocksIn(Tier::kGpu), 0u);
  ASSERT_GT(BlocksIn(Tier::kHost), 0u);
  FetchAll();
  stats = world_->plane().stats();
  EXPECT_GT(stats.gpu_bytes_from_gpu, all);
  EXPECT_LT(stats.gpu_bytes_from_gpu, 2 * all);
  EXPECT_EQ(stats.gpu_bytes_from_gpu, world_->network().device_bytes());
  world_->Finish();
}

TEST_F(DataPlaneGpuTest, WhereItEncryptsTheyAreCopiedToHostMemory) {
  Make(/*plaintext=*/false);
  EXPECT_FALSE(world_->plane().sends_gpu_memory());
  StoreOnTheGpu();
  FetchAll();
  const DataPlane::Stats stats = world_->plane().stats();
  EXPECT_EQ(stats.gpu_bytes_from_gpu, 0u);
  EXPECT_GT(stats.gpu_bytes_from_host, 0u);
  EXPECT_EQ(world_->network().device_bytes(), 0u);
  world_->Finish();
}

}  // namespace
}  // namespace kvmill::testing
