// What readers of events believe against what the store lists, with a real disk, through all the
// ways in which blocks come, move and go.
#include "service/event_journal.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/float16.h"
#include "storage/rocks_disk_store.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using What = EventJournal::Part::What;

constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kDim = 64;
constexpr std::uint8_t kGroups = 2;

using Blocks = std::map<std::string, Tier>;  // "namespace key" -> tier.

// A router: believes what it is told. With `exact` nothing may be told twice.
class Follower {
 public:
  Follower(EventJournal& journal, const std::string& tenant, EventJournal::From from)
      : journal_(journal), exact_(from.exact) {
    auto reader = journal_.Open(tenant, from, [this] { Woken(); });
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (reader.ok()) reader_ = *reader;
  }
  ~Follower() {
    journal_.Close(reader_);
    // A wake may be running.
    MutexLock lock(mu_);
  }

  // At most `parts` of what there is; false when there was less.
  bool Read(int parts = 1 << 20) {
    for (int i = 0; i < parts; ++i) {
      EventJournal::Part part;
      const absl::StatusOr<bool> some = journal_.Next(*reader_, &part);
      EXPECT_TRUE(some.ok()) << some.status();
      if (!some.ok() || !*some) return false;
      Apply(part);
    }
    return true;
  }
  // Waits for the first part; then reads all.
  void ReadAll() {
    while (!begun_) {
      if (Read() || begun_) continue;
      MutexLock lock(mu_);
      while (!woken_) changed_.Wait(mu_);
      woken_ = false;
    }
    Read();
  }

  const Blocks& blocks() const { return blocks_; }
  std::uint64_t sequence() const { return sequence_; }
  int snapshots() const { return snapshots_; }
  std::vector<std::string> TakeLog() { return std::exchange(log_, {}); }
  std::vector<BlockEvent> events;  // Those that were no snapshot.

 private:
  void Woken() {
    MutexLock lock(mu_);
    woken_ = true;
    changed_.NotifyAll();
  }
  void Apply(const EventJournal::Part& part) {
    if (part.what == What::kSnapshotBegin) {
      blocks_.clear();
      ++snapshots_;
      in_snapshot_ = !exact_;
    }
    const bool snapshot = part.what != What::kEvents && part.what != What::kPosition;
    if (part.what == What::kSnapshotEnd) in_snapshot_ = false;
    if (!in_snapshot_) begun_ = true;
    if (part.what == What::kEvents) {
      EXPECT_GT(part.sequence, sequence_);
    }
    if (!in_snapshot_) sequence_ = part.sequence;
    for (const BlockEvent& event : part.events) {
      if (!snapshot) {
        events.push_back(event);
        log_.push_back(absl::StrCat(BlockEventName(event.kind), " ", event.key.view()));
      }
      const std::string name = absl::StrCat(event.namespace_id, " ", event.key.view());
      switch (event.kind) {
        case BlockEvent::Kind::kStored:
          if (exact_) {
            EXPECT_FALSE(blocks_.contains(name)) << name << " is stored twice";
          }
          blocks_[name] = event.tier;
          break;
        case BlockEvent::Kind::kMoved:
          EXPECT_NE(event.from, event.tier);
          if (exact_) {
            EXPECT_EQ(blocks_.at(name), event.from);
          }
          blocks_[name] = event.tier;
          break;
        case BlockEvent::Kind::kRemoved:
          if (exact_) {
            EXPECT_EQ(blocks_.at(name), event.tier);
          }
          blocks_.erase(name);
          break;
        case BlockEvent::Kind::kCleared:
          std::erase_if(blocks_, [&](const auto& block) {
            return block.first.starts_with(absl::StrCat(event.namespace_id, " "));
          });
          break;
      }
    }
  }

  EventJournal& journal_;
  const bool exact_;
  EventJournal::ReaderPtr reader_;
  Blocks blocks_;
  bool begun_ = false, in_snapshot_ = false;
  std::uint64_t sequence_ = 0;
  int snapshots_ = 0;
  std::vector<std::string> log_;
  Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
};

