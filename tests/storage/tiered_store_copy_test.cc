// Blocks that another store sealed, copied into this one.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/storage/tiered_store_gpu_fixture.h"

namespace kvmill {
namespace {

// A block as it comes from another node.
struct Sealed {
  std::vector<std::vector<std::byte>> pages;
  std::vector<std::uint32_t> sizes() const {
    std::vector<std::uint32_t> bytes;
    for (const auto& page : pages) bytes.push_back(static_cast<std::uint32_t>(page.size()));
    return bytes;
  }
};

NamespaceSpec TwoGroups(NamespaceSpec spec) {
  LayerGroup second;
  second.layers = {2};
  second.kv_heads = 1;
  second.head_dim = 64;
  spec.groups.push_back(second);
  return spec;
}

class TieredStoreCopyTest : public TieredStoreGpuTest {
 protected:
  TieredStoreCopyTest() {
    options_.host_bytes = options_.arena_bytes = 8 << 20;
    options_.blocks_max = 4096;
  }
  ~TieredStoreCopyTest() override {
    EXPECT_TRUE(store_ == nullptr || store_->stats().copying_blocks == 0);
  }

  void OpenOther(const NamespaceSpec& spec = Spec()) {
    TieredStore::Options options = options_;
    options.gpu = nullptr;
    other_ = *TieredStore::Create(options, clock_, nullptr);
    other_space_ = other_->OpenNamespace("elsewhere", spec)->id;
  }
  // A block that the other store sealed.
  Sealed SealedThere(const BlockKey& key, const BlockOrigin& origin, const Values& values) {
    if (other_ == nullptr) OpenOther();
    const BlockId id{other_space_, 0, key};
    std::swap(store_, other_);
    const absl::Status put = Put(id, origin, values);
    std::swap(store_, other_);
    EXPECT_TRUE(put.ok()) << put;
    return FetchThere(id);
  }
  Sealed SealedThere(std::uint64_t number) {
    return SealedThere(Key(number), {.token_count = kTokens}, ValuesOf(number));
  }
  Sealed FetchThere(const BlockId& id) {
    Sealed sealed;
    auto ref = other_->Fetch(id);
    EXPECT_TRUE(ref.ok()) << ref.status();
    for (const auto& page : ref->pages()) sealed.pages.emplace_back(page.begin(), page.end());
    return sealed;
  }

