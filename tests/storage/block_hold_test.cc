// Holds: finished layers of blocks that are not sealed yet, and what becomes of blocks that
// somebody reads while they are sealed, given up, evicted or removed.
#include "storage/block_hold.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "storage/core/pages_digest.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using State = BlockHold::State;

class BlockHoldTest : public TieredStoreTest {
 protected:
  static constexpr BlockOrigin kWhole{.token_count = kTokens};

  // What a hold said.
  struct Heard {
    std::atomic<std::uint32_t> finished{0};  // Bits of layers.
    std::atomic<int> ended{0};
  };
  absl::StatusOr<std::shared_ptr<BlockHold>> TryHold(const BlockId& id, const BlockOrigin& origin,
                                                     Heard* heard) {
    return store_->Hold(id, origin, FetchPath::kInline,
                        {[heard](std::uint32_t layer) { heard->finished |= 1u << layer; },
                         [heard] { ++heard->ended; }});
  }
  std::shared_ptr<BlockHold> Hold(std::uint64_t number) {
    auto hold = TryHold(Id(number), kWhole, &heard_);
    EXPECT_TRUE(hold.ok()) << hold.status();
    return hold.ok() ? *std::move(hold) : nullptr;
  }
  BlockWriter Begin(std::uint64_t number) { return *store_->BeginStore(Id(number), kWhole); }
  static absl::Status Write(BlockWriter& writer, std::uint64_t number, std::uint32_t layer,
                            std::uint32_t head) {
    return WriteHead(writer, ValuesOf(number), layer, head).status();
  }
  static absl::Status WriteLayer(BlockWriter& writer, std::uint64_t number, std::uint32_t layer) {
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      const absl::Status written = Write(writer, number, layer, head);
      if (!written.ok()) return written;
    }
    return absl::OkStatus();
  }
  static std::vector<std::byte> Bytes(absl::Span<const std::byte> page) {
    return {page.begin(), page.end()};
  }
  PageIdentity Identity(std::uint64_t number, std::uint16_t layer) const {
    PageIdentity identity;
    identity.fingerprint = FingerprintOf(Spec());
    identity.key = Key(number);
    identity.layer = layer;
    identity.head_count = kHeads;
    identity.token_count = kTokens;
    identity.format = FormatOf(Spec(), Spec().groups[0]);
    return identity;
  }
  bool Found(std::uint64_t number) {
    return store_->Lookup(space_, {Key(number)}).hit_blocks == 1 || store_->Fetch(Id(number)).ok();
  }
  std::uint64_t References() const { return store_->stats().references; }

  Heard heard_;
};

TEST_F(BlockHoldTest, FinishedLayersAreReadBeforeTheSealAndTheirBytesStay) {
  Open(false);
  const auto hold = Hold(1);
  EXPECT_EQ(hold->state(), State::kExpected);
  EXPECT_TRUE(hold->Page(0).empty());
  BlockWriter writer = Begin(1);
  EXPECT_EQ(hold->state(), State::kAssembling);
  ASSERT_TRUE(Write(writer, 1, 1, 0).ok());
  EXPECT_TRUE(hold->Page(1).empty()) << "one of two heads";
  EXPECT_EQ(heard_.finished, 0u);
  ASSERT_TRUE(Write(writer, 1, 1, 1).ok());
  EXPECT_EQ(heard_.finished, 2u);
  ASSERT_FALSE(hold->Page(1).empty());
  EXPECT_TRUE(VerifyPage(Identity(1, 1), hold->Page(1)).ok());
  EXPECT_TRUE(hold->Page(0).empty());
  EXPECT_TRUE(hold->Page(2).empty());
  EXPECT_FALSE(Found(1)) << "nobody else sees it";
  EXPECT_EQ(hold->digest(), 0u);

  const std::vector<std::byte> early = Bytes(hold->Page(1));
  const std::byte* const place = hold->Page(1).data();
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  EXPECT_EQ(hold->state(), State::kSealed);
  EXPECT_EQ(heard_.finished, 3u);
  EXPECT_EQ(heard_.ended, 1);
  EXPECT_EQ(Bytes(hold->Page(1)), early);
  EXPECT_EQ(hold->Page(1).data(), place);
  EXPECT_TRUE(GetIs(1));
  const auto ref = store_->Fetch(Id(1));
  EXPECT_EQ(hold->digest(), PagesDigest(ref->pages()));
  EXPECT_EQ(Bytes(ref->pages()[1]), early);
}