class EventJournalTest : public ::testing::Test {
 protected:
  static NamespaceSpec Spec(const std::string& tenant, const std::string& model) {
    NamespaceSpec spec;
    spec.tenant = tenant;
    spec.model = model;
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

  void Open(EventJournal::Options options = Fast(), bool disk = true) {
    journal_ = std::make_unique<EventJournal>(options);
    TieredStore::Options store_options{.host_bytes = 16 << 20,
                                       .arena_bytes = 8 << 20,
                                       .blocks_max = 8192,
                                       .room_wait = absl::Seconds(60),
                                       .prefault = false};
    store_options.observer = journal_.get();
    std::unique_ptr<DiskStore> rocks;
    if (disk) {
      RocksDiskStoreOptions rocks_options;
      rocks_options.directory = directory_.Sub("disk");
      rocks_options.capacity_bytes = kDiskCapacityBytesMin;
      auto opened = RocksDiskStore::Open(rocks_options);
      ASSERT_TRUE(opened.ok()) << opened.status();
      rocks = *std::move(opened);
    }
    auto store = TieredStore::Create(store_options, SystemClock(), std::move(rocks));
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    journal_->Start(*store_);
    space_ = OpenSpace("default", "one");
    second_ = OpenSpace("default", "two");
    other_ = OpenSpace("uid-7", "one");
  }
  NamespaceId OpenSpace(const std::string& tenant, const std::string& model) {
    const auto info = store_->OpenNamespace(model, Spec(tenant, model));
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() ? info->id : 0;
  }
  void Close() {
    journal_->Stop(absl::OkStatus());
    store_.reset();
    journal_.reset();
  }
  void TearDown() override {
    if (journal_ != nullptr) Close();
  }
  static EventJournal::Options Fast() { return {.gather = std::chrono::milliseconds(1)}; }

  static BlockKey Key(std::uint64_t number) {
    return *BlockKey::FromBytes(absl::StrFormat("block-%026d", number));
  }
  static std::string Name(std::uint64_t number) { return absl::StrFormat("block-%026d", number); }

  absl::Status PutGroup(NamespaceId space, std::uint64_t number, std::uint8_t group) {
    static const std::vector<std::uint16_t> values = [] {
      std::mt19937 random(5);
      std::normal_distribution<float> normal;
      std::vector<std::uint16_t> made(2 * kTokens * kDim);
      for (std::uint16_t& value : made) value = FloatToFloat16(normal(random));
      return made;
    }();
    BlockOrigin origin;
    origin.token_count = kTokens;
    origin.block_index = static_cast<std::uint32_t>(number % 100);
    if (origin.block_index > 0) origin.parent = Key(number - 1);
    auto writer = store_->BeginStore({space, group, Key(number)}, origin);
    if (!writer.ok()) return writer.status();
    const auto* k = reinterpret_cast<const std::byte*>(values.data());
    const auto* v = k + std::size_t{kTokens} * kDim * 2;
    HeadInput input;
    input.k = {.pages = &k, .page_tokens = kTokens, .token_stride_bytes = kDim * 2};
    input.v = {.pages = &v, .page_tokens = kTokens, .token_stride_bytes = kDim * 2};
    return writer->WriteHeads(0, 0, {input}).status();
  }
  void Put(NamespaceId space, std::uint64_t number) {
    for (std::uint8_t group = 0; group < kGroups; ++group) {
      const absl::Status put = PutGroup(space, number, group);
      // Another thread may remove it while it is stored.
      ASSERT_TRUE(put.ok() || absl::IsAlreadyExists(put) || absl::IsAborted(put)) << put;
    }
  }
  std::uint64_t Remove(NamespaceId space, std::uint64_t number) {
    const auto removed = store_->Remove(space, {Key(number)});
    EXPECT_TRUE(removed.ok()) << removed.status();
    return removed.value_or(0);
  }

  // Whole blocks of a tenant's namespaces.
  Blocks Listed(const std::vector<NamespaceId>& spaces) const {
    std::map<std::string, std::pair<int, Tier>> found;
    store_->List([&](const TieredStore::BlockInfo& info) {
      if (std::find(spaces.begin(), spaces.end(), info.namespace_id) == spaces.end()) return true;
      const std::string name = absl::StrCat(info.namespace_id, " ", info.key.view());
      const auto [at, added] = found.try_emplace(name, 0, info.tier);
      ++at->second.first;
      at->second.second = std::max(at->second.second, info.tier);
      return true;
    });
    Blocks listed;
    for (const auto& [name, block] : found) {
      if (block.first == kGroups) listed[name] = block.second;
    }
    return listed;
  }

  TempDirectory directory_;
  std::unique_ptr<EventJournal> journal_;  // Before the store: it outlives it.
  std::unique_ptr<TieredStore> store_;
  NamespaceId space_ = 0, second_ = 0, other_ = 0;
};

TEST_F(EventJournalTest, TellsOfBlocksThatComeMoveAndGo) {
  Open();
  Follower router(*journal_, "default", {});
  router.ReadAll();
  EXPECT_EQ(router.snapshots(), 0);
  Put(space_, 0);
  Put(space_, 1);
  ASSERT_TRUE(PutGroup(space_, 2, 0).ok());  // Not whole: no block yet.
  journal_->WaitSettled();
  router.Read();
  EXPECT_THAT(router.TakeLog(), ElementsAre("stored " + Name(0), "stored " + Name(1)));
  EXPECT_TRUE(router.events[0].parent.empty());
  EXPECT_EQ(router.events[1].parent, Key(0));
  EXPECT_EQ(router.events[1].token_count, kTokens);
  EXPECT_EQ(router.events[1].tier, Tier::kHost);

  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Evict(Tier::kHost, 16 << 20).ok());
  journal_->WaitSettled();
  router.Read();
  EXPECT_EQ(router.TakeLog().size(), 2u);
  EXPECT_EQ(router.events[2].from, Tier::kHost);
  EXPECT_EQ(router.events[2].tier, Tier::kDisk);
  // Of a block the slower group counts.
  ASSERT_TRUE(store_->Fetch({space_, 0, Key(1)}).ok());
  journal_->WaitSettled();
  router.Read();
  EXPECT_THAT(router.TakeLog(), IsEmpty());
  ASSERT_TRUE(store_->Fetch({space_, 1, Key(1)}).ok());
  journal_->WaitSettled();
  router.Read();
  EXPECT_THAT(router.TakeLog(), ElementsAre("moved " + Name(1)));

