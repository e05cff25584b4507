// What HeldRuns says against what the store lists, with real disks, through all the ways in which
// blocks come and go.
#include "service/held_runs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/float16.h"
#include "storage/core/mutex.h"
#include "storage/rocks_disk_store.h"
#include "tests/cluster/sketches.h"
#include "tests/storage/disk_store_fixture.h"
#include "tests/storage/faulty_disk_store.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kDim = 64;
constexpr std::uint8_t kGroups = 2;

// A sequence of blocks; block i's key is its own, or that of the sequence it parted from.
struct Sequence {
  std::vector<BlockKey> keys;
};

class HeldRunsTest : public ::testing::Test {
 protected:
  static NamespaceSpec Spec(const std::string& tenant) {
    NamespaceSpec spec;
    spec.tenant = tenant;
    spec.model = "test";
    spec.hash_scheme = "test-1";
    spec.block_tokens = kTokens;
    spec.sink_blocks = 1000;  // All in 16 bits: large, and quickly made.
    for (std::uint16_t layer = 0; layer < kGroups; ++layer) {
      LayerGroup group;
      group.layers = {layer};
      group.kv_heads = 1;
      group.head_dim = kDim;
      spec.groups.push_back(group);
    }
    return spec;
  }

  void Open(std::unique_ptr<DiskStore> disk, HeldRuns::Options options = Fast()) {
    held_ = std::make_unique<HeldRuns>(options);
    TieredStore::Options store_options{.host_bytes = 16 << 20,  // Each tenant has an arena.
                                       .arena_bytes = 8 << 20,
                                       .blocks_max = 8192,
                                       .room_wait = absl::Seconds(60),
                                       .prefault = false};
    store_options.observer = held_.get();
    auto store = TieredStore::Create(store_options, SystemClock(), std::move(disk));
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    auto info = store_->OpenNamespace("test", Spec("default"));
    ASSERT_TRUE(info.ok()) << info.status();
    space_ = info->id;
    fingerprint_ = info->fingerprint;
    auto other = store_->OpenNamespace("test", Spec("uid-7"));
    ASSERT_TRUE(other.ok()) << other.status();
    other_ = other->id;
    MutexLock lock(told_mu_);
    told_.clear();
  }
  void Start() {
    held_->Start(*store_, [this](absl::Span<const Announcement> changes,
                                 absl::Span<const HeldTable::Left> left) {
      MutexLock lock(told_mu_);
      for (const Announcement& change : changes) {
        EXPECT_NE(told_[change.anchor_hash], change.sketch);
        told_[change.anchor_hash] = change.sketch;
        if (change.sketch.count == 0) told_.erase(change.anchor_hash);
      }
      for (const HeldTable::Left& block : left) left_.push_back(block.key_hash);
    });
  }
  void OpenRocks(HeldRuns::Options options = Fast()) {
    RocksDiskStoreOptions rocks;
    rocks.directory = directory_.Sub("disk");
    rocks.capacity_bytes = disk_bytes_;
    auto disk = RocksDiskStore::Open(rocks);
    ASSERT_TRUE(disk.ok()) << disk.status();
    Open(*std::move(disk), options);
    Start();
  }
  void Close() {
    held_->Stop();
    store_.reset();
    held_.reset();
  }
  void TearDown() override {
    if (held_ != nullptr) Close();
  }
  static HeldRuns::Options Fast() { return {.gather = std::chrono::milliseconds(1)}; }

  static BlockKey Key(std::uint64_t sequence, std::size_t index) {
    return *BlockKey::FromBytes(absl::StrFormat("sequence-%010d-block-%05d", sequence, index));
  }
  static Sequence Straight(std::uint64_t number, std::size_t count) {
    Sequence sequence;
    for (std::size_t i = 0; i < count; ++i) sequence.keys.push_back(Key(number, i));
    return sequence;
  }

