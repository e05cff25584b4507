// Everything that the network can do to calls, from seeds: whatever happens, every call completes
// once, an OK answer is the right one, and nothing is left.
#include <gtest/gtest.h>

#include "tests/client/transport/transport_fixture.h"
#include "tests/long_form.h"

namespace kvmill::testing {
namespace {

struct Story {
  int ok = 0;
  int failed = 0;
  int wrong = 0;
  int reconnects = 0;
};

// `calls` calls of random sizes over a network with these faults; a broken connection is replaced.
Story Play(const TransportKind& kind, std::uint64_t seed, const FakeNetwork::Faults& faults,
           int calls) {
  Story story;
  Pair pair(kind, seed);
  pair.client_options.grace_nanos = 100 * kMilli;
  pair.server_options.grace_nanos = 100 * kMilli;
  pair.server_options.limits.calls_max = 8;
  pair.server_options.limits.segment_bytes_max = 64 << 10;
  pair.Make();
  std::mt19937_64 random(seed);
  const std::vector<std::byte> data = RandomData(400'000, seed);
  ConnectionPtr connection = pair.Connect();
  pair.network()->set_faults(faults);
  std::vector<std::pair<CallResultPtr, std::size_t>> running;
  const auto check = [&](const CallResultPtr& result, std::size_t bytes) {
    EXPECT_TRUE(pair.WaitFor([&] { return result->done.has(); }, 30 * kSecond)) << "seed " << seed;
    if (!result->done.has()) return;
    EXPECT_EQ(result->done.times(), 1);
    if (!result->status().ok()) {
      ++story.failed;
    } else if (result->destination.size() == bytes &&
               std::equal(result->destination.begin(), result->destination.end(), data.begin())) {
      ++story.ok;
    } else {
      ++story.wrong;
    }
  };
  for (int i = 0; i < calls; ++i) {
    if (pair.client->stats().connections == 0) {
      for (int attempt = 0; attempt < 50; ++attempt) {
        const absl::StatusOr<ConnectionPtr> made = pair.TryConnect(*pair.server->MakeOffer(1));
        ++story.reconnects;
        if (made.ok()) {
          connection = *made;
          break;
        }
      }
    }
    const std::size_t bytes = random() % 4 == 0 ? random() % data.size() : random() % 2000;
    running.emplace_back(
        pair.Start(connection, "echo", absl::MakeConstSpan(data).first(bytes), 500 * kMilli),
        bytes);
    if (random() % 3 == 0) pair.Pass(static_cast<std::int64_t>(random() % 2'000'000));
    if (random() % 10 == 0) connection->Cancel(running.back().first->id);
    if (running.size() > 20) {
      check(running.front().first, running.front().second);
      running.erase(running.begin());
    }
  }
  for (const auto& [result, bytes] : running) check(result, bytes);
  pair.network()->set_faults({});
  connection->Close();
  pair.Pass(2 * kSecond);
  pair.ExpectIdle();
  return story;
}

class FaultsTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  Story PlaySeeds(const FakeNetwork::Faults& faults, int seeds, int calls = 60) {
    Story all;
    const int count = ShortOrLong(seeds, 100 * seeds);
    for (int seed = 1; seed <= count; ++seed) {
      const Story one = Play(GetParam(), static_cast<std::uint64_t>(seed), faults, calls);
      all.ok += one.ok;
      all.failed += one.failed;
      all.wrong += one.wrong;
      all.reconnects += one.reconnects;
      if (HasFailure()) {
        ADD_FAILURE() << "seed " << seed;
        break;
      }
    }
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(All, FaultsTest,
                         ::testing::Values(TransportKind{false, true}, TransportKind{false, false}),
                         [](const auto& test) { return NameOf(test.param); });

TEST_P(FaultsTest, ReorderedSegmentsChangeNothing) {
  const Story story = PlaySeeds({.reorder = 0.3}, 10);
  EXPECT_EQ(story.wrong, 0);
  EXPECT_EQ(story.reconnects, 0);
  EXPECT_GT(story.ok, 7 * story.failed);  // The cancelled ones.
}

TEST_P(FaultsTest, LostSegmentsEndInDeadlines) {
  const Story story = PlaySeeds({.reorder = 0.05, .loss = 0.02}, 10);
  EXPECT_EQ(story.wrong, 0);
  EXPECT_GT(story.ok, 0);
  EXPECT_GT(story.failed, 0);
}

TEST_P(FaultsTest, CutsEndCallsAndTheNextConnectionWorks) {
  const Story story = PlaySeeds({.reorder = 0.05, .cut = 0.02}, 10);
  EXPECT_EQ(story.wrong, 0);
  EXPECT_GT(story.ok, 0);
  EXPECT_GT(story.reconnects, 0);
}

// Encrypted, no flipped bit gets through. In plaintext one in a payload does: records have
// checksums of their own.
TEST_P(FaultsTest, FlippedBitsEndTheConnection) {
  const Story story = PlaySeeds({.corrupt = 0.02}, 10);
  if (!GetParam().plaintext) {
    EXPECT_EQ(story.wrong, 0);
  }
  EXPECT_GT(story.ok, 0);
  EXPECT_GT(story.reconnects, 0);
}

TEST_P(FaultsTest, EverythingAtOnce) {
  const Story story = PlaySeeds(
      {.reorder = 0.1, .loss = 0.005, .corrupt = GetParam().plaintext ? 0 : 0.005, .cut = 0.005},
      20);
  EXPECT_EQ(story.wrong, 0);
  EXPECT_GT(story.ok, 0);
}

TEST_P(FaultsTest, AStoppedPeerMeansDeadlinesAndNoMore) {
  Pair pair(GetParam());
  pair.client_options.grace_nanos = 100 * kMilli;
  pair.Make();
  const ConnectionPtr connection = pair.Connect();
  const std::vector<std::byte> data = RandomData(2'000'000, 1);
  pair.network()->Stop("server");
  const std::int64_t begin = pair.network()->clock().MonotonicNanos();
  const CallResultPtr small = pair.Start(connection, "echo", {}, 200 * kMilli);
  const CallResultPtr large = pair.Start(connection, "echo", data, 300 * kMilli);
  EXPECT_EQ(pair.Wait(small).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(pair.network()->clock().MonotonicNanos(), begin + 200 * kMilli);
  EXPECT_EQ(pair.Wait(large).code(), absl::StatusCode::kDeadlineExceeded);
  // Its buffers come back when the connection is given up.
  EXPECT_EQ(pair.network()->clock().MonotonicNanos(), begin + 400 * kMilli);
  EXPECT_TRUE(pair.WaitFor([&] { return pair.client_closed.has(); }));
  pair.network()->Resume("server");
  pair.Pass(kSecond);
  EXPECT_TRUE(pair.Wait(pair.Start(pair.Connect(), "echo", data)).ok());
  pair.ExpectIdle();
}

TEST_P(FaultsTest, TheSameSeedTellsTheSameStory) {
  const FakeNetwork::Faults faults = {.reorder = 0.1, .loss = 0.01, .cut = 0.01};
  // Keys and challenges are random, so only without encryption are bytes the same; the events are.
  const Story first = Play(GetParam(), 42, faults, 100);
  const Story second = Play(GetParam(), 42, faults, 100);
  EXPECT_EQ(first.ok, second.ok);
  EXPECT_EQ(first.failed, second.failed);
  EXPECT_EQ(first.reconnects, second.reconnects);
}

}  // namespace
}  // namespace kvmill::testing