  Remove(space_, 0);
  Remove(space_, 1);
  Put(space_, 1);  // Anew.
  journal_->WaitSettled();
  router.Read();
  EXPECT_EQ(router.blocks(), Listed({space_}));
  EXPECT_THAT(router.blocks(),
              ElementsAre(std::pair(absl::StrCat(space_, " ", Name(1)), Tier::kHost)));
  EXPECT_EQ(journal_->stats().dropped, 0u);
}

TEST_F(EventJournalTest, AReaderGoesOnWhereItWasOrGetsASnapshot) {
  EventJournal::Options options = Fast();
  options.events_max = 10;
  Open(options, /*disk=*/false);
  Put(space_, 1000);  // Before anybody reads.
  std::uint64_t sequence = 0;
  {
    Follower first(*journal_, "default", {.snapshot = true});
    first.ReadAll();
    EXPECT_EQ(first.blocks(), Listed({space_}));
    sequence = first.sequence();
  }
  for (std::uint64_t n = 0; n < 10; ++n) Put(space_, n);
  journal_->WaitSettled();
  {
    Follower again(*journal_, "default", {.sequence = sequence});
    again.ReadAll();
    EXPECT_EQ(again.snapshots(), 0);
    EXPECT_EQ(again.events.size(), 10u);
    EXPECT_EQ(again.sequence(), sequence + 10);
  }
  Put(space_, 10);
  journal_->WaitSettled();
  for (const std::uint64_t missed : {sequence, sequence + 1000}) {  // Not kept; never was.
    Follower late(*journal_, "default", {.sequence = missed});
    late.ReadAll();
    EXPECT_EQ(late.snapshots(), 1);
    EXPECT_THAT(late.events, IsEmpty());
    EXPECT_EQ(late.blocks(), Listed({space_}));
  }
  // One that is there, but slow: it is told how many events it was not.
  Follower slow(*journal_, "default", {});
  slow.ReadAll();
  for (std::uint64_t n = 20; n < 33; ++n) Put(space_, n);
  journal_->WaitSettled();
  EXPECT_EQ(journal_->stats().dropped, 0u);
  slow.Read();
  EXPECT_EQ(slow.snapshots(), 1);
  EXPECT_EQ(slow.blocks(), Listed({space_}));
  EXPECT_EQ(journal_->stats().dropped, 3u);
}