  absl::StatusOr<BlockCopy> Begin(const BlockId& id, const Sealed& sealed,
                                  const BlockOrigin& origin = {.token_count = kTokens}) {
    return store_->BeginCopy(id, origin, sealed.sizes(), absl::ZeroDuration());
  }
  static void Receive(const Sealed& sealed, BlockCopy* copy) {
    ASSERT_EQ(copy->pages().size(), sealed.pages.size());
    for (std::size_t i = sealed.pages.size(); i-- > 0;) {  // In any order.
      ASSERT_EQ(copy->pages()[i].size(), sealed.pages[i].size());
      std::copy(sealed.pages[i].begin(), sealed.pages[i].end(), copy->pages()[i].begin());
    }
  }
  absl::Status Copy(const BlockId& id, const Sealed& sealed,
                    const BlockOrigin& origin = {.token_count = kTokens}) {
    auto copy = Begin(id, sealed, origin);
    if (!copy.ok()) return copy.status();
    EXPECT_TRUE(copy->valid());
    Receive(sealed, &*copy);
    const absl::Status committed = copy->Commit();
    EXPECT_FALSE(copy->valid());
    return committed;
  }
  // A copy that is refused for its bytes leaves nothing.
  void ExpectRefused(std::uint64_t number, const Sealed& sealed, absl::string_view what) {
    const std::uint64_t used = HostUsedBytes();
    const std::uint64_t failures = ChecksumFailures(Tier::kPeer);
    const absl::Status copied = Copy(Id(number), sealed);
    EXPECT_EQ(copied.code(), absl::StatusCode::kDataLoss) << copied;
    EXPECT_NE(copied.message().find(what), absl::string_view::npos) << copied;
    EXPECT_EQ(store_->Lookup(space_, {Key(number)}).hit_blocks, 0u);
    EXPECT_EQ(store_->Fetch(Id(number)).status().code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(HostUsedBytes(), used);
    EXPECT_EQ(ChecksumFailures(Tier::kPeer), failures + 1);
    EXPECT_EQ(store_->stats().blocks, 0u);
  }

  std::unique_ptr<TieredStore> other_;
  NamespaceId other_space_ = 0;
};

TEST_F(TieredStoreCopyTest, CopiedBlockIsLikeOneThatWasStoredHere) {
  Open(true);
  const Sealed sealed = SealedThere(1);
  ASSERT_TRUE(Copy(Id(1), sealed).ok());
  const auto found = store_->Lookup(space_, {Key(1), Key(2)});
  EXPECT_EQ(found.hit_blocks, 1u);
  EXPECT_EQ(found.tiers, std::vector<Tier>{Tier::kHost});
  EXPECT_TRUE(GetIs(1));
  {
    auto ref = store_->Fetch(Id(1));
    ASSERT_TRUE(ref.ok());
    for (std::size_t i = 0; i < sealed.pages.size(); ++i) {
      EXPECT_TRUE(std::equal(ref->pages()[i].begin(), ref->pages()[i].end(),
                             sealed.pages[i].begin(), sealed.pages[i].end()));
    }
    std::vector<TieredStore::PageRun> runs;
    store_->Locate(*ref, &runs);
    EXPECT_EQ(runs.size(), 1u) << "its pages lie together, as those of a stored block";
    std::vector<std::uint64_t> generations;
    store_->LoadGenerations(*ref, &generations);
    for (const std::uint64_t generation : generations) EXPECT_EQ(generation % 2, 0u);
  }
  EXPECT_EQ(store_->stats().copied_blocks, 1u);
  EXPECT_EQ(store_->stats().stored_blocks, 0u);
  EXPECT_EQ(Put(1).code(), absl::StatusCode::kAlreadyExists);

  ASSERT_TRUE(Durable(1).ok());
  Restart();
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).tiers, std::vector<Tier>{Tier::kDisk});
  EXPECT_TRUE(GetIs(1));
}

TEST_F(TieredStoreCopyTest, NothingIsVisibleBeforeTheCommit) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  auto copy = Begin(Id(1), sealed);
  ASSERT_TRUE(copy.ok()) << copy.status();
  Receive(sealed, &*copy);
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  EXPECT_EQ(store_->Fetch(Id(1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->stats().copying_blocks, 1u);
  ASSERT_TRUE(copy->Commit().ok());
  EXPECT_TRUE(GetIs(1));
  EXPECT_EQ(copy->Commit().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(TieredStoreCopyTest, AbandonedCopyFreesItsPages) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  {
    auto copy = Begin(Id(1), sealed);
    ASSERT_TRUE(copy.ok());
    EXPECT_GT(HostUsedBytes(), 0u);
    BlockCopy moved = *std::move(copy);
    EXPECT_TRUE(moved.valid());
    moved = BlockCopy();
    EXPECT_EQ(HostUsedBytes(), 0u);
  }
  EXPECT_EQ(store_->stats().copying_blocks, 0u);
  ASSERT_TRUE(Copy(Id(1), sealed).ok()) << "the key is free";
}

TEST_F(TieredStoreCopyTest, DamagedBytesAreRefusedWhereverTheyAre) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  const PageView view = *PageView::Parse(sealed.pages[1]);
  for (const std::size_t byte :
       {std::size_t{0}, std::size_t{40}, sizeof(PageHeader) + 4,
        std::size_t{view.slot(0).offset_bytes},
        std::size_t{view.slot(1).offset_bytes} + view.slot(1).length_bytes - 1}) {
    Sealed damaged = sealed;
    damaged.pages[1][byte] ^= std::byte{0x10};
    ExpectRefused(1, damaged, "want");
  }
  ASSERT_TRUE(Copy(Id(1), sealed).ok());
}

TEST_F(TieredStoreCopyTest, PageOfSomethingElseIsRefused) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  Sealed other_key = sealed;
  other_key.pages[0] = SealedThere(2).pages[0];
  ExpectRefused(1, other_key, "key");
  Sealed other_layer = sealed;
  std::swap(other_layer.pages[0], other_layer.pages[1]);
  ExpectRefused(1, other_layer, "layer");
  NamespaceSpec spec = Spec();
  spec.model = "another";
  OpenOther(spec);
  ExpectRefused(1, SealedThere(1), "namespace");
  // Another number of tokens than was asked for is another block, whatever its key.
  OpenOther();
  Sealed short_block;
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
    const NamespaceSpec mine = Spec();
    PageIdentity identity;
    identity.fingerprint = FingerprintOf(mine);
    identity.key = Key(1);
    identity.layer = layer;
    identity.head_count = kHeads;
    identity.token_count = 10;
    identity.format = FormatOf(mine, mine.groups[0]);
    auto& page = short_block.pages.emplace_back(
        UniformPageBytes(identity.format, 10, SlotKind::kRaw, kHeads));
    InitPage(identity, std::vector<SlotKind>(kHeads, SlotKind::kRaw), absl::MakeSpan(page));
    SealPage(absl::MakeSpan(page));
  }
  ExpectRefused(1, short_block, "token count");
}