TEST_F(BlockHoldTest, WhatIsHeldIsNotEvictedAndGoesWhenItIsLetGo) {
  Open(false);
  auto hold = Hold(1);
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(References(), 1u);
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  EXPECT_TRUE(Found(1));
  // Removed: hidden now, and readable for who holds it.
  ASSERT_TRUE(store_->Remove(space_, {Key(1)}).ok());
  EXPECT_FALSE(Found(1));
  EXPECT_TRUE(VerifyPage(Identity(1, 0), hold->Page(0)).ok());
  EXPECT_GT(HostUsedBytes(), 0u);
  hold = nullptr;
  EXPECT_EQ(References(), 0u);
  EXPECT_EQ(HostUsedBytes(), 0u);

  ASSERT_TRUE(Put(2).ok());
  auto second = Hold(2);
  EXPECT_EQ(second->state(), State::kSealed) << "it was there";
  EXPECT_EQ(heard_.ended, 1) << "nothing is said of what Hold found";
  EXPECT_NE(second->digest(), 0u);
  second = nullptr;
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  EXPECT_FALSE(Found(2));
}

TEST_F(BlockHoldTest, ABlockOnDiskIsLoadedToBeHeld) {
  Open(true);
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(store_->Flush().ok());
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  EXPECT_EQ(HostUsedBytes(), 0u);
  const auto hold = Hold(1);
  EXPECT_EQ(hold->state(), State::kSealed);
  EXPECT_TRUE(VerifyPage(Identity(1, 1), hold->Page(1)).ok());
}

TEST_F(BlockHoldTest, ABlockThatIsGivenUpFailsAndItsPagesStayUntilTheyAreRead) {
  Open(false);
  auto hold = Hold(1);
  BlockWriter writer = Begin(1);
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  const absl::Span<const std::byte> page = hold->Page(0);
  Values infinite = ValuesOf(1);
  std::fill(infinite.begin(), infinite.end(), 0x7C00);
  EXPECT_FALSE(WriteHead(writer, infinite, 1, 0).ok());
  EXPECT_EQ(hold->state(), State::kFailed);
  EXPECT_EQ(heard_.ended, 1);
  EXPECT_FALSE(hold->why().ok());
  EXPECT_TRUE(VerifyPage(Identity(1, 0), page).ok());
  // Somebody stores it anew: another assembly, which this hold does not follow.
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(hold->state(), State::kFailed);
  EXPECT_EQ(heard_.ended, 1);
  EXPECT_EQ(hold->digest(), 0u);
  EXPECT_TRUE(VerifyPage(Identity(1, 0), page).ok());
  hold = nullptr;
  writer = Begin(2);
  ASSERT_TRUE(store_->Remove(space_, {Key(1)}).ok());
  EXPECT_FALSE(Found(1));
}

TEST_F(BlockHoldTest, AnAssemblyThatTimesOutFails) {
  Open(false);
  const auto hold = Hold(1);
  BlockWriter writer = Begin(1);
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  clock_.AdvanceNanos(absl::ToInt64Nanoseconds(options_.assembly_timeout) + 1);
  Begin(2);  // Looks for those that are late.
  EXPECT_EQ(hold->state(), State::kFailed);
  EXPECT_TRUE(absl::IsAborted(hold->why())) << hold->why();
}