TEST_F(EventJournalTest, TenantsAndNamespacesAreApart) {
  Open(Fast(), /*disk=*/false);
  Put(other_, 1);
  Follower mine(*journal_, "default", {.snapshot = true});
  Follower second(*journal_, "default", {.snapshot = true, .only = second_});
  Follower theirs(*journal_, "uid-7", {.snapshot = true});
  for (std::uint64_t n = 0; n < 20; ++n) Put(other_, n);
  Put(space_, 1);
  Put(second_, 2);
  journal_->WaitSettled();
  for (Follower* one : {&mine, &second, &theirs}) one->ReadAll();
  EXPECT_EQ(mine.blocks(), Listed({space_, second_}));
  EXPECT_EQ(second.blocks(), Listed({second_}));
  EXPECT_EQ(theirs.blocks(), Listed({other_}));
  // Numbers say nothing of others either.
  EXPECT_LE(mine.sequence(), 2u);
}

TEST_F(EventJournalTest, ClearIsOneEventAndWhatComesMeanwhileStays) {
  Open();
  Follower router(*journal_, "default", {.snapshot = true, .exact = true});
  for (std::uint64_t n = 0; n < 50; ++n) Put(space_, n);
  Put(second_, 7);
  journal_->WaitSettled();
  router.ReadAll();
  router.TakeLog();
  std::thread storing([this] {
    for (std::uint64_t n = 100; n < 200; ++n) Put(space_, n);
  });
  ASSERT_TRUE(store_->Clear(space_).ok());
  storing.join();
  journal_->WaitSettled();
  router.Read();
  EXPECT_EQ(router.blocks(), Listed({space_, second_}));
  const std::vector<std::string> log = router.TakeLog();
  EXPECT_EQ(std::count(log.begin(), log.end(), "cleared "), 1);
  // The 50 are in it.
  EXPECT_EQ(std::count_if(log.begin(), log.end(),
                          [](const std::string& line) { return line.starts_with("removed "); }),
            0);
  ASSERT_TRUE(store_->Clear(space_).ok());
  ASSERT_TRUE(store_->Clear(space_).ok());  // Nothing happens.
  journal_->WaitSettled();
  router.Read();
  EXPECT_THAT(router.TakeLog(), ElementsAre("cleared "));
}

TEST_F(EventJournalTest, WhatFoundTheQueueFullIsFoundInTheStore) {
  EventJournal::Options options = Fast();
  options.queue_max = 3;
  options.gather = std::chrono::milliseconds(20);
  Open(options);
  Follower router(*journal_, "default", {.snapshot = true, .exact = true});
  router.ReadAll();
  for (std::uint64_t n = 0; n < 300; ++n) Put(space_, n);
  for (std::uint64_t n = 0; n < 300; n += 3) Remove(space_, n);
  journal_->WaitSettled();
  router.Read();
  EXPECT_GT(journal_->stats().skipped, 0u);
  EXPECT_GT(journal_->stats().walks, 1u);
  EXPECT_EQ(router.snapshots(), 1);  // It is told of the differences, and saw no gap.
  EXPECT_EQ(router.blocks(), Listed({space_}));
  EXPECT_EQ(router.blocks().size(), 200u);
}

