// A daemon with a GPU tier, for which host memory stands in: blocks move up, back, are served from
// there, and what is only there is gone with the daemon.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <signal.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::HasSubstr;

class GpuTierTest : public DaemonTest {
 protected:
  const std::vector<std::string> kGpu = {"--device", "host", "--gpu-bytes", "64MiB"};

  // Until the tier holds so many blocks; moving is a matter of the background.
  ::testing::AssertionResult Holds(Tier tier, std::uint64_t blocks) {
    std::uint64_t last = 0;
    for (int i = 0; i < 3000; ++i) {
      const auto stat = client_->Stat();
      if (!stat.ok()) return ::testing::AssertionFailure() << stat.status();
      for (const TierUsage& usage : stat->tiers) {
        if (usage.tier == tier) last = usage.blocks;
      }
      if (last == blocks) return ::testing::AssertionSuccess();
      usleep(10'000);
    }
    return ::testing::AssertionFailure() << last << " blocks";
  }
};

TEST_F(GpuTierTest, TheGreetingNamesTheTiers) {
  StartDurable(kGpu);
  const auto engine = v1::Engine::NewStub(
      grpc::CreateChannel(absl::StrCat("unix:", socket()), grpc::InsecureChannelCredentials()));
  const LocalPass pass(socket());
  grpc::ClientContext call;
  pass.AddTo(&call);
  v1::HelloRequest request;
  request.mutable_client()->set_protocol_version(1);
  v1::HelloReply reply;
  ASSERT_TRUE(engine->Hello(&call, request, &reply).ok());
  EXPECT_THAT(reply.tiers(), ::testing::ElementsAre(v1::TIER_GPU, v1::TIER_HOST, v1::TIER_DISK));
}

TEST_F(GpuTierTest, BlocksMoveUpAndAreServedFromThere) {
  StartDurable(kGpu);
  EXPECT_EQ(ready_["device"], "host");
  EXPECT_THAT(daemon_->standard_error(), HasSubstr("stands in for a GPU's"));
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 1);
  ASSERT_EQ(Put(ns, "s", sequence, true).blocks_stored, 4u);
  ASSERT_TRUE(Holds(Tier::kGpu, 4));
  ASSERT_TRUE(Holds(Tier::kHost, 0));
  auto hits = client_->Lookup(ns, KeysOf("s", 4));
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(hits->tiers, std::vector<Tier>(4, Tier::kGpu));
  const auto values = Get(ns, KeysOf("s", 4));
  ASSERT_FALSE(values.empty());
  EXPECT_LT(sequence.RelativeError(values, 0, 64 * 4), 0.5);
  EXPECT_TRUE(Holds(Tier::kGpu, 4)) << "a reader takes nothing away";
  const auto verified = client_->Verify();
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->failures, 0u);

  auto evicted = client_->Evict(Tier::kGpu, 0);
  ASSERT_TRUE(evicted.ok()) << evicted.status();
  EXPECT_EQ(*evicted, 4u);
  EXPECT_TRUE(Holds(Tier::kHost, 4));
  EXPECT_EQ(Get(ns, KeysOf("s", 4)), values);
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
}

TEST_F(GpuTierTest, WhatWasDurableSurvivesAKillAndWhatWasOnTheGpuOnlyIsAMiss) {
  StartDurable(kGpu);
  ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 1);
  ASSERT_EQ(Put(ns, "s", sequence, true).blocks_stored, 4u);
  ASSERT_TRUE(Holds(Tier::kGpu, 4));
  const auto values = Get(ns, KeysOf("s", 4));
  Kill();
  StartDurable(kGpu);
  ns = Open("n", SmallSpec());
  EXPECT_EQ(Get(ns, KeysOf("s", 4)), values);
  Kill();

  Start(kGpu);  // No disk.
  ns = Open("n", SmallSpec());
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 4u);
  ASSERT_TRUE(Holds(Tier::kGpu, 4));
  EXPECT_EQ(Get(ns, KeysOf("s", 4)), values);
  Kill();
  Start(kGpu);
  const auto hits = client_->Lookup(Open("n", SmallSpec()), KeysOf("s", 4));
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(hits->hit_blocks, 0u);
}

TEST_F(GpuTierTest, DrainKeepsWhatIsOnTheGpuOnly) {
  StartDurable(kGpu);
  ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 4, 1);
  ASSERT_EQ(Put(ns, "s", sequence).blocks_stored, 4u);
  daemon_->Signal(SIGTERM);
  ASSERT_EQ(daemon_->WaitExit().code, 0) << daemon_->standard_error();
  StartDurable(kGpu);
  EXPECT_FALSE(Get(Open("n", SmallSpec()), KeysOf("s", 4)).empty());
}

TEST_F(GpuTierTest, WithoutItTheTierIsRefused) {
  Start();
  EXPECT_EQ(client_->Evict(Tier::kGpu, 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace kvmill::testing
