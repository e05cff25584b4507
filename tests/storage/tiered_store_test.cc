#include "storage/tiered_store.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

TEST_F(TieredStoreTest, StoredBlockIsFoundAndFetched) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  const std::vector<BlockKey> keys = {Key(1), Key(2), Key(3)};
  const TieredStore::LookupResult found = store_->Lookup(space_, keys);
  EXPECT_EQ(found.hit_blocks, 2u);
  EXPECT_EQ(found.hit_tokens, 2u * kTokens);
  EXPECT_EQ(found.tiers, (std::vector<Tier>{Tier::kHost, Tier::kHost}));
  EXPECT_TRUE(GetIs(1));
  EXPECT_TRUE(GetIs(2));
  EXPECT_EQ(store_->Fetch(Id(3)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TieredStoreTest, BlockIsInvisibleUntilEveryHeadIsThere) {
  Open(false);
  auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
  ASSERT_TRUE(writer.ok());
  const Values values = ValuesOf(1);
  ASSERT_TRUE(WriteHead(*writer, values, 0, 0).ok());
  ASSERT_TRUE(WriteHead(*writer, values, 1, 1).ok());
  ASSERT_TRUE(WriteHead(*writer, values, 1, 0).ok());
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound);
  auto last = WriteHead(*writer, values, 0, 1);
  ASSERT_TRUE(last.ok());
  EXPECT_TRUE(last->sealed);
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreTest, SecondStoreKeepsTheFirstBytes) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(Put(Id(1), {.token_count = kTokens}, ValuesOf(99)).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(GetIs(1));
  EXPECT_EQ(store_->stats().existing_blocks, 1u);
}