TEST_F(EventJournalTest, LimitsAndTheEnd) {
  EventJournal::Options options = Fast();
  options.readers_max = 5;
  options.tenant_readers_max = 2;
  options.tenants_max = 3;
  Open(options, /*disk=*/false);
  std::vector<EventJournal::ReaderPtr> readers;
  const auto open = [&](const std::string& tenant) {
    auto reader = journal_->Open(tenant, {}, [] {});
    if (reader.ok()) readers.push_back(*reader);
    return std::string(reader.status().message());
  };
  // Others take what they can: the daemon's own tenant gets in all the same.
  EXPECT_EQ(open("uid-7"), "");
  EXPECT_EQ(open("uid-7"), "");
  EXPECT_THAT(open("uid-7"), HasSubstr("2 callers of this tenant watch events: at most 2"));
  EXPECT_EQ(open("uid-8"), "");
  EXPECT_THAT(open("uid-8"), HasSubstr("3 callers watch events: at most 3"));
  journal_->Close(readers.front());
  EXPECT_THAT(open("uid-9"), HasSubstr("events of 2 tenants are read: at most 2 at once"));
  EXPECT_EQ(open("uid-8"), "");
  EXPECT_EQ(open("default"), "");
  EXPECT_EQ(open("default"), "");
  EXPECT_THAT(open("default"), HasSubstr("2 callers of this tenant"));
  EXPECT_THAT(open("uid-9"), HasSubstr("at most 3"));
  EXPECT_EQ(journal_->stats().readers, 5u);
  for (const EventJournal::ReaderPtr& reader : readers) journal_->Close(reader);
  EXPECT_EQ(journal_->stats().readers, 0u);
  {
    // Nobody reads uid-7 any more: it makes room, and who comes back begins anew.
    Put(other_, 1);
    Follower theirs(*journal_, "uid-9", {.snapshot = true});
    theirs.ReadAll();
  }
  Follower again(*journal_, "uid-7", {.sequence = 0});
  again.ReadAll();
  EXPECT_EQ(again.snapshots(), 1);
  EXPECT_EQ(again.blocks(), Listed({other_}));

  bool woken = false;
  auto third = journal_->Open("default", {}, [&woken] { woken = true; });
  ASSERT_TRUE(third.ok());
  EventJournal::Part part;
  while (*journal_->Next(**third, &part)) continue;
  journal_->Stop(absl::UnavailableError("the daemon stops"));
  EXPECT_TRUE(woken);
  EXPECT_EQ(journal_->Next(**third, &part).status(), absl::UnavailableError("the daemon stops"));
  EXPECT_EQ(journal_->Open("default", {}, [] {}).status(),
            absl::UnavailableError("the daemon stops"));
  journal_->Close(*third);
}

TEST_F(EventJournalTest, WhoIsRevokedEnds) {
  Open(Fast(), /*disk=*/false);
  const std::uint64_t before = journal_->revocations();
  const auto woken = std::make_shared<std::atomic<int>>(0);
  const auto open = [&](const std::string& tenant, std::optional<std::uint64_t> revocations) {
    return *journal_->Open(tenant, {.revocations = revocations}, [woken] { ++*woken; });
  };
  const auto remote = open("team-b", before);
  const auto local = open("team-b", std::nullopt);
  const auto another = open("team-a", before);
  journal_->Revoke({"team-b", "team-c"});
  EXPECT_EQ(*woken, 1);
  EXPECT_TRUE(journal_->Ended(*remote));
  EventJournal::Part part;
  EXPECT_TRUE(absl::IsAborted(journal_->Next(*remote, &part).status()));
  for (const EventJournal::ReaderPtr& stays : {local, another}) {
    EXPECT_FALSE(journal_->Ended(*stays));
    EXPECT_TRUE(journal_->Next(*stays, &part).ok());
  }
  // Who it is was looked up before.
  EXPECT_TRUE(absl::IsAborted(journal_->Open("team-b", {.revocations = before}, [] {}).status()));
  const auto anew = open("team-b", journal_->revocations());
  EXPECT_TRUE(journal_->Next(*anew, &part).ok());
  for (const auto& reader : {remote, local, another, anew}) journal_->Close(reader);
}

TEST_F(EventJournalTest, WhatNobodyReadsIsGivenUp) {
  EventJournal::Options options = Fast();
  options.unread_max = std::chrono::milliseconds(20);
  Open(options, /*disk=*/false);
  std::uint64_t sequence = 0;
  {
    Follower router(*journal_, "default", {.snapshot = true});
    Put(space_, 1);
    journal_->WaitSettled();
    router.ReadAll();
    sequence = router.sequence();
    EXPECT_EQ(journal_->stats().blocks, 1u);
    EXPECT_GE(journal_->stats().bytes, 105u);
  }
  while (journal_->stats().bytes != 0) std::this_thread::yield();
  Remove(space_, 1);
  Put(space_, 2);  // Nobody is told.
  Follower again(*journal_, "default", {.sequence = sequence});
  again.ReadAll();
  EXPECT_EQ(again.snapshots(), 1);
  EXPECT_EQ(again.blocks(), Listed({space_}));
  Put(space_, 3);
  journal_->WaitSettled();
  again.Read();
  EXPECT_EQ(again.blocks(), Listed({space_}));
}