TEST_F(TieredStoreCopyTest, PageWithoutAHeadIsRefused) {
  Open(false);
  Sealed sealed = SealedThere(1);
  const PageIdentity identity = PageView::Parse(sealed.pages[1])->identity();
  const std::vector<SlotKind> kinds = {SlotKind::kTile, SlotKind::kAbsent};
  sealed.pages[1].assign(PageBytes(identity.format, kTokens, kinds), std::byte{0});
  InitPage(identity, kinds, absl::MakeSpan(sealed.pages[1]));
  SealPage(absl::MakeSpan(sealed.pages[1]));
  ExpectRefused(1, sealed, "absent");
}

TEST_F(TieredStoreCopyTest, ShortAndLongPagesAreRefused) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  Sealed cut = sealed;
  cut.pages[0].resize(cut.pages[0].size() - kPageAlignment);
  ExpectRefused(1, cut, "length");
  Sealed more = sealed;
  more.pages[0].resize(more.pages[0].size() + kPageAlignment);
  ExpectRefused(1, more, "length");
  // What no page can be is refused before any memory is taken.
  const auto begin = [&](std::vector<std::uint32_t> bytes) {
    return store_->BeginCopy(Id(1), {.token_count = kTokens}, bytes, absl::ZeroDuration()).status();
  };
  const std::vector<std::uint32_t> good = sealed.sizes();
  for (const std::uint32_t bytes : {0u, 64u, good[0] + 8, 1u << 20, 0xFFFFFFC0u}) {
    const absl::Status status = begin({bytes, good[1]});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(absl::StrFormat("a page of %u bytes: want", bytes)),
              absl::string_view::npos)
        << status;
  }
  EXPECT_EQ(begin({good[0]}).message(), "a copy of 1 pages: layer group 0 has 2");
  EXPECT_EQ(HostUsedBytes(), 0u);
}