TEST_F(BlockHoldTest, AHoldOfAnotherOriginIsRefusedOrFails) {
  Open(false);
  const BlockOrigin other{.parent = Key(7), .token_count = kTokens, .block_index = 3};
  const auto expected = TryHold(Id(1), other, &heard_);
  ASSERT_TRUE(expected.ok());
  BlockWriter writer = Begin(1);
  EXPECT_EQ((*expected)->state(), State::kFailed);
  EXPECT_EQ(heard_.ended, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(TryHold(Id(1), other, &heard_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TryHold(Id(9), {.token_count = 65}, &heard_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TryHold({space_, 3, Key(1)}, kWhole, &heard_).status()));
  EXPECT_TRUE(TryHold(Id(1), kWhole, &heard_).ok());
}

TEST_F(BlockHoldTest, RawHeadsAreInTheFinishedPage) {
  Open(false);
  const auto hold = Hold(1);
  BlockWriter writer = Begin(1);
  // Beyond what fp16 scales can hold: this head stays raw, and its page is another one.
  Values large = ValuesOf(1);
  std::fill(large.begin(), large.end(), FloatToFloat16(60000.0f));
  const auto raw = WriteHead(writer, large, 0, 1);
  ASSERT_TRUE(raw.ok()) << raw.status();
  ASSERT_EQ(raw->raw_heads, 1u);
  ASSERT_TRUE(Write(writer, 1, 0, 0).ok());
  const std::vector<std::byte> early = Bytes(hold->Page(0));
  EXPECT_TRUE(VerifyPage(Identity(1, 0), early).ok());
  const auto view = PageView::Parse(early);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->slot(0).kind, SlotKind::kTile);
  EXPECT_EQ(view->slot(1).kind, SlotKind::kRaw);
  ASSERT_TRUE(WriteLayer(writer, 1, 1).ok());
  EXPECT_EQ(hold->state(), State::kSealed);
  EXPECT_EQ(Bytes(hold->Page(0)), early);
  EXPECT_EQ(Bytes(store_->Fetch(Id(1))->pages()[0]), early);
}

TEST_F(BlockHoldTest, TailsAndSinkBlocksAreHeldAsTheyAre) {
  NamespaceSpec spec = Spec();
  spec.sink_blocks = 1;
  Open(false, spec);
  const BlockOrigin tail{.parent = Key(5), .token_count = 10, .block_index = 4, .tail_key = Key(6)};
  const BlockId tail_id{space_, 0, TailKey(tail.parent, tail.token_count, tail.tail_key)};
  const auto held_tail = TryHold(tail_id, tail, &heard_);
  ASSERT_TRUE(held_tail.ok()) << held_tail.status();
  ASSERT_TRUE(Put(tail_id, tail, ValuesOf(1, 10)).ok());
  EXPECT_EQ((*held_tail)->state(), State::kSealed);
  EXPECT_EQ(PageView::Parse((*held_tail)->Page(1))->slot(0).kind, SlotKind::kRaw);
  EXPECT_EQ(PageView::Parse((*held_tail)->Page(1))->header().token_count, 10);
  const auto sink = Hold(1);  // Its index is 0.
  ASSERT_TRUE(Put(1).ok());
  EXPECT_EQ(PageView::Parse(sink->Page(0))->slot(1).kind, SlotKind::kRaw);
}

TEST_F(BlockHoldTest, ACopyThatIsSealedFirstEndsWhatFollowsAnotherAssembly) {
  Open(false);
  ASSERT_TRUE(Put(1).ok());
  std::vector<std::vector<std::byte>> pages;
  std::vector<std::uint32_t> sizes;
  {
    const auto ref = store_->Fetch(Id(1));
    for (const auto page : ref->pages()) {
      pages.push_back(Bytes(page));
      sizes.push_back(static_cast<std::uint32_t>(page.size()));
    }
  }
  ASSERT_TRUE(store_->Remove(space_, {Key(1)}).ok());
  const auto copied = [&] {
    auto copy = store_->BeginCopy(Id(1), kWhole, sizes, absl::ZeroDuration());
    for (std::size_t i = 0; i < pages.size(); ++i) {
      std::copy(pages[i].begin(), pages[i].end(), copy->pages()[i].begin());
    }
    return copy->Commit();
  };
  const auto following = Hold(1);
  {
    BlockWriter writer = Begin(1);
    ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
    ASSERT_TRUE(copied().ok());
    EXPECT_EQ(following->state(), State::kFailed) << "its bytes might be others";
    EXPECT_TRUE(VerifyPage(Identity(1, 0), following->Page(0)).ok());
    EXPECT_EQ(heard_.ended, 1);
  }
  ASSERT_TRUE(store_->Remove(space_, {Key(1)}).ok());
  const auto expecting = Hold(1);
  ASSERT_TRUE(copied().ok());
  EXPECT_EQ(expecting->state(), State::kSealed);
  EXPECT_EQ(Bytes(expecting->Page(1)), pages[1]);
  EXPECT_EQ(heard_.ended, 2);
}

TEST_F(BlockHoldTest, ABlockIsCopiedLayerByLayerWhileItIsAssembled) {
  Open(false);
  auto other = *TieredStore::Create(options_, clock_, nullptr);
  const BlockId there{other->OpenNamespace("elsewhere", Spec())->id, 0, Key(1)};
  const std::uint32_t plain = *store_->PlainPageBytes(Id(1), kWhole);
  const std::vector<std::uint32_t> sizes(kLayers, plain);
  auto copy = other->BeginCopy(there, kWhole, sizes, absl::ZeroDuration());
  ASSERT_TRUE(copy.ok()) << copy.status();
  const auto hold = Hold(1);
  BlockWriter writer = Begin(1);
  const auto pull = [&](std::uint32_t layer) {
    const absl::Span<const std::byte> page = hold->Page(layer);
    ASSERT_FALSE(page.empty());
    ASSERT_TRUE(
        copy->ResizePage(layer, static_cast<std::uint32_t>(page.size()), absl::ZeroDuration())
            .ok());
    std::copy(page.begin(), page.end(), copy->pages()[layer].begin());
    EXPECT_TRUE(copy->CheckPage(layer).ok()) << copy->CheckPage(layer);
  };
  // A head that no tile holds makes its page longer than anyone could know.
  Values large = ValuesOf(1);
  std::fill(large.begin(), large.end(), FloatToFloat16(60000.0f));
  ASSERT_TRUE(WriteHead(writer, large, 1, 0).ok());
  ASSERT_TRUE(Write(writer, 1, 1, 1).ok());
  pull(1);
  EXPECT_GT(copy->pages()[1].size(), plain);
  EXPECT_FALSE(copy->CheckPage(0).ok()) << "it has not come";
  EXPECT_TRUE(absl::IsInvalidArgument(copy->ResizePage(0, 100, absl::ZeroDuration())));
  EXPECT_TRUE(absl::IsInvalidArgument(copy->ResizePage(2, plain, absl::ZeroDuration())));
  ASSERT_TRUE(WriteLayer(writer, 1, 0).ok());
  pull(0);
  EXPECT_EQ(copy->pages()[0].size(), plain);
  EXPECT_EQ(copy->Digest(), hold->digest());
  ASSERT_TRUE(copy->Commit().ok());
  const auto ref = other->Fetch(there);
  ASSERT_TRUE(ref.ok());
  EXPECT_EQ(Bytes(ref->pages()[1]), Bytes(hold->Page(1)));
}

// Ranks write, holds come and go and read what is finished, memory is short: every page that is
// ever read is one that is sealed, or was.
TEST_F(BlockHoldTest, ReadersOfUnsealedPagesNeverSeeThemChange) {
  Open(false);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> read{0}, read_early{0}, sealed{0};
  std::thread evictor([&] {
    while (!stop) {
      store_->Evict(Tier::kHost, 1 << 20).IgnoreError();  // There may be nothing to evict.
      std::this_thread::yield();
    }
  });
  constexpr std::uint64_t kBlocks = 40;
  for (std::uint64_t number = 0; number < kBlocks; ++number) {
    const Values values = ValuesOf(number % 8);
    const BlockId id = Id(number);
    std::thread readers[2];
    std::atomic<bool> done{false};
    std::atomic<int> held{0}, saw_first{0};
    for (std::thread& reader : readers) {
      reader = std::thread([&] {
        Heard heard;
        std::vector<std::byte> seen[kLayers];
        auto hold = TryHold(id, kWhole, &heard);
        ++held;
        ASSERT_TRUE(hold.ok()) << hold.status();
        for (bool last = false; !last;) {
          last = done;
          for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
            const absl::Span<const std::byte> page = (*hold)->Page(layer);
            if (page.empty()) continue;
            ++read;
            read_early += (*hold)->state() == State::kAssembling;
            const std::vector<std::byte> bytes = Bytes(page);
            ASSERT_TRUE(
                VerifyPage(Identity(number, static_cast<std::uint16_t>(layer)), bytes).ok());
            ASSERT_TRUE(seen[layer].empty() || seen[layer] == bytes);
            if (layer == 0 && seen[0].empty()) ++saw_first;
            seen[layer] = bytes;
          }
          std::this_thread::yield();
        }
        ASSERT_EQ((*hold)->state(), State::kSealed);
        ++sealed;
        ASSERT_EQ(PagesDigest({(*hold)->Page(0), (*hold)->Page(1)}), (*hold)->digest());
      });
    }
    // In every other block the second layer waits until both have read the first.
    const bool waits = number % 2 == 0;
    while (held < 2) std::this_thread::yield();
    std::vector<std::thread> ranks;
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      ranks.emplace_back([&, head] {
        auto writer = store_->BeginStore(id, kWhole);
        ASSERT_TRUE(writer.ok()) << writer.status();
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
          while (waits && layer == 1 && saw_first < 2) std::this_thread::yield();
          const auto written = WriteHead(*writer, values, layer, head);
          ASSERT_TRUE(written.ok()) << written.status();
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    done = true;
    for (std::thread& reader : readers) reader.join();
  }
  stop = true;
  evictor.join();
  EXPECT_GT(read, 2 * kBlocks);
  EXPECT_EQ(sealed, 2 * kBlocks);
  EXPECT_GE(read_early, kBlocks / 2);
  EXPECT_EQ(References(), 0u);
  ASSERT_TRUE(store_->Evict(Tier::kHost, 1 << 30).ok());
  EXPECT_EQ(HostUsedBytes(), 0u);
}

}  // namespace
}  // namespace kvmill