  static BlockOrigin OriginOf(const Sequence& sequence, std::size_t index) {
    BlockOrigin origin;
    origin.token_count = kTokens;
    origin.block_index = static_cast<std::uint32_t>(index);
    if (index > 0) origin.parent = sequence.keys[index - 1];
    return origin;
  }
  // One layer group of a block; what it holds is of no meaning here.
  absl::Status Put(NamespaceId space, const BlockKey& key, const BlockOrigin& origin,
                   std::uint8_t group) {
    static const std::vector<std::uint16_t> values = [] {
      std::mt19937 random(5);
      std::normal_distribution<float> normal;
      std::vector<std::uint16_t> made(2 * kTokens * kDim);
      for (std::uint16_t& value : made) value = FloatToFloat16(normal(random));
      return made;
    }();
    auto writer = store_->BeginStore({space, group, key}, origin);
    if (!writer.ok()) return writer.status();
    const auto* k = reinterpret_cast<const std::byte*>(values.data());
    const auto* v = k + std::size_t{kTokens} * kDim * 2;
    HeadInput input;
    input.k = {.pages = &k, .page_tokens = origin.token_count, .token_stride_bytes = kDim * 2};
    input.v = {.pages = &v, .page_tokens = origin.token_count, .token_stride_bytes = kDim * 2};
    return writer->WriteHeads(0, 0, {input}).status();
  }
  void PutWhole(const Sequence& sequence, std::size_t index) {
    for (std::uint8_t group = 0; group < kGroups; ++group) {
      const absl::Status put = Put(space_, sequence.keys[index], OriginOf(sequence, index), group);
      ASSERT_TRUE(put.ok() || absl::IsAlreadyExists(put)) << put;
    }
  }
  std::uint64_t HashOfKey(const BlockKey& key) const { return KeyHash(fingerprint_, key); }

  // Keys of which every group is listed, and the bytes of all of them.
  std::map<std::string, std::uint64_t> ListedKeys() const {
    std::map<std::string, int> groups;
    std::map<std::string, std::uint64_t> bytes;
    store_->List([&](const TieredStore::BlockInfo& info) {
      if (info.namespace_id != space_) return true;
      ++groups[std::string(info.key.view())];
      bytes[std::string(info.key.view())] += info.bytes;
      return true;
    });
    for (const auto& [key, count] : groups) {
      if (count < kGroups) bytes.erase(key);
    }
    return bytes;
  }