TEST_F(TieredStoreCopyTest, TailsAreCopiedUnderTheirOwnNamesOnly) {
  Open(true);
  const BlockOrigin origin{
      .parent = Key(1), .token_count = 10, .block_index = 1, .tail_key = Key(30)};
  const BlockKey name = TailKey(Key(1), 10, Key(30));
  const Sealed tail = SealedThere(name, origin, ValuesOf(3, 10));
  ASSERT_TRUE(Copy(Id(1), SealedThere(1)).ok());
  // Nobody can tell that a name is a tail's without what it is made of.
  for (const BlockOrigin& wrong :
       {BlockOrigin{.token_count = 10}, BlockOrigin{.parent = Key(1), .token_count = 10},
        BlockOrigin{.parent = Key(1), .token_count = 11, .tail_key = Key(30)},
        BlockOrigin{.parent = Key(2), .token_count = 10, .tail_key = Key(30)}}) {
    EXPECT_EQ(Begin({space_, 0, name}, tail, wrong).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  ASSERT_TRUE(Copy({space_, 0, name}, tail, origin).ok());
  const auto found = store_->Lookup(space_, {Key(1)}, {{Key(30), 10, 1}});
  EXPECT_EQ(found.tail_tokens, 10u);
  ASSERT_TRUE(store_->Flush().ok());
  Restart();
  auto ref = store_->Fetch({space_, 0, name});
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(ref->token_count(), 10u);
  for (std::size_t i = 0; i < tail.pages.size(); ++i) {
    EXPECT_TRUE(std::equal(ref->pages()[i].begin(), ref->pages()[i].end(), tail.pages[i].begin(),
                           tail.pages[i].end()));
  }
}

TEST_F(TieredStoreCopyTest, RawHeadsAndSinkBlocksKeepTheirSizes) {
  NamespaceSpec spec = Spec();
  spec.sink_blocks = 1;
  Open(false, spec);
  OpenOther(spec);
  const Sealed sink = SealedThere(Key(1), {.token_count = kTokens}, ValuesOf(1));
  Values wild = ValuesOf(2);
  for (std::size_t i = 0; i < std::size_t{2} * kTokens * kDim; ++i) {
    wild[i] = FloatToFloat16(60000.0f);
  }
  const Sealed mixed =
      SealedThere(Key(2), {.parent = Key(1), .token_count = kTokens, .block_index = 1}, wild);
  ASSERT_NE(mixed.pages[0].size(), mixed.pages[1].size()) << "one page has a raw head";
  for (const auto& [key, sealed] : {std::pair(Key(1), sink), std::pair(Key(2), mixed)}) {
    ASSERT_TRUE(Copy({space_, 0, key}, sealed).ok());
    auto ref = store_->Fetch({space_, 0, key});
    ASSERT_TRUE(ref.ok());
    for (std::size_t i = 0; i < sealed.pages.size(); ++i) {
      EXPECT_TRUE(std::equal(ref->pages()[i].begin(), ref->pages()[i].end(),
                             sealed.pages[i].begin(), sealed.pages[i].end()));
    }
  }
}

TEST_F(TieredStoreCopyTest, ABlockIsThereWhenAllItsLayerGroupsAre) {
  const NamespaceSpec spec = TwoGroups(Spec());
  Open(false, spec);
  OpenOther(spec);
  const Sealed first = SealedThere(1);
  const Values values = ValuesOf(1);
  {
    auto writer = other_->BeginStore({other_space_, 1, Key(1)}, {.token_count = kTokens});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(WriteHead(*writer, values, 0, 0).ok());
  }
  const Sealed second = FetchThere({other_space_, 1, Key(1)});
  EXPECT_EQ(Copy({space_, 1, Key(1)}, Sealed{{first.pages[0]}}).code(),
            absl::StatusCode::kDataLoss);
  ASSERT_TRUE(Copy({space_, 1, Key(1)}, second).ok());
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
  ASSERT_TRUE(Copy({space_, 0, Key(1)}, first).ok());
  EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 1u);
  EXPECT_EQ(Begin({space_, 2, Key(1)}, first).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Begin({space_ + 7, 0, Key(1)}, first).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(TieredStoreCopyTest, WhatIsSealedFirstStays) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  // Another encoding of the same key, as another node could have: other values.
  OpenOther();
  const Sealed other = SealedThere(Key(1), {.token_count = kTokens}, ValuesOf(77));
  auto first = Begin(Id(1), sealed);
  auto second = Begin(Id(1), other);
  auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
  ASSERT_TRUE(first.ok() && second.ok() && writer.ok());
  const Values wrong = ValuesOf(88);
  ASSERT_TRUE(WriteHead(*writer, wrong, 0, 0).ok());
  Receive(sealed, &*first);
  Receive(other, &*second);
  ASSERT_TRUE(first->Commit().ok());
  EXPECT_EQ(second->Commit().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(WriteHead(*writer, wrong, 0, 1).status().code(), absl::StatusCode::kAlreadyExists);
  writer = absl::CancelledError("gone");
  EXPECT_EQ(Begin(Id(1), other).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(GetIs(1));
  EXPECT_EQ(store_->stats().assembling_blocks, 0u);
  EXPECT_EQ(store_->stats().rejected_blocks, 0u) << "nobody's store failed";
  ASSERT_EQ(*store_->Remove(space_, {Key(1)}), 1u);
  EXPECT_EQ(HostUsedBytes(), 0u);
  // The other way round.
  auto late = Begin(Id(1), other);
  ASSERT_TRUE(late.ok());
  ASSERT_TRUE(Put(1).ok());
  Receive(other, &*late);
  EXPECT_EQ(late->Commit().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(GetIs(1));
}

// Copies and stores of the same blocks on several threads: of each block one is OK, the others are
// told that it exists, and its bytes are those of whoever was first.
TEST_F(TieredStoreCopyTest, RacesLeaveOneWholeBlock) {
  Open(true);
  constexpr std::uint64_t kBlocks = 40;
  std::vector<Sealed> sealed;
  for (std::uint64_t n = 0; n < kBlocks; ++n) sealed.push_back(SealedThere(n));
  std::vector<std::atomic<int>> winners(kBlocks);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t n = 0; n < kBlocks; ++n) {
        const absl::Status status = t % 2 == 0 ? Copy(Id(n), sealed[n]) : Put(n);
        if (status.ok()) winners[n].fetch_add(1);
        EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status)) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint64_t n = 0; n < kBlocks; ++n) {
    // Two writers of one assembly both did their part of it.
    EXPECT_GE(winners[n].load(), 1);
    EXPECT_TRUE(GetIs(n));
  }
  const StoreStats stats = store_->stats();
  EXPECT_EQ(stats.stored_blocks + stats.copied_blocks, kBlocks);
  EXPECT_EQ(stats.assembling_blocks, 0u);
  EXPECT_EQ(stats.rejected_blocks, 0u);
  std::vector<BlockKey> keys;
  for (std::uint64_t n = 0; n < kBlocks; ++n) keys.push_back(Key(n));
  EXPECT_EQ(*store_->Remove(space_, keys), kBlocks);
  Settle();
  EXPECT_EQ(HostUsedBytes(), 0u);
}

TEST_F(TieredStoreCopyTest, RemovalEndsCopiesThatRun) {
  Open(false);
  const Sealed sealed = SealedThere(1);
  for (const bool clear : {false, true}) {
    auto copy = Begin(Id(1), sealed);
    ASSERT_TRUE(copy.ok());
    Receive(sealed, &*copy);
    EXPECT_EQ(clear ? *store_->Clear(space_) : *store_->Remove(space_, {Key(1)}), 0u);
    EXPECT_EQ(copy->Commit().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(store_->Lookup(space_, {Key(1)}).hit_blocks, 0u);
    EXPECT_EQ(HostUsedBytes(), 0u);
  }
  ASSERT_TRUE(Copy(Id(1), sealed).ok());
}

TEST_F(TieredStoreCopyTest, FullMemoryEvictsOrSaysSo) {
  options_.host_bytes = options_.arena_bytes = 4 << 20;
  Open(false);
  // Blocks that can leave do.
  std::uint64_t stored = 0;
  while (EvictedFrom(Tier::kHost, EvictReason::kCapacity) == 0) {
    ASSERT_TRUE(Put(100 + stored++).ok());
  }
  const Sealed sealed = SealedThere(1);
  ASSERT_TRUE(Copy(Id(1), sealed).ok());
  EXPECT_TRUE(GetIs(1));
  // Blocks that are held do not, and then nothing waits.
  std::vector<BlockRef> held;
  for (std::uint64_t n = 0; n < stored; ++n) {
    auto ref = store_->Fetch(Id(100 + n));
    if (ref.ok()) held.push_back(*std::move(ref));
  }
  held.push_back(*store_->Fetch(Id(1)));
  std::vector<BlockCopy> copies;
  absl::Status full;
  for (std::uint64_t n = 0; n < 10'000 && full.ok(); ++n) {
    auto copy = Begin(Id(2000 + n), sealed);
    full = copy.status();
    if (copy.ok()) copies.push_back(*std::move(copy));
  }
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  const std::uint64_t used = HostUsedBytes();
  copies.clear();
  EXPECT_LE(HostUsedBytes(), used);
  EXPECT_EQ(store_->stats().copying_blocks, 0u);
  held.clear();
  EXPECT_TRUE(Begin(Id(3000), sealed).ok());
}

TEST_F(TieredStoreCopyTest, CopyMovesOnToTheGpu) {
  options_.host_bytes = options_.arena_bytes = 4 << 20;
  OpenWithGpu(true);
  const Sealed sealed = SealedThere(1);
  ASSERT_TRUE(Copy(Id(1), sealed).ok());
  Settle();
  EXPECT_EQ(TierOfBlock(1), Tier::kGpu);
  EXPECT_TRUE(GetOnGpuIs(1));
  EXPECT_TRUE(GetIs(1));
}

}  // namespace
}  // namespace kvmill
