// Links: a connection that comes back, with back-off.
#include "client/transport/link.h"

#include <gtest/gtest.h>

#include "tests/client/transport/transport_fixture.h"

namespace kvmill::testing {
namespace {

class LinkTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  LinkTest() : pair(GetParam()) {
    pair.Make();
    link = std::make_unique<Link>(
        pair.client.get(),
        [this](absl::AnyInvocable<void(absl::StatusOr<Offer>)> give) {
          ++asked;
          if (!offers_fail) return give(pair.server->MakeOffer(1));
          give(absl::UnavailableError("the control plane is down"));
        },
        Link::Options{
            .backoff_min_nanos = 40 * kMilli, .backoff_max_nanos = 160 * kMilli, .calls_max = 3});
  }
  void TearDown() override {
    link.reset();
    pair.ExpectIdle();
  }
  CallResultPtr StartCall() {
    auto result = std::make_shared<CallResult>();
    Call call;
    call.timeout_nanos = 5 * kSecond;
    call.done = [result](absl::StatusOr<Response> response) {
      result->done.Set(std::move(response));
    };
    link->Start(std::move(call));
    return result;
  }
  absl::Status Run() { return pair.Wait(StartCall()); }

  Pair pair;
  std::atomic<int> asked{0};
  std::atomic<bool> offers_fail{false};
  std::unique_ptr<Link> link;
};

INSTANTIATE_TEST_SUITE_P(All, LinkTest,
                         ::testing::Values(TransportKind{true, false}, TransportKind{false, false}),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(LinkTest, ConnectsForTheFirstCallAndStays) {
  EXPECT_EQ(asked, 0);
  EXPECT_TRUE(Run().ok());
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(link->state().connected);
  EXPECT_NE(link->connection(), nullptr);
}

TEST_P(LinkTest, ComesBackAfterABreakAtOnce) {
  EXPECT_TRUE(Run().ok());
  link->connection()->Close();
  ASSERT_TRUE(pair.WaitFor([&] { return link->connection() == nullptr; }));
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(asked, 2);
}

TEST_P(LinkTest, WaitsLongerAfterEachFailureAndNeverForEver) {
  offers_fail = true;
  std::vector<std::int64_t> waits;
  for (int failure = 1; failure <= 5; ++failure) {
    EXPECT_EQ(Run().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(asked, failure);
    EXPECT_EQ(link->state().failures_in_a_row, static_cast<std::uint64_t>(failure));
    waits.push_back(link->state().next_attempt_nanos - pair.client->NowNanos());
    // While it waits calls fail at once, and nobody is asked.
    EXPECT_EQ(Run().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(asked, failure);
    pair.Pass(
        std::max<std::int64_t>(0, link->state().next_attempt_nanos - pair.client->NowNanos()) +
        kMilli);
  }
  const std::int64_t nominal[] = {40, 80, 160, 160, 160};
  for (int i = 0; i < 5; ++i) {
    EXPECT_LE(waits[i], nominal[i] * kMilli);
    if (!GetParam().ucx) {
      EXPECT_GE(waits[i], nominal[i] * kMilli / 2);
    }
  }
  offers_fail = false;
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(link->state().failures_in_a_row, 0u);
}

TEST_P(LinkTest, APeerThatIsGoneAndReturnsIsReached) {
  EXPECT_TRUE(Run().ok());
  offers_fail = true;
  pair.server.reset();
  ASSERT_TRUE(pair.WaitFor([&] { return link->connection() == nullptr; }));
  EXPECT_EQ(Run().code(), absl::StatusCode::kUnavailable);
  ++pair.server_options.self.incarnation;
  pair.MakeServer();
  offers_fail = false;
  pair.Pass(170 * kMilli);
  EXPECT_TRUE(Run().ok());
  EXPECT_EQ(link->connection()->info().peer.incarnation, 12u);
}

TEST_P(LinkTest, CallsThatWaitAreBoundedAndEndWithTheLink) {
  std::vector<absl::AnyInvocable<void(absl::StatusOr<Offer>)>> kept;
  link = std::make_unique<Link>(
      pair.client.get(),
      [&](absl::AnyInvocable<void(absl::StatusOr<Offer>)> give) {
        kept.push_back(std::move(give));
      },
      Link::Options{.calls_max = 3});
  std::vector<CallResultPtr> results;
  for (int i = 0; i < 4; ++i) results.push_back(StartCall());
  EXPECT_EQ(kept.size(), 1u);
  EXPECT_EQ(pair.Wait(results[3]).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(results[0]->done.has());
  link.reset();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pair.Wait(results[i]).code(), absl::StatusCode::kCancelled);
  }
  kept[0](pair.server->MakeOffer(1));  // Late: nobody connects.
  pair.Pass(20 * kMilli);
  EXPECT_EQ(pair.server->stats().connections, 0u);
}

}  // namespace
}  // namespace kvmill::testing