TEST_F(EventJournalTest, WhatHappensDuringASnapshotIsKeptForItsReader) {
  EventJournal::Options options = Fast();
  options.events_max = 10;
  Open(options, /*disk=*/false);
  Follower router(*journal_, "default", {.snapshot = true});
  for (std::uint64_t n = 0; n < 60; ++n) Put(space_, n);
  journal_->WaitSettled();
  EXPECT_TRUE(router.Read(1));  // The beginning.
  for (std::uint64_t n = 60; n < 120; ++n) Put(space_, n);
  for (std::uint64_t n = 0; n < 20; ++n) Remove(space_, n);
  journal_->WaitSettled();
  router.Read();
  EXPECT_EQ(router.snapshots(), 1);
  EXPECT_EQ(router.blocks(), Listed({space_}));
  EXPECT_EQ(journal_->stats().dropped, 0u);
  // It is there: no more than before is kept.
  for (std::uint64_t n = 120; n < 150; ++n) Put(space_, n);
  journal_->WaitSettled();
  router.Read();
  EXPECT_EQ(router.snapshots(), 2);
  EXPECT_EQ(journal_->stats().dropped, 20u);
}

// Threads store, remove, evict, load, flush and clear at random, while readers of every kind come,
// read fast or slowly, and go on where others were. When all is quiet each believes what the store
// lists; exact ones were told nothing twice.
TEST_F(EventJournalTest, RandomOperationsUnderConcurrencyAgreeWithTheStore) {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  EventJournal::Options options = Fast();
  options.queue_max = 64;
  options.events_max = 200;
  Open(options);
  Follower exact(*journal_, "default", {.snapshot = true, .exact = true});
  Follower fuzzy(*journal_, "default", {.snapshot = true});
  Follower slow(*journal_, "default", {.snapshot = true});
  Follower filtered(*journal_, "default", {.snapshot = true, .only = second_});
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([this, seed, t, &running] {
      std::mt19937_64 random(seed + static_cast<std::uint64_t>(t));
      for (int i = 0; i < 1200; ++i) {
        const NamespaceId space = random() % 3 == 0 ? second_ : space_;
        const std::uint64_t number = random() % 150;
        switch (random() % 24) {
          case 0:
            store_->Evict(Tier::kHost, (random() % 64) << 10).IgnoreError();
            break;
          case 1:
            store_->Flush().IgnoreError();
            break;
          case 2:
            if (random() % 8 == 0) store_->Clear(space).IgnoreError();
            break;
          case 3:
          case 4:
          case 5:
          case 6:
            store_->Fetch({space, static_cast<std::uint8_t>(random() % 2), Key(number)})
                .status()
                .IgnoreError();
            break;
          case 7:
          case 8:
          case 9:
          case 10:
          case 11:
          case 12:
            Remove(space, number);
            break;
          default:
            Put(space, number);
        }
      }
      --running;
    });
  }
  std::uint64_t before = 0;
  int comers = 0;
  while (running > 0) {
    exact.ReadAll();
    fuzzy.Read(2);
    slow.Read(1);
    filtered.Read();
    if (++comers % 10 == 0) {
      Follower goes_on(*journal_, "default", {.sequence = before});
      goes_on.Read(3);
    }
    before = exact.sequence();
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  journal_->WaitSettled();
  Follower late(*journal_, "default", {.snapshot = true});
  const Blocks listed = Listed({space_, second_});
  for (Follower* one : {&exact, &fuzzy, &slow, &late}) {
    one->ReadAll();
    EXPECT_EQ(one->blocks(), listed);
  }
  filtered.ReadAll();
  EXPECT_EQ(filtered.blocks(), Listed({second_}));
  EXPECT_EQ(journal_->stats().blocks, listed.size());
}

}  // namespace
}  // namespace kvmill