  // Everything that HeldRuns says of these sequences, which are all that there are: empty, or the
  // first thing that is not so. What runs that sequences share may say lies between the longest
  // prefix and the first place without a block.
  std::string Difference(const std::vector<Sequence>& sequences) {
    held_->WaitSettled();
    const std::map<std::string, std::uint64_t> listed = ListedKeys();
    struct Run {
      std::uint8_t prefix = 0;
      std::set<std::string> keys;
      std::set<int> places;
      bool shared = false;
    };
    std::map<std::uint64_t, Run> runs;
    for (const Sequence& sequence : sequences) {
      for (std::size_t first = 0; first < sequence.keys.size(); first += kRunBlocks) {
        const auto [at, added] = runs.try_emplace(HashOfKey(sequence.keys[first]));
        Run& run = at->second;
        run.shared |= !added;
        bool prefix = true;
        for (std::size_t i = first; i < std::min(first + kRunBlocks, sequence.keys.size()); ++i) {
          const std::string key(sequence.keys[i].view());
          prefix &= listed.contains(key);
          if (prefix) run.prefix = std::max(run.prefix, static_cast<std::uint8_t>(i - first + 1));
          if (!listed.contains(key)) continue;
          run.keys.insert(key);
          run.places.insert(static_cast<int>(i - first));
        }
      }
    }
    std::map<std::uint64_t, RunSketch> sketches;
    for (const auto& [anchor_hash, run] : runs) {
      std::uint8_t without_gap = 0;
      while (run.places.contains(without_gap)) ++without_gap;
      const std::uint8_t count = CountOf(anchor_hash);
      if (count < run.prefix || count > (run.shared ? without_gap : run.prefix)) {
        return absl::StrFormat("a count of %d: the prefix is of %d, places without a gap %d", count,
                               run.prefix, without_gap);
      }
      if (count > 0) sketches[anchor_hash] = held_->SketchOf(anchor_hash);
      const HeldRuns::Run said = held_->RunOf(anchor_hash, 1000);
      if (said.blocks.size() < run.prefix) return "blocks of a prefix are missing";
      std::vector<std::pair<std::size_t, std::uint64_t>> hashes;
      for (const HeldRuns::Run::Block& block : said.blocks) {
        hashes.emplace_back(block.place, HashOfKey(block.key));
      }
      if (held_->SketchOf(anchor_hash) != SketchOfBlocks(hashes)) return "a sketch of other blocks";
      int place = 0;
      for (const HeldRuns::Run::Block& block : said.blocks) {
        const std::string key(block.key.view());
        const auto where = held_->PlaceOf(fingerprint_, block.key);
        if (said.fingerprint != fingerprint_ || !run.keys.contains(key) || block.place < place ||
            block.bytes != listed.at(key) || !where.has_value() ||
            where->anchor_hash != anchor_hash || where->place != block.place) {
          return absl::StrCat("block ", key, " is not what it is said to be");
        }
        place = block.place;
      }
    }
    if (held_->stats().blocks != listed.size()) {
      return absl::StrCat(held_->stats().blocks, " blocks, ", listed.size(), " are listed");
    }
    MutexLock lock(told_mu_);
    return told_ == sketches ? "" : "the listener heard something else";
  }
  std::uint8_t CountOf(std::uint64_t anchor_hash) const {
    return held_->SketchOf(anchor_hash).count;
  }
  // The disk drops epochs when it likes, so that the store may never rest; but it does soon.
  void ExpectAgrees(const std::vector<Sequence>& sequences) {
    std::string difference;
    for (int i = 0; i < 2000; ++i) {
      difference = Difference(sequences);
      if (difference.empty()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << difference;
  }
  std::map<std::uint64_t, RunSketch> Told() {
    MutexLock lock(told_mu_);
    return told_;
  }

  TempDirectory directory_;
  std::uint64_t disk_bytes_ = kDiskCapacityBytesMin;
  std::unique_ptr<HeldRuns> held_;  // Before the store: it outlives it.
  std::unique_ptr<TieredStore> store_;
  NamespaceId space_ = 0, other_ = 0;
  Fingerprint fingerprint_{};
  Mutex told_mu_;
  std::map<std::uint64_t, RunSketch> told_ ABSL_GUARDED_BY(told_mu_);
  std::vector<std::uint64_t> left_ ABSL_GUARDED_BY(told_mu_);  // Hashes.
};

TEST_F(HeldRunsTest, RunsOfTenantsThatAreSharedCountEachForItself) {
  HeldRuns::Options options = Fast();
  options.tenants = SharedTenants({.local_users = true});
  Open(nullptr, options);
  Start();
  const Sequence sequence = Straight(1, 3);
  const Fingerprint theirs = store_->FindNamespace(other_)->fingerprint;
  const auto hash_of_theirs = [&](std::size_t i) { return KeyHash(theirs, sequence.keys[i]); };
  const auto put = [&](NamespaceId space, std::size_t i) {
    for (std::uint8_t group = 0; group < kGroups; ++group) {
      ASSERT_TRUE(Put(space, sequence.keys[i], OriginOf(sequence, i), group).ok());
    }
  };
  // The same keys: three blocks of ours, two of theirs.
  for (std::size_t i = 0; i < 3; ++i) put(space_, i);
  for (std::size_t i = 0; i < 2; ++i) put(other_, i);
  held_->WaitSettled();
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 3);
  EXPECT_EQ(CountOf(hash_of_theirs(0)), 2);
  EXPECT_THAT(Told(), SizeIs(2));
  const HeldRuns::Run run = held_->RunOf(hash_of_theirs(0), 5);
  EXPECT_EQ(run.fingerprint, theirs);
  EXPECT_THAT(run.blocks, SizeIs(2));
  // What one loses the other has.
  ASSERT_TRUE(store_->Clear(space_).ok());
  held_->WaitSettled();
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 0);
  EXPECT_EQ(CountOf(hash_of_theirs(0)), 2);
}