TEST_F(TieredStoreTest, TwoWritersShareAnAssemblyAndTheFirstRecordWins) {
  Open(false);
  auto a = store_->BeginStore(Id(1), {.token_count = kTokens});
  auto b = store_->BeginStore(Id(1), {.token_count = kTokens});
  ASSERT_TRUE(a.ok() && b.ok());
  const Values right = ValuesOf(1);
  const Values other = ValuesOf(77);
  ASSERT_TRUE(WriteHead(*a, right, 0, 0).ok());
  auto second = WriteHead(*b, other, 0, 0);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->existing_heads, 1u);
  ASSERT_TRUE(WriteHead(*b, right, 0, 1).ok());
  ASSERT_TRUE(WriteHead(*b, right, 1, 0).ok());
  ASSERT_TRUE(WriteHead(*a, right, 1, 1).ok());
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreTest, NonFiniteInputIsNamedAndNothingStays) {
  Open(false);
  Values values = ValuesOf(1);
  // Layer 1, head 0, V, token 5, channel 7.
  values[(std::size_t{1} * kHeads + 0) * 2 * kTokens * kDim + std::size_t{kTokens} * kDim +
         5 * kDim + 7] = 0x7E00;
  const absl::Status put = Put(Id(1), {.token_count = kTokens}, values);
  EXPECT_EQ(put.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(put.message().find("V of layer 1 head 0 token 5 channel 7"), absl::string_view::npos)
      << put;
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  ASSERT_TRUE(Put(1).ok()) << "the key must be free again";
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreTest, HeadThatATileCannotHoldStaysRaw) {
  Open(false);
  Values values = ValuesOf(1);
  const std::size_t head_values = std::size_t{2} * kTokens * kDim;
  // Layer 0, head 1: every value 60000, whose scales overflow fp16 once rotated.
  for (std::size_t i = 0; i < head_values; ++i) values[head_values + i] = FloatToFloat16(60000.0f);
  ASSERT_TRUE(Put(Id(1), {.token_count = kTokens}, values).ok());
  auto ref = store_->Fetch(Id(1));
  ASSERT_TRUE(ref.ok());
  auto page = PageView::Parse(ref->pages()[0]);
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(page->slot(0).kind, SlotKind::kTile);
  ASSERT_EQ(page->slot(1).kind, SlotKind::kRaw);
  EXPECT_TRUE(page->VerifySlot(1).ok());
  EXPECT_EQ(std::memcmp(page->contents(1).data(), values.data() + head_values, head_values * 2), 0);
  EXPECT_EQ(store_->stats().raw_blocks, 1u);
}

TEST_F(TieredStoreTest, SinkBlocksAndTailsAreRaw) {
  NamespaceSpec spec = Spec();
  spec.sink_blocks = 1;
  Open(false, spec);
  ASSERT_TRUE(Put(Id(1), {.token_count = kTokens, .block_index = 0}, ValuesOf(1)).ok());
  ASSERT_TRUE(
      Put(Id(2), {.parent = Key(1), .token_count = kTokens, .block_index = 1}, ValuesOf(2)).ok());
  const BlockId tail{space_, 0, TailKey(Key(2), 10, Key(30))};
  ASSERT_TRUE(Put(tail,
                  {.parent = Key(2), .token_count = 10, .block_index = 2, .tail_key = Key(30)},
                  ValuesOf(3, 10))
                  .ok());
  const auto kind = [&](const BlockId& id) {
    auto ref = store_->Fetch(id);
    return PageView::Parse(ref->pages()[0])->slot(0).kind;
  };
  EXPECT_EQ(kind(Id(1)), SlotKind::kRaw);
  EXPECT_EQ(kind(Id(2)), SlotKind::kTile);
  EXPECT_EQ(kind(tail), SlotKind::kRaw);

  const std::vector<TailCandidate> wanted = {{Key(30), 9, 2}, {Key(30), 10, 2}, {Key(30), 11, 2}};
  const TieredStore::LookupResult found = store_->Lookup(space_, {Key(1), Key(2)}, wanted);
  EXPECT_EQ(found.hit_blocks, 2u);
  EXPECT_EQ(found.tail_tokens, 10u);
  EXPECT_TRUE(found.tail_key == tail.key);
}

// Sequences that go on differently after the same block, with tails of one length and of several.
TEST_F(TieredStoreTest, ContinuationsOfOneParentHaveTailsOfTheirOwn) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  const auto put_tail = [&](std::uint64_t key, std::uint32_t tokens, std::uint64_t values) {
    return Put({space_, 0, TailKey(Key(1), tokens, Key(key))},
               {.parent = Key(1), .token_count = tokens, .block_index = 1, .tail_key = Key(key)},
               ValuesOf(values, tokens));
  };
  ASSERT_TRUE(put_tail(20, 10, 2).ok());
  ASSERT_TRUE(put_tail(30, 10, 3).ok());
  ASSERT_TRUE(put_tail(31, 12, 4).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(put_tail(30, 10, 5))) << "the first bytes stay";
  const auto expect_all = [&] {
    const auto value_of = [&](const TieredStore::LookupResult& found) {
      auto ref = store_->Fetch({space_, 0, found.tail_key});
      EXPECT_TRUE(ref.ok()) << ref.status();
      if (!ref.ok()) return Values();
      const auto* first = reinterpret_cast<const std::uint16_t*>(
          PageView::Parse(ref->pages()[0])->contents(0).data());
      return Values(first, first + std::size_t{2} * ref->token_count() * kDim);
    };
    const auto head = [&](std::uint64_t values, std::uint32_t tokens) {
      const Values all = ValuesOf(values, tokens);
      return Values(all.begin(), all.begin() + std::ptrdiff_t{2} * tokens * kDim);
    };
    const auto look = [&](std::vector<TailCandidate> tails) {
      return store_->Lookup(space_, {Key(1), Key(9)}, tails);
    };
    EXPECT_TRUE(value_of(look({{Key(20), 10, 1}})) == head(2, 10));
    EXPECT_TRUE(value_of(look({{Key(30), 10, 1}})) == head(3, 10));
    // The longest counts, wherever it stands.
    const auto longest = look({{Key(30), 10, 1}, {Key(31), 12, 1}, {Key(20), 10, 1}});
    EXPECT_EQ(longest.tail_tokens, 12u);
    EXPECT_TRUE(value_of(longest) == head(4, 12));
    // What nobody stored: another length, another place, another continuation.
    EXPECT_EQ(look({{Key(30), 11, 1}}).tail_tokens, 0u);
    EXPECT_EQ(look({{Key(30), 10, 0}, {Key(30), 10, 2}}).tail_tokens, 0u);
    EXPECT_EQ(look({{Key(40), 10, 1}}).tail_tokens, 0u);
  };
  expect_all();
  // One of them becomes a whole block. Which tails it began with is not in their keys: all stay.
  ASSERT_TRUE(
      Put(Id(9), {.parent = Key(1), .token_count = kTokens, .block_index = 1}, ValuesOf(2)).ok());
  EXPECT_EQ(store_->Lookup(space_, {Key(1), Key(9)}, {{Key(20), 10, 1}}).tail_tokens, 0u)
      << "behind the hit blocks there is none";
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}, {{Key(20), 10, 1}}).tail_tokens, 10u);
  ASSERT_TRUE(store_->Remove(space_, {Key(9)}).ok());
  ASSERT_TRUE(store_->Flush().ok());
  store_.reset();
  Open(true);
  expect_all();
}

