// The data plane over a network that delays, loses, reorders, cuts and corrupts, from seeds: every
// operation completes once, no wrong byte is delivered, and in the end nothing is held. And senders
// that stop in the middle.
//   data_plane_test [--seed=N]    N is the first seed.
#include "service/data_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "tests/long_form.h"
#include "tests/service/data_plane_world.h"

namespace kvmill::testing {
namespace {

using stress::Space;

std::uint64_t first_seed = 1;

// Stores and fetches of two clients, of the same few sequences.
void Play(std::uint64_t seed, bool plaintext, const FakeNetwork::Faults& faults, bool rude,
          std::map<std::string, std::uint64_t>* did) {
  World world(seed, plaintext);
  world.network().set_faults(faults);
  constexpr int kOperations = 14;
  int started = 0;
  const auto sequence = [&] { return absl::StrCat("s", world.Below(4)); };
  const auto act = [&] {
    for (std::size_t i = 0; i < world.peers(); ++i) world.Connect(world.peer(i));
    if (rude && world.Below(200) == 0) {
      const std::string address = world.Below(2) == 0 ? "node" : world.peer(0).address;
      switch (world.Below(3)) {
        case 0:
          world.network().Cut(address);
          break;
        case 1:
          world.plane().CallerLeft(world.peer(world.Below(world.peers())).caller.door_client);
          break;
        default:
          world.network().Stop(address);
      }
    }
    // Whoever was stopped goes on soon.
    if (rude && world.Below(50) == 0) {
      world.network().Resume("node");
      world.network().Resume(world.peer(0).address);
    }
    World::Peer& peer = world.peer(world.Below(world.peers()));
    if (started == kOperations || world.running() >= 5 || peer.connection == nullptr) return;
    const auto space = static_cast<Space>(world.Below(stress::kSpaces));
    const bool encode = world.Below(2) == 0;
    const auto what = world.Below(8);
    ++started;
    if (what < 3) {
      world.Store(peer, space, sequence(), {}, encode);
    } else if (what == 3) {
      world.Store(peer, space, sequence(), {static_cast<std::uint32_t>(world.Below(2)), 1}, encode);
    } else {
      std::vector<std::string> sequences;
      // Many are asked for in several calls at once.
      const std::uint64_t max = world.Below(8) == 0 ? 20 : 4;
      for (std::uint64_t n = 1 + world.Below(max); n > 0; --n) sequences.push_back(sequence());
      world.Fetch(peer, space, sequences);
    }
  };
  EXPECT_TRUE(world.Run([&] { return started == kOperations && world.running() == 0; }, act));
  // The network is well again, and what was said to be there is there.
  world.network().set_faults({});
  world.network().Resume("node");
  world.network().Resume(world.peer(0).address);
  bool asked = false;
  EXPECT_TRUE(world.Run([&] { return asked && world.running() == 0; },
                        [&] {
                          World::Peer& peer = world.peer(0);
                          world.Connect(peer);
                          if (!asked && peer.connection != nullptr) {
                            asked = true;
                            world.FetchAllThatIsKnown(peer);
                          }
                        }));
  world.Finish();
  for (const auto& [what, count] : world.did()) (*did)[what] += count;
}

std::map<std::string, std::uint64_t> PlaySeeds(int seeds, bool plaintext,
                                               const FakeNetwork::Faults& faults,
                                               bool rude = false) {
  std::map<std::string, std::uint64_t> did;
  const int count = ShortOrLong(seeds, 50 * seeds);
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
    Play(seed, plaintext, faults, rude, &did);
    if (::testing::Test::HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
  for (const auto& [what, n] : did) {
    std::printf("%s %llu; ", what.c_str(), static_cast<unsigned long long>(n));
  }
  std::printf("\n");
  return did;
}

// A reply has room for 4 MiB and for the list of its pages: what it leaves out is asked for again,
// from the middle of a block as well. Each page comes once, and each miss is one.
TEST(DataPlaneTest, WhatAReplyHasNoRoomForIsAskedForAgain) {
  World world(first_seed, true, 1);
  // With long tails: a call asks for 1 MiB of tiles, which are more than 4 MiB in 16 bits.
  std::vector<std::string> names;
  for (int i = 0; names.size() < 4; ++i) {
    const std::string name = absl::StrCat("long", i);
    if (stress::TailTokens(name) >= 48) names.push_back(name);
  }
  constexpr std::uint64_t kSequences = 28;  // 140 blocks: two calls, if all were in their replies.
  const auto fetch_many = [&](Space space, std::uint64_t missing) {
    std::vector<std::string> sequences;
    // Misses have a text, which makes the list long.
    for (std::uint64_t i = 0; i < missing; ++i) sequences.push_back(absl::StrCat("miss", i));
    while (sequences.size() < kSequences) {
      sequences.push_back(names[sequences.size() % names.size()]);
    }
    world.Fetch(world.peer(0), space, sequences);
  };
  int step = 0;
  const auto act = [&](int end) {
    World::Peer& peer = world.peer(0);
    world.Connect(peer);
    if (peer.connection == nullptr || world.running() > 0 || step == end) return;
    const Space space = ++step % 2 == 0 ? Space::kTiles : Space::kRaw;
    if (step <= 2) {
      for (const std::string& name : names) world.Store(peer, space, name, {}, /*encode=*/false);
    } else {
      fetch_many(space, static_cast<std::uint64_t>(step - 3) / 2 * 6);
    }
  };
  const auto run_to = [&](int end) {
    EXPECT_TRUE(world.Run([&] { return step == end && world.running() == 0; }, [&] { act(end); }));
    EXPECT_TRUE(world.RunFor(kSecond));
  };
  run_to(3);
  std::uint64_t replies = 0;
  for (const std::uint64_t n : world.plane().stats().fetch_seconds.counts) replies += n;
  EXPECT_GT(replies, 2u);
  run_to(10);
  EXPECT_EQ(world.did().at("fetched blocks"), 2 * stress::kBlocks * (4 * kSequences - 6 - 12 - 18));
  world.Finish();
}

TEST(DataPlaneTest, AGoodNetworkFailsNothing) {
  auto did = PlaySeeds(20, false, {});
  EXPECT_GE(did["ok"], did["store"] + did["fetch"]);
  EXPECT_GT(did["fetched blocks"], 0u);
}

TEST(DataPlaneTest, ReorderedSegmentsFailNothing) {
  auto did = PlaySeeds(30, true, {.reorder = 0.3});
  EXPECT_EQ(did["ok"], did["store"] + did["fetch"]);
}

TEST(DataPlaneTest, LossEndsInDeadlines) {
  auto did = PlaySeeds(45, false, {.reorder = 0.05, .loss = 0.02});
  EXPECT_GT(did["store DEADLINE_EXCEEDED"], 0u);
  EXPECT_GT(did["fetch DEADLINE_EXCEEDED"], 0u);
  EXPECT_GT(did["ok"], 0u);
}

TEST(DataPlaneTest, CutsEndWhatRuns) {
  auto did = PlaySeeds(45, true, {.reorder = 0.05, .cut = 0.02});
  EXPECT_GT(did["store UNAVAILABLE"], 0u);
  EXPECT_GT(did["fetch UNAVAILABLE"], 0u);
  EXPECT_GT(did["ok"], 0u);
}

TEST(DataPlaneTest, FlippedBitsNeverArrive) {
  auto did = PlaySeeds(45, false, {.reorder = 0.05, .corrupt = 0.02});
  EXPECT_GT(did["ok"], 0u);
  EXPECT_LT(did["ok"], did["store"] + did["fetch"]);
}

TEST(DataPlaneTest, EverythingAtOnceWithPeersThatStopAndLeave) {
  auto did = PlaySeeds(70, false, {.reorder = 0.1, .loss = 0.004, .corrupt = 0.004, .cut = 0.004},
                       /*rude=*/true);
  EXPECT_GT(did["ok"], 0u);
}

// Clients that send chunks of 1 MiB, eight segments each of which waits to be asked for: a client
// that is stopped has eight under way, and sends no other.
class SenderTest : public ::testing::Test {
 protected:
  static NamespaceSpec LargeSpec() {
    NamespaceSpec spec = stress::SpecOf(Space::kRaw);
    spec.revision = "large";
    LayerGroup& group = spec.groups[0];
    group.layers = {0, 1, 2, 3, 4, 5, 6, 7};
    group.kv_heads = 8;
    return spec;
  }
  void Make(std::uint64_t seed, bool plaintext, std::size_t peers) {
    started_ = done_ = stored_ = 0;
    world_ = std::make_unique<World>(seed, plaintext, peers, /*segment_bytes=*/128 << 10);
    NamespaceSpec spec = LargeSpec();
    spec.tenant = kDefaultTenant;
    fingerprint_ = world_->store().OpenNamespace("large", spec)->fingerprint;
    EXPECT_TRUE(world_->Run([&] { return Connected(peers); },
                            [&] {
                              for (std::size_t i = 0; i < peers; ++i) {
                                world_->Connect(world_->peer(i));
                              }
                            }));
  }
  bool Connected(std::size_t peers) {
    std::size_t open = 0;
    for (std::size_t i = 0; i < peers; ++i) open += world_->peer(i).connection != nullptr ? 1 : 0;
    return open == peers;
  }
  // A sink block, which is kept as it comes: all its layers and heads.
  void Start(std::size_t peer, const std::string& name) {
    v1::DataRequest request;
    v1::DataStore* store = request.mutable_store();
    store->set_fingerprint(std::string(AsBytes(fingerprint_)));
    v1::StoreChunk* chunk = store->mutable_chunk();
    chunk->set_key(name);
    chunk->set_token_count(stress::kBlockTokens);
    chunk->set_layer_count(8);
    chunk->set_head_count(8);
    Call call;
    call.header.resize(request.ByteSizeLong());
    request.SerializeToArray(call.header.data(), static_cast<int>(call.header.size()));
    call.payload = {absl::MakeConstSpan(values_)};
    call.timeout_nanos = 600 * kSecond;
    ++started_;
    call.done = [this](const absl::StatusOr<Response>& response) {
      ++done_;
      if (!response.ok()) return;
      v1::DataStoreReply reply;
      EXPECT_TRUE(
          reply.ParseFromArray(response->header.data(), static_cast<int>(response->header.size())));
      EXPECT_EQ(reply.result().outcome(), v1::STORE_STORED)
          << reply.result().status().ShortDebugString();
      ++stored_;
    };
    world_->peer(peer).connection->Start(std::move(call));
  }
  // Not of the pool's thread.
  void StartAll(std::size_t peer, const std::vector<std::string>& names) {
    bool once = false;
    EXPECT_TRUE(world_->Run([&] { return once; },
                            [&] {
                              if (std::exchange(once, true)) return;
                              for (const std::string& name : names) Start(peer, name);
                            }));
  }

  const std::vector<std::byte> values_ = std::vector<std::byte>(kDataChunkBytesMax);
  Fingerprint fingerprint_{};
  std::unique_ptr<World> world_;
  int started_ = 0;
  int done_ = 0;
  int stored_ = 0;
};

// After every possible number of turns.
TEST_F(SenderTest, WhoStopsInTheMiddleLosesItsConnectionAndTheStagingComesBack) {
  int stopped_in_the_middle = 0;
  const int turns_max = ShortOrLong(60, 120);
  for (int turns = 1; turns <= turns_max && !HasFailure(); ++turns) {
    SCOPED_TRACE(absl::StrCat("stopped after ", turns, " turns"));
    Make(first_seed, turns % 2 == 0, 2);
    StartAll(0, {"a", "b", "c"});
    int left = turns;
    ASSERT_TRUE(world_->Run([&] { return left == 0; },
                            [&] {
                              if (--left == 0) world_->network().Stop(world_->peer(0).address);
                            }));
    ASSERT_TRUE(world_->RunFor(kSecond / 2));
    const std::uint64_t held = world_->plane().stats().staging_bytes;
    ASSERT_TRUE(world_->RunFor(29 * kSecond));
    EXPECT_EQ(world_->plane().stats().staging_bytes, held) << "given up too early";
    EXPECT_EQ(world_->plane().stats().connections, 2u);
    ASSERT_TRUE(world_->RunFor(2 * kSecond));
    EXPECT_EQ(world_->plane().stats().staging_bytes, 0u);
    EXPECT_EQ(world_->plane().stats().calls, 0u);
    EXPECT_EQ(world_->plane().stats().connections, held > 0 ? 1u : 2u);
    if (held > 0) ++stopped_in_the_middle;
    // Whoever did not stop goes on.
    StartAll(1, {"d"});
    const int before = stored_;
    EXPECT_TRUE(world_->Run([&] { return stored_ == before + 1; }));
    world_->network().Resume(world_->peer(0).address);
    EXPECT_TRUE(world_->Run([&] { return done_ == started_; }));
    world_->Finish();
  }
  std::printf("%d of %d in the middle of a chunk\n", stopped_in_the_middle, turns_max);
  EXPECT_GE(stopped_in_the_middle, 5);
}

// All staging memory is with those who stopped: the others wait, and are served afterwards.
TEST_F(SenderTest, WhoWaitsForStagingIsServedWhenTheStoppedHaveGone) {
  constexpr std::size_t kStopping = 16;  // More than enough: chunks of the last wait, too.
  Make(first_seed, true, kStopping + 1);
  for (std::size_t peer = 0; peer < kStopping; ++peer) {
    std::vector<std::string> names;
    for (int i = 0; i < 16; ++i) names.push_back(absl::StrCat(peer, ".", i));
    StartAll(peer, names);
    // Until the beginnings of some are there, or of one that finds no room.
    int turns = 0;
    const std::uint64_t others = world_->plane().stats().staging_bytes;
    ASSERT_TRUE(world_->Run([&] {
      const std::uint64_t now = world_->plane().stats().staging_bytes;
      return ++turns > 20 && (now == kStagingBytesMax || now >= others + 7 * kDataChunkBytesMax);
    }));
    world_->network().Stop(world_->peer(peer).address);
  }
  ASSERT_TRUE(world_->RunFor(kSecond));
  EXPECT_EQ(world_->plane().stats().staging_bytes, kStagingBytesMax);
  const int before = stored_;
  StartAll(kStopping, {"patient"});
  ASSERT_TRUE(world_->RunFor(25 * kSecond));
  EXPECT_EQ(stored_, before);
  EXPECT_EQ(world_->plane().stats().staging_bytes, kStagingBytesMax);
  ASSERT_TRUE(world_->RunFor(10 * kSecond));
  EXPECT_EQ(stored_, before + 1);
  // Those that got staging only now had another 30 s.
  ASSERT_TRUE(world_->RunFor(32 * kSecond));
  EXPECT_EQ(world_->plane().stats().staging_bytes, 0u);
  for (std::size_t peer = 0; peer < kStopping; ++peer) {
    world_->network().Resume(world_->peer(peer).address);
  }
  EXPECT_TRUE(world_->Run([&] { return done_ == started_; }));
  world_->Finish();
}

}  // namespace
}  // namespace kvmill::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    if (argument.substr(0, 7) == "--seed=") {
      kvmill::testing::first_seed = std::strtoull(argv[i] + 7, nullptr, 10);
    }
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(kvmill::testing::first_seed));
  return RUN_ALL_TESTS();
}