TEST_F(HeldRunsTest, CountsTheFirstBlocksOfWhichAllGroupsAreHere) {
  Open(nullptr);
  Start();
  const Sequence sequence = Straight(1, 40);
  // Backwards, as threads may seal them, and first one group of all.
  for (std::uint8_t group = 0; group < kGroups; ++group) {
    held_->WaitSettled();
    EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 0);
    for (std::size_t i = sequence.keys.size(); i-- > 0;) {
      ASSERT_TRUE(Put(space_, sequence.keys[i], OriginOf(sequence, i), group).ok());
    }
  }
  // Others' blocks, and tails, are nobody's business.
  ASSERT_TRUE(Put(other_, sequence.keys[0], OriginOf(sequence, 0), 0).ok());
  ASSERT_TRUE(Put(other_, sequence.keys[0], OriginOf(sequence, 0), 1).ok());
  const BlockKey tail = TailKey(sequence.keys[39], 9, Key(1, 40));
  for (std::uint8_t group = 0; group < kGroups; ++group) {
    ASSERT_TRUE(Put(space_, tail,
                    {.parent = sequence.keys[39],
                     .token_count = 9,
                     .block_index = 40,
                     .tail_key = Key(1, 40)},
                    group)
                    .ok());
  }
  held_->WaitSettled();
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 32);
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[32])), 8);
  EXPECT_EQ(held_->stats().blocks, 40u);
  EXPECT_EQ(held_->stats().waiting, 0u);
  EXPECT_EQ(held_->stats().walks, 1u);
  EXPECT_THAT(Told(), SizeIs(2));
  const std::uint64_t second = HashOfKey(sequence.keys[32]);
  for (const std::size_t skip : {0u, 5u}) {
    const HeldRuns::Run run = skip == 0 ? held_->RunOf(second, 5)
                                        : held_->RunOf(second, 5, 4, HashOfKey(sequence.keys[36]));
    ASSERT_THAT(run.blocks, SizeIs(skip == 0 ? 5 : 3));
    EXPECT_EQ(run.more, skip == 0);
    for (std::size_t i = 0; i < run.blocks.size(); ++i) {
      EXPECT_EQ(run.blocks[i].key, sequence.keys[32 + skip + i]);
      EXPECT_EQ(run.blocks[i].place, skip + i);
    }
  }
  EXPECT_THAT(held_->RunOf(second, 5, 7, HashOfKey(sequence.keys[39])).blocks, IsEmpty());

  // One group of one block goes.
  ASSERT_TRUE(store_->Remove(space_, {sequence.keys[35]}).ok());
  held_->WaitSettled();
  {
    MutexLock lock(told_mu_);
    EXPECT_EQ(left_, std::vector<std::uint64_t>{HashOfKey(sequence.keys[35])});
  }
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[32])), 3);
  ASSERT_TRUE(store_->Clear(space_).ok());
  held_->WaitSettled();
  EXPECT_EQ(held_->stats().blocks, 0u);
  EXPECT_THAT(Told(), IsEmpty());
}

TEST_F(HeldRunsTest, RunsThatWereUsedMoreComeFirst) {
  Open(nullptr);
  Start();
  std::vector<Announcement> runs;
  for (std::uint64_t n = 0; n < 3; ++n) {
    const Sequence sequence = Straight(n, 2);
    for (std::size_t i = 0; i < 2; ++i) PutWhole(sequence, i);
    runs.push_back({HashOfKey(sequence.keys[0]), Places(2)});
  }
  held_->WaitSettled();
  const auto use = [&](std::uint64_t n, std::size_t index, int times) {
    for (int i = 0; i < times; ++i) {
      ASSERT_TRUE(store_->Fetch({space_, 0, Key(n, index)}).ok());
    }
  };
  const auto order = [&] {
    std::vector<Announcement> sorted = runs;
    held_->SortHottestFirst(&sorted);
    std::vector<std::size_t> places;
    for (const Announcement& run : sorted) {
      places.push_back(
          static_cast<std::size_t>(std::find(runs.begin(), runs.end(), run) - runs.begin()));
    }
    return places;
  };
  EXPECT_THAT(order(), ElementsAre(0, 1, 2));
  use(2, 1, 5);
  use(1, 0, 2);
  EXPECT_THAT(order(), ElementsAre(2, 1, 0));
  use(0, 0, 300);
  EXPECT_THAT(order(), ElementsAre(0, 2, 1));
  // A block that takes a place begins anew.
  ASSERT_TRUE(store_->Remove(space_, Straight(0, 2).keys).ok());
  for (std::size_t i = 0; i < 2; ++i) PutWhole(Straight(0, 2), i);
  held_->WaitSettled();
  EXPECT_THAT(order(), ElementsAre(2, 1, 0));
}