TEST_F(TieredStoreTest, BadRequestsNameValueAndLimit) {
  Open(false);
  const auto message = [&](const BlockId& id, const BlockOrigin& origin) {
    auto begun = store_->BeginStore(id, origin);
    EXPECT_EQ(begun.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(begun.status().message());
  };
  EXPECT_NE(message(Id(1), {.token_count = 65}).find("token_count 65: want 1 to 64"),
            std::string::npos);
  EXPECT_NE(message(Id(1), {.token_count = 0}).find("token_count 0"), std::string::npos);
  EXPECT_NE(message(Id(1), {.token_count = 5}).find("tail"), std::string::npos);
  EXPECT_NE(
      message({space_, 0, TailKey(BlockKey(), 5, BlockKey())}, {.token_count = 5}).find("key"),
      std::string::npos);
  EXPECT_NE(
      message({space_, 0, TailKey(BlockKey(), 5, Key(1))}, {.token_count = 5, .tail_key = Key(2)})
          .find("key"),
      std::string::npos);
  EXPECT_NE(message({space_, 1, Key(1)}, {.token_count = 64}).find("layer group 1"),
            std::string::npos);
  EXPECT_NE(message({99, 0, Key(1)}, {.token_count = 64}).find("namespace 99"), std::string::npos);
  auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
  ASSERT_TRUE(writer.ok());
  const Values values = ValuesOf(1);
  EXPECT_EQ(WriteHead(*writer, values, 0, 0).status().code(), absl::StatusCode::kOk);
  HeadViews views(values, 0, 0, kTokens);
  EXPECT_EQ(writer->WriteHeads(2, 0, {views.input}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(writer->WriteHeads(0, 2, {views.input}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(writer->WriteHeads(0, std::numeric_limits<std::uint32_t>::max(), {views.input})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->BeginStore(Id(1), {.parent = Key(9), .token_count = kTokens}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(TieredStoreTest, RecordsPassThroughAndBadScalesAreRefused) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  std::vector<std::vector<std::byte>> records;
  {
    auto ref = store_->Fetch(Id(1));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      auto page = PageView::Parse(ref->pages()[layer]);
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        records.emplace_back(page->contents(head).begin(), page->contents(head).end());
      }
    }
  }
  auto writer = store_->BeginStore(Id(5), {.token_count = kTokens});
  ASSERT_TRUE(writer.ok());
  std::vector<std::byte> bad = records[0];
  const RecordLayout layout = LayoutOf(FormatOf(Spec(), Spec().groups[0]));
  const std::uint16_t infinity = 0x7C00;
  std::memcpy(bad.data() + layout.v_zero, &infinity, 2);
  EXPECT_EQ(writer->WriteRecord(0, 0, bad).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(writer->WriteRecord(0, 0, absl::MakeSpan(bad).first(10)).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (std::uint32_t i = 0; i < records.size(); ++i) {
    ASSERT_TRUE(writer->WriteRecord(i / kHeads, i % kHeads, records[i]).ok());
  }
  auto ref = store_->Fetch(Id(5));
  ASSERT_TRUE(ref.ok());
  EXPECT_TRUE(Holds(*ref, 1));
}

TEST_F(TieredStoreTest, NameIsBoundToOneIdentity) {
  Open(false);
  NamespaceSpec other = Spec();
  other.model = "another";
  const absl::Status refused = store_->OpenNamespace("test", other).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(
      refused.message().find("model is \"another\" in this request and \"test\" at the daemon"),
      absl::string_view::npos)
      << refused;
  auto second = store_->OpenNamespace("other", other);
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(store_->Fetch({second->id, 0, Key(1)}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TieredStoreTest, FullStoreEvictsAndPinnedBlocksStay) {
  Open(false);
  ASSERT_TRUE(Put(0).ok());
  auto pinned = store_->Fetch(Id(0));
  ASSERT_TRUE(pinned.ok());
  const std::uint64_t block_bytes = HostUsedBytes();
  const std::uint64_t fit = store_->stats().tiers[1].capacity_bytes / block_bytes;
  for (std::uint64_t i = 1; i < 3 * fit; ++i) ASSERT_TRUE(Put(i).ok()) << i;
  EXPECT_TRUE(Holds(*pinned, 0));
  EXPECT_TRUE(GetIs(0));
  EXPECT_TRUE(GetIs(3 * fit - 1));
  std::uint64_t present = 0;
  for (std::uint64_t i = 0; i < 3 * fit; ++i) {
    auto ref = store_->Fetch(Id(i));
    if (!ref.ok()) continue;
    ++present;
    EXPECT_TRUE(Holds(*ref, i));
  }
  EXPECT_GT(present, fit / 2);
  EXPECT_LE(present, fit);
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.evicted_blocks[1][0], 3 * fit - present);
  EXPECT_EQ(stats.blocks, present);
}

TEST_F(TieredStoreTest, FullOfPinnedBlocksAnswersWithAHint) {
  options_.room_wait = absl::ZeroDuration();
  Open(false);
  std::vector<BlockRef> pins;
  absl::Status put;
  for (std::uint64_t i = 0; i < 4096; ++i) {
    put = Put(i);
    if (!put.ok()) break;
    auto ref = store_->Fetch(Id(i));
    ASSERT_TRUE(ref.ok());
    pins.push_back(*std::move(ref));
  }
  EXPECT_EQ(put.code(), absl::StatusCode::kResourceExhausted) << put;
  EXPECT_NE(put.message().find("retry"), absl::string_view::npos) << put;
  pins.clear();
  EXPECT_TRUE(Put(5000).ok());
}

TEST_F(TieredStoreTest, RemovedBlockIsHiddenNowAndFreedWithItsLastReference) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  const std::uint64_t block_bytes = HostUsedBytes();
  auto held = store_->Fetch(Id(1));
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
  EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 0u);
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  EXPECT_TRUE(Holds(*held, 1));
  EXPECT_EQ(HostUsedBytes(), block_bytes);
  // The key is free for a new block while the old bytes are still read.
  ASSERT_TRUE(Put(Id(1), {.token_count = kTokens}, ValuesOf(2)).ok());
  EXPECT_TRUE(Holds(*held, 1));
  *held = BlockRef();
  EXPECT_EQ(HostUsedBytes(), block_bytes);
  auto again = store_->Fetch(Id(1));
  EXPECT_TRUE(Holds(*again, 2));
}

TEST_F(TieredStoreTest, ClearTakesOneNamespaceOnly) {
  Open(false);
  NamespaceSpec other = Spec();
  other.model = "another";
  const NamespaceId second = store_->OpenNamespace("other", other)->id;
  for (std::uint64_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(Put(i).ok());
    ASSERT_TRUE(Put({second, 0, Key(i)}, {.token_count = kTokens}, ValuesOf(i)).ok());
  }
  EXPECT_EQ(*store_->Clear(space_), 10u);
  EXPECT_EQ(store_->Lookup(space_, {Key(0)}).hit_blocks, 0u);
  EXPECT_EQ(store_->Lookup(second, {Key(0), Key(1)}).hit_blocks, 2u);
}

TEST_F(TieredStoreTest, StaleAssemblyIsGivenUpAndItsKeyIsFree) {
  Open(false);
  auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
  ASSERT_TRUE(writer.ok());
  const Values values = ValuesOf(1);
  ASSERT_TRUE(WriteHead(*writer, values, 0, 0).ok());
  clock_.AdvanceNanos(31'000'000'000);
  ASSERT_TRUE(Put(1).ok());  // Begins anew: the stale one is given up first.
  EXPECT_EQ(WriteHead(*writer, values, 0, 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreTest, ManyThatFindNoRoomWaitOnceAndNotOneAfterTheOther) {
  Open(false);
  std::atomic<bool> stop{false};
  std::thread time([&] {
    while (!stop) {
      clock_.AdvanceNanos(1'000'000);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<BlockWriter> unfinished;
  for (;;) {
    auto writer = store_->BeginStore(Id(unfinished.size()), {.token_count = kTokens});
    if (!writer.ok()) {
      EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted) << writer.status();
      break;
    }
    unfinished.push_back(*std::move(writer));
  }
  const std::int64_t start_nanos = clock_.MonotonicNanos();
  for (std::uint64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(store_->BeginStore(Id(10000 + i), {.token_count = kTokens}).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  const std::int64_t waited_nanos = clock_.MonotonicNanos() - start_nanos;
  EXPECT_LT(waited_nanos, absl::ToInt64Nanoseconds(10 * options_.room_wait)) << "of 50";
  stop = true;
  time.join();
  // Room that comes free is found, and from then on it is worth waiting for again.
  EXPECT_EQ(*store_->Clear(space_), 0u);
  unfinished.clear();
  EXPECT_TRUE(Put(20000).ok());
}

TEST_F(TieredStoreTest, AnAnswerDoesNotRepeatANameOfAnyLength) {
  Open(false);
  const absl::Status status = store_->FindNamespace("", std::string(1 << 20, 'n') + "\n").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_LT(status.message().size(), 256u);
  EXPECT_NE(status.message().find("(1048577 bytes)"), absl::string_view::npos) << status;
}

TEST_F(TieredStoreTest, NamesOfOneNamespaceAreBounded) {
  Open(false);
  absl::Status status;
  std::uint64_t names = 1;
  while (status.ok() && names < 20000) {
    status = store_->OpenNamespace(absl::StrFormat("name-%d", names), Spec()).status();
    if (status.ok()) ++names;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << names << " names";
  EXPECT_TRUE(store_->OpenNamespace("name-1", Spec()).ok()) << "what is bound stays usable";
}

TEST_F(TieredStoreTest, WindowGroupNeedsOnlyItsLastBlocks) {
  NamespaceSpec spec = Spec();
  spec.groups[0].layers = {0, 1};
  LayerGroup window = spec.groups[0];
  window.attention = AttentionKind::kWindow;
  window.window_tokens = 2 * kTokens;
  window.layers = {2, 3};
  spec.groups.push_back(window);
  Open(false, spec);
  const auto put = [&](std::uint8_t group, std::uint64_t number) {
    ASSERT_TRUE(Put({space_, group, Key(number)}, {.token_count = kTokens}, ValuesOf(number)).ok());
  };
  for (std::uint64_t i = 0; i < 6; ++i) put(0, i);
  std::vector<BlockKey> keys;
  for (std::uint64_t i = 0; i < 6; ++i) keys.push_back(Key(i));
  EXPECT_EQ(store_->Lookup(space_, keys).hit_blocks, 0u) << "no window block at all";
  put(1, 2);
  put(1, 3);
  EXPECT_EQ(store_->Lookup(space_, keys).hit_blocks, 4u) << "blocks 2 and 3 are the window of 4";
  put(1, 5);
  EXPECT_EQ(store_->Lookup(space_, keys).hit_blocks, 4u) << "block 4 is missing in the window of 6";
  put(1, 4);
  EXPECT_EQ(store_->Lookup(space_, keys).hit_blocks, 6u);
}

// What a reader in another process is told, read as it reads it.
TEST_F(TieredStoreTest, LocateNamesThePagesAndTheirGenerationsInTheArena) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_FALSE(store_->FetchFromMemory(Id(2), FetchPath::kMap).valid());
  BlockRef block = store_->FetchFromMemory(Id(1), FetchPath::kMap);
  ASSERT_TRUE(block.valid());
  EXPECT_EQ(store_->stats().fetched_blocks[1][1], 1u);
  EXPECT_EQ(store_->stats().fetched_blocks[0][1], 0u);
  std::vector<TieredStore::PageRun> runs;
  store_->Locate(block, &runs);
  ASSERT_EQ(runs.size(), 1u) << "in an empty pool the pages of a block are neighbours";
  const TieredStore::PageRun& run = runs[0];
  ASSERT_EQ(run.page_count, kLayers);
  const TieredStore::Arena arena = store_->ArenaOf(run);
  EXPECT_EQ(arena.bytes, options_.arena_bytes);
  const auto* mapped =
      static_cast<const std::byte*>(mmap(nullptr, arena.bytes, PROT_READ, MAP_SHARED, arena.fd, 0));
  ASSERT_NE(mapped, MAP_FAILED);
  const auto generation = [&](std::uint32_t layer) {
    std::uint64_t word = 0;
    std::memcpy(&word, mapped + run.generation_offset_bytes + layer * kGenerationBytes,
                sizeof(word));
    return word;
  };
  EXPECT_EQ(run.tier, Tier::kHost);
  std::vector<std::uint64_t> generations;
  store_->LoadGenerations(block, &generations);
  ASSERT_EQ(generations.size(), kLayers);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(run.page_bytes, block.pages()[layer].size());
    EXPECT_EQ(std::memcmp(mapped + run.offset_bytes + layer * run.stride_bytes,
                          block.pages()[layer].data(), run.page_bytes),
              0);
    EXPECT_EQ(generations[layer] % 2, 0u);
    EXPECT_EQ(generation(layer), generations[layer]);
  }
  EXPECT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
  EXPECT_EQ(generation(0), generations[0]) << "held, though hidden";
  block = BlockRef();
  EXPECT_NE(generation(0), generations[0]);
  EXPECT_EQ(generation(0) % 2, 1u);
  munmap(const_cast<std::byte*>(mapped), arena.bytes);
}

// In a pool that is full of holes of one page.
TEST_F(TieredStoreTest, PagesThatAreNoNeighboursAreRunsOfTheirOwn) {
  NamespaceSpec spec = Spec();
  spec.groups.push_back(spec.groups[0]);
  spec.groups[1].layers = {2};
  options_.host_bytes = options_.arena_bytes = 4 << 20;  // One extent for pages.
  Open(false, spec);
  const Values values = ValuesOf(1);
  std::uint64_t count = 1;
  for (std::uint64_t i = 0; i < count; ++i) {
    auto writer = store_->BeginStore({space_, 1, Key(i)}, {.token_count = kTokens});
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      ASSERT_TRUE(WriteHead(*writer, values, 0, head).ok());
    }
    count = store_->stats().tiers[static_cast<std::size_t>(Tier::kHost)].capacity_bytes /
            (HostUsedBytes() / (i + 1));
  }
  ASSERT_EQ(store_->stats().blocks, count) << "it is full, and nothing had to leave";
  for (std::uint64_t i = 0; i < count; i += 2) ASSERT_EQ(*store_->Remove(space_, {Key(i)}), 1u);
  ASSERT_TRUE(Put(count).ok());
  const BlockRef block = store_->FetchFromMemory(Id(count), FetchPath::kMap);
  ASSERT_TRUE(block.valid());
  EXPECT_TRUE(Holds(block, count));
  std::vector<TieredStore::PageRun> runs;
  store_->Locate(block, &runs);
  ASSERT_EQ(runs.size(), kLayers);
  std::vector<std::uint64_t> generations;
  store_->LoadGenerations(block, &generations);
  const int fd = store_->ArenaOf(runs[0]).fd;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const TieredStore::PageRun& run = runs[layer];
    EXPECT_EQ(run.page_count, 1u);
    EXPECT_EQ(run.stride_bytes, 0u);
    ASSERT_EQ(run.page_bytes, block.pages()[layer].size());
    std::vector<std::byte> page(run.page_bytes);
    ASSERT_EQ(pread(fd, page.data(), page.size(), static_cast<off_t>(run.offset_bytes)),
              static_cast<ssize_t>(page.size()));
    EXPECT_EQ(std::memcmp(page.data(), block.pages()[layer].data(), page.size()), 0);
    std::uint64_t word = 0;
    ASSERT_EQ(pread(fd, &word, sizeof(word), static_cast<off_t>(run.generation_offset_bytes)),
              static_cast<ssize_t>(sizeof(word)));
    EXPECT_EQ(word, generations[layer]);
  }
}

TEST_F(TieredStoreTest, ATouchedBlockStaysLongerAndAMissingOneIsNotCounted) {
  options_.eviction_policy = "lru";
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  EXPECT_EQ(store_->Touch({Id(1), Id(3)}), 1u);
  EXPECT_EQ(*store_->Evict(Tier::kHost, 1), 1u);
  EXPECT_TRUE(GetIs(1));
  EXPECT_FALSE(store_->Fetch(Id(2)).ok());
}

TEST_F(TieredStoreTest, StatsCountEachEventOnce) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(Put(2).ok());
  ASSERT_FALSE(Put(1).ok());
  store_->Lookup(space_, {Key(1), Key(2)});
  store_->Lookup(space_, {Key(1), Key(3)});
  store_->Lookup(space_, {Key(3)});
  ASSERT_TRUE(store_->Fetch(Id(1)).ok());
  ASSERT_FALSE(store_->Fetch(Id(3)).ok());
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.stored_blocks, 2u);
  EXPECT_EQ(stats.existing_blocks, 1u);
  EXPECT_EQ(stats.lookup_hit, 1u);
  EXPECT_EQ(stats.lookup_partial, 1u);
  EXPECT_EQ(stats.lookup_miss, 1u);
  EXPECT_EQ(stats.lookup_blocks, 5u);
  EXPECT_EQ(stats.hit_blocks[1], 3u);
  EXPECT_EQ(stats.hit_tokens[1], 3u * kTokens);
  EXPECT_EQ(stats.fetched_blocks[0][1], 1u);
  EXPECT_EQ(stats.fetch_misses[0], 1u);
  EXPECT_EQ(stats.pages, 2u * kLayers);
  EXPECT_EQ(stats.references, 0u);
  const std::size_t format = 1;  // k4v2_g64
  EXPECT_EQ(stats.raw_bytes_ingested[format], 2u * kLayers * kHeads * 2 * 2 * kTokens * kDim);
  EXPECT_EQ(
      stats.encoded_bytes_stored[format],
      2u * kLayers *
          UniformPageBytes(FormatOf(Spec(), Spec().groups[0]), kTokens, SlotKind::kTile, kHeads));
}

}  // namespace
}  // namespace kvmill