TEST_F(HeldRunsTest, CopiesOfPeersAreCountedByTheirAnchorAndMovesChangeNothing) {
  OpenRocks();
  const Sequence sequence = Straight(1, 8);
  // The pages, as another node has them.
  std::vector<std::vector<std::vector<std::byte>>> pages(sequence.keys.size());
  for (std::size_t i = 0; i < sequence.keys.size(); ++i) {
    PutWhole(sequence, i);
    for (std::uint8_t group = 0; group < kGroups; ++group) {
      auto ref = store_->Fetch({space_, group, sequence.keys[i]});
      ASSERT_TRUE(ref.ok()) << ref.status();
      pages[i].emplace_back(ref->pages()[0].begin(), ref->pages()[0].end());
    }
  }
  ASSERT_TRUE(store_->Clear(space_).ok());
  // Without block 0: then the anchor is nothing but a hash.
  for (std::size_t i = 1; i < sequence.keys.size(); ++i) {
    for (std::uint8_t group = 0; group < kGroups; ++group) {
      const auto bytes = static_cast<std::uint32_t>(pages[i][group].size());
      auto copy = store_->BeginCopy({space_, group, sequence.keys[i]},
                                    {.token_count = kTokens,
                                     .block_index = static_cast<std::uint32_t>(i),
                                     .anchor_hash = HashOfKey(sequence.keys[0])},
                                    {bytes}, absl::Seconds(60));
      ASSERT_TRUE(copy.ok()) << copy.status();
      std::copy(pages[i][group].begin(), pages[i][group].end(), copy->pages()[0].begin());
      ASSERT_TRUE(copy->Commit().ok());
    }
  }
  for (const bool restart : {false, true}) {
    if (restart) {
      Close();
      OpenRocks();
    }
    held_->WaitSettled();
    EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 0);
    EXPECT_EQ(held_->stats().waiting, 0u);
    for (std::size_t i = 1; i < sequence.keys.size(); ++i) {
      const auto place = held_->PlaceOf(fingerprint_, sequence.keys[i]);
      ASSERT_TRUE(place.has_value()) << restart << " " << i;
      EXPECT_EQ(place->anchor_hash, HashOfKey(sequence.keys[0]));
      EXPECT_EQ(place->place, i);
    }
  }
  PutWhole(sequence, 0);
  ExpectAgrees({sequence});
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 8);
  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  held_->WaitSettled();
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 8) << "they are on disk";
}

TEST_F(HeldRunsTest, WhatTheDiskLosesIsGone) {
  auto owned = std::make_unique<FaultyDiskStore>();
  FaultyDiskStore& faulty = *owned;
  Open(std::move(owned));
  Start();
  const Sequence sequence = Straight(1, 4);
  for (std::size_t i = 0; i < 4; ++i) PutWhole(sequence, i);
  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  ExpectAgrees({sequence});
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 4);
  // One group of block 2, by the cap.
  faulty.Evict({DiskBlockId{fingerprint_, 1, sequence.keys[2]}});
  ExpectAgrees({sequence});
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 2);
  // Damaged copies: found by a fetch.
  faulty.flip_read = true;
  EXPECT_FALSE(store_->Fetch({space_, 0, sequence.keys[1]}).ok());
  faulty.flip_read = false;
  ExpectAgrees({sequence});
  EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), 1);
}

TEST_F(HeldRunsTest, AFullQueueIsMadeUpForByAWalk) {
  // Nothing is taken out for so long that the queue overflows for certain.
  Open(nullptr, {.queue_max = 8, .gather = std::chrono::milliseconds(100)});
  std::vector<Sequence> sequences;
  for (std::uint64_t s = 0; s < 4; ++s) sequences.push_back(Straight(s, 40));
  for (std::size_t i = 0; i < 20; ++i) PutWhole(sequences[0], i);
  Start();
  ExpectAgrees(sequences);
  EXPECT_EQ(held_->stats().walks, 1u) << "what was here is found by the first walk";
  for (const Sequence& sequence : sequences) {
    for (std::size_t i = 40; i-- > 0;) PutWhole(sequence, i);
  }
  ExpectAgrees(sequences);
  const HeldRuns::Stats before = held_->stats();
  EXPECT_GT(before.dropped, 0u);
  EXPECT_GT(before.walks, 1u);
  ASSERT_TRUE(store_->Remove(space_, sequences[1].keys).ok());
  ExpectAgrees(sequences);
  EXPECT_GT(held_->stats().dropped, before.dropped);
  EXPECT_EQ(CountOf(HashOfKey(sequences[1].keys[0])), 0);
  EXPECT_EQ(CountOf(HashOfKey(sequences[2].keys[32])), 8);
}

TEST_F(HeldRunsTest, CatchesUpWithWhatWasStoredWhateverElseComes) {
  Open(nullptr);
  Start();
  const Sequence sequence = Straight(1, 8);
  std::atomic<bool> stop{false};
  std::thread others([&] {
    while (!stop) {
      held_->Changed({space_, 0, Key(2, 0)});
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  for (std::size_t i = 0; i < sequence.keys.size(); ++i) {
    PutWhole(sequence, i);
    EXPECT_TRUE(held_->CatchUp(std::chrono::seconds(30)));
    EXPECT_EQ(CountOf(HashOfKey(sequence.keys[0])), i + 1);
  }
  stop = true;
  others.join();
  held_->WaitSettled();
  EXPECT_TRUE(held_->CatchUp(std::chrono::seconds(0))) << "there is nothing to wait for";

  Close();
  Open(nullptr, {.gather = std::chrono::seconds(2)});
  Start();
  PutWhole(sequence, 0);
  EXPECT_FALSE(held_->CatchUp(std::chrono::milliseconds(1)));
}

TEST_F(HeldRunsTest, AgreesWithTheStoreWhateverComesAndGoesAndAfterRestarts) {
  std::mt19937_64 random(11);
  OpenRocks();
  // Of some 32 KiB a block: more than memory holds, and than the disk does.
  std::uint64_t evicted = 0;
  std::vector<Sequence> sequences;
  for (std::uint64_t s = 0; s < 12; ++s) {
    sequences.push_back(Straight(s, 70));
    if (s % 3 != 2) continue;
    // Parts from the one before.
    const std::size_t from = 1 + random() % 60;
    std::copy_n(sequences[s - 1].keys.begin(), from, sequences[s].keys.begin());
  }
  for (int round = 0; round < 4; ++round) {
    for (int step = 0; step < 30; ++step) {
      const Sequence& sequence = sequences[random() % sequences.size()];
      const std::size_t first = random() % sequence.keys.size();
      const std::size_t count = std::min(sequence.keys.size() - first, 1 + random() % 24);
      const std::vector<BlockKey> keys(
          sequence.keys.begin() + static_cast<std::ptrdiff_t>(first),
          sequence.keys.begin() + static_cast<std::ptrdiff_t>(first + count));
      switch (random() % 8) {
        case 0:
          ASSERT_TRUE(store_->Remove(space_, keys).ok());
          break;
        case 1:
          ASSERT_TRUE(store_->Evict(Tier::kHost, random() % (2 << 20)).ok());
          break;
        case 2:
          for (const BlockKey& key : keys) static_cast<void>(store_->Fetch({space_, 1, key}));
          break;
        case 3: {
          // Two threads, each from its end, and one group only.
          std::thread other([&] {
            for (std::size_t i = first; i < first + count; ++i) PutWhole(sequence, i);
          });
          for (std::size_t i = first + count; i-- > first;) {
            static_cast<void>(Put(space_, sequence.keys[i], OriginOf(sequence, i), 0));
          }
          other.join();
          break;
        }
        case 4:
          // Half of each.
          for (std::size_t i = first; i < first + count; ++i) {
            static_cast<void>(Put(space_, sequence.keys[i], OriginOf(sequence, i), 0));
          }
          break;
        default:
          for (std::size_t i = 0; i < std::min(first + count, sequence.keys.size()); ++i) {
            PutWhole(sequence, i);
          }
      }
      if (step % 10 == 9) ExpectAgrees(sequences);
      if (HasFatalFailure()) return;
    }
    if (round == 2) {
      ASSERT_TRUE(store_->Clear(space_).ok());
    }
    ExpectAgrees(sequences);
    const auto reasons = store_->stats().evicted_blocks[static_cast<std::size_t>(Tier::kDisk)];
    evicted += reasons[static_cast<std::size_t>(EvictReason::kCapacity)];
    Close();
    OpenRocks();
    ExpectAgrees(sequences);
    if (HasFailure()) return;
  }
  EXPECT_GT(store_->stats().tiers[static_cast<std::size_t>(Tier::kDisk)].blocks, 0u);
  EXPECT_GT(evicted, 0u) << "no epoch was dropped";
}

}  // namespace
}  // namespace kvmill
