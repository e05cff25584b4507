// Blocks through a real daemon: store, look up, fetch, decode, remove.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/float16.h"
#include "tests/integration/daemon_fixture.h"

namespace kvmill::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class CacheTest : public DaemonTest {};

TEST_F(CacheTest, WhatWasStoredIsFoundFetchedAndDecodes) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 3, 1);
  const StoreResult stored = Put(ns, "s", sequence);
  EXPECT_EQ(stored.blocks_stored, 3u);
  EXPECT_EQ(stored.raw_bytes, 3u * 64 * 2 * 64 * 2 * 2 * 2);
  EXPECT_EQ(stored.tile_raw_bytes, stored.raw_bytes);
  EXPECT_EQ(stored.tile_bytes, 3u * 2 * 2 * RecordBytes(FormatOf(ns.spec, ns.spec.groups[0])));
  EXPECT_GT(stored.stored_bytes, stored.tile_bytes);

  const auto hits = client_->Lookup(ns, KeysOf("s", 5));
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(hits->hit_blocks, 3u);
  EXPECT_EQ(hits->hit_tokens, 3u * 64);
  EXPECT_THAT(hits->tiers, Each(Tier::kHost));

  const auto decoded = Get(ns, KeysOf("s", 3));
  ASSERT_FALSE(decoded.empty());
  EXPECT_LT(sequence.RelativeError(decoded, 0, 64 * 3), 0.35);
}

TEST_F(CacheTest, EveryLayerGroupAndHeadComesBackInItsPlace) {
  // Distinct magnitudes per layer and head: a mix-up would be a relative error near 1.
  Start();
  NamespaceSpec spec = SmallSpec();
  spec.source_dtype = DType::kBFloat16;
  spec.groups[0].layers = {0, 2};
  LayerGroup window;
  window.attention = AttentionKind::kWindow;
  window.window_tokens = 128;
  window.layers = {1};
  window.kv_heads = 3;
  window.head_dim = 128;
  spec.groups.push_back(window);
  const ClientNamespace ns = Open("n", spec);
  Sequence sequence(spec, 64 * 2, 2);
  const StoreResult stored = Put(ns, "s", sequence);
  EXPECT_EQ(stored.blocks_stored, 2u);
  const auto decoded = Get(ns, KeysOf("s", 2));
  ASSERT_FALSE(decoded.empty());
  EXPECT_LT(sequence.RelativeError(decoded, 0, 64 * 2), 0.35);
}

TEST_F(CacheTest, ATailIsStoredAsItIsAndFoundAfterItsParent) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 + 5, 3);
  EXPECT_EQ(Put(ns, "s", sequence).blocks_stored, 2u);
  const auto hits = client_->Lookup(ns, KeysOf("s", 1), {{KeyOf("s", 1), 5, 1}});
  ASSERT_TRUE(hits.ok()) << hits.status();
  EXPECT_EQ(hits->hit_blocks, 1u);
  ASSERT_EQ(hits->tail_tokens, 5u);
  const auto tail = Get(ns, {hits->tail_key});
  ASSERT_FALSE(tail.empty());
  EXPECT_EQ(sequence.RelativeError(tail, 64, 5), 0.0);
}

// Two sequences share their first block and go on differently, for as many tokens.
TEST_F(CacheTest, ContinuationsOfOneParentKeepTheirTailsApart) {
  StartDurable();
  ClientNamespace ns = Open("n", SmallSpec());
  Sequence one(SmallSpec(), 64 + 5, 3);
  Sequence two(SmallSpec(), 64 + 5, 4);
  EXPECT_EQ(Put(ns, "one", one, true).blocks_stored, 2u);
  StoreBlock other = two.Blocks("two")[1];
  other.parent = KeyOf("one", 0);
  const auto stored = client_->Store(ns, {&other, 1}, {.wait_durable = true});
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->blocks[0].outcome, StoreOutcome::kStored) << stored->blocks[0].status;
  const auto expect_both = [&] {
    for (const auto& [name, sequence, wrong] :
         {std::tuple("one", &one, &two), std::tuple("two", &two, &one)}) {
      SCOPED_TRACE(name);
      const auto hits =
          client_->Lookup(ns, KeysOf("one", 1), {{KeyOf(name, 1), 4, 1}, {KeyOf(name, 1), 5, 1}});
      ASSERT_TRUE(hits.ok()) << hits.status();
      EXPECT_EQ(hits->hit_blocks, 1u);
      ASSERT_EQ(hits->tail_tokens, 5u);
      EXPECT_TRUE(hits->tail_key == TailKey(KeyOf("one", 0), 5, KeyOf(name, 1)));
      const auto tail = Get(ns, {hits->tail_key});
      ASSERT_FALSE(tail.empty());
      EXPECT_EQ(sequence->RelativeError(tail, 64, 5), 0.0);
      EXPECT_GT(wrong->RelativeError(tail, 64, 5), 0.5);
    }
    const auto third = client_->Lookup(ns, KeysOf("one", 1), {{KeyOf("three", 1), 5, 1}});
    ASSERT_TRUE(third.ok()) << third.status();
    EXPECT_EQ(third->tail_tokens, 0u);
  };
  expect_both();
  Kill();
  StartDurable();
  ns = Open("n", SmallSpec());
  expect_both();
}

TEST_F(CacheTest, TailsNeedKeysAndLookupsNameTheirLimits) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 5, 3);
  StoreBlock tail = sequence.Blocks("s")[0];
  tail.key = BlockKey();
  EXPECT_THAT(
      client_->Store(ns, {&tail, 1}, {}).status().ToString(),
      HasSubstr("block 0: no key, want 1 to 64 bytes that stand for its tokens and all before "
                "them; a tail needs one as well"));
  const auto says = [&](const std::vector<TailCandidate>& tails) {
    const auto refused = client_->Lookup(ns, {}, tails);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    return std::string(refused.status().message());
  };
  EXPECT_THAT(says({{KeyOf("s", 0), 64, 0}}), HasSubstr("token_count 64, want 1 to 63"));
  EXPECT_THAT(says({{BlockKey(), 5, 0}}), HasSubstr("tail candidate 0: key of 0 bytes"));
  EXPECT_THAT(says(std::vector<TailCandidate>(kTailCandidatesMax + 1, {KeyOf("s", 0), 5, 0})),
              HasSubstr("1025 tail candidates in one lookup: at most 1024"));
}

TEST_F(CacheTest, ScatteredAndPaddedEnginePagesGiveTheSameBlock) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 4);
  EXPECT_EQ(Put(ns, "plain", sequence).blocks_stored, 1u);
  // Engine pages of 16 tokens, heads outside, rows padded: [page][head][token][channel + 8].
  constexpr std::size_t kRow = 64 + 8;
  std::vector<std::vector<std::uint16_t>> pages;
  std::vector<std::vector<const std::byte*>> lists;
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (const bool value : {false, true}) {
      std::vector<const std::byte*>& list = lists.emplace_back();
      for (std::uint32_t p = 0; p < 4; ++p) {
        std::vector<std::uint16_t>& page = pages.emplace_back(2 * 16 * kRow);
        for (std::uint32_t head = 0; head < 2; ++head) {
          for (std::uint32_t t = 0; t < 16; ++t) {
            for (std::uint32_t d = 0; d < 64; ++d) {
              page[(head * 16 + t) * kRow + d] = sequence.At(layer, value, p * 16 + t, head, d);
            }
          }
        }
        list.push_back(reinterpret_cast<const std::byte*>(page.data()));
      }
    }
  }
  std::vector<LayerInput> inputs(2);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    KvView view;
    view.page_tokens = 16;
    view.token_stride_bytes = kRow * 2;
    view.head_stride_bytes = 16 * kRow * 2;
    view.pages = lists[2 * layer].data();
    inputs[layer].k = view;
    view.pages = lists[2 * layer + 1].data();
    inputs[layer].v = view;
  }
  StoreBlock block;
  block.key = KeyOf("paged", 0);
  block.token_count = 64;
  block.layers = inputs;
  const auto stored = client_->Store(ns, {&block, 1}, {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->blocks_stored, 1u) << stored->blocks[0].status;
  EXPECT_EQ(Get(ns, KeysOf("plain", 1)), Get(ns, KeysOf("paged", 1)));
}

TEST_F(CacheTest, TwoRanksWithHalfOfTheHeadsMakeOneBlock) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 5);
  EXPECT_EQ(Put(ns, "whole", sequence).blocks_stored, 1u);
  std::vector<StoreBlock> blocks = sequence.Blocks("ranks");
  std::vector<LayerInput> inputs(blocks[0].layers.begin(), blocks[0].layers.end());
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    std::vector<LayerInput> mine = inputs;
    for (LayerInput& input : mine) {
      input.k.data += rank * 64 * 2;
      input.v.data += rank * 64 * 2;
    }
    blocks[0].layers = mine;
    StoreOptions options;
    options.head_begin = rank;
    options.head_count = 1;
    const auto stored = client_->Store(ns, blocks, options);
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->blocks[0].outcome,
              rank == 0 ? StoreOutcome::kPartial : StoreOutcome::kStored);
    const auto hits = client_->Lookup(ns, KeysOf("ranks", 1));
    ASSERT_TRUE(hits.ok());
    EXPECT_EQ(hits->hit_blocks, rank) << "only complete blocks are found";
  }
  EXPECT_EQ(Get(ns, KeysOf("whole", 1)), Get(ns, KeysOf("ranks", 1)));
}

TEST_F(CacheTest, RecordsAreStoredUnchanged) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 6);
  EXPECT_EQ(Put(ns, "a", sequence).blocks_stored, 1u);
  PageCollector first;
  ASSERT_TRUE(client_->Fetch(ns, KeysOf("a", 1), first).ok());
  // The collector's bytes are kind, record, kind, record: cut the kinds away.
  const std::size_t record = RecordBytes(FormatOf(ns.spec, ns.spec.groups[0]));
  std::vector<std::string> records;
  for (const auto& [id, bytes] : first.pages) {
    records.push_back(bytes.substr(1, record) + bytes.substr(2 + record, record));
  }
  ASSERT_EQ(records.size(), 2u);
  std::vector<LayerInput> inputs(2);
  for (std::size_t l = 0; l < 2; ++l) {
    inputs[l].records = reinterpret_cast<const std::byte*>(records[l].data());
  }
  StoreBlock block;
  block.key = KeyOf("b", 0);
  block.token_count = 64;
  block.layers = inputs;
  const auto stored = client_->Store(ns, {&block, 1}, {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->blocks_stored, 1u) << stored->blocks[0].status;
  PageCollector second;
  ASSERT_TRUE(client_->Fetch(ns, KeysOf("b", 1), second).ok());
  EXPECT_EQ(first.pages, second.pages);
}

TEST_F(CacheTest, ASecondStoreOfAKeyKeepsTheFirstBytesAndSaysExisting) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence first(SmallSpec(), 64 * 2, 7);
  Sequence other(SmallSpec(), 64 * 2, 8);
  EXPECT_EQ(Put(ns, "s", first).blocks_stored, 2u);
  const auto before = Get(ns, KeysOf("s", 2));
  const StoreResult again = Put(ns, "s", other);
  EXPECT_EQ(again.blocks_stored, 0u);
  EXPECT_EQ(again.blocks_existing, 2u);
  EXPECT_EQ(again.blocks[0].outcome, StoreOutcome::kExisting);
  EXPECT_EQ(Get(ns, KeysOf("s", 2)), before);
}

TEST_F(CacheTest, NonFiniteInputIsRefusedByNameAndSparesTheOtherBlocks) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 3, 9);
  sequence.At(1, true, 64 + 7, 1, 13) = 0x7E00;  // NaN.
  const StoreResult stored = Put(ns, "s", sequence);
  EXPECT_EQ(stored.blocks_stored, 2u);
  EXPECT_EQ(stored.blocks_failed, 1u);
  const absl::Status& status = stored.blocks[1].status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("token 7"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("head 1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("channel 13"));
  const auto hits = client_->Lookup(ns, KeysOf("s", 3));
  ASSERT_TRUE(hits.ok());
  EXPECT_EQ(hits->hit_blocks, 1u);
}

TEST_F(CacheTest, AMissIsPerBlockAndNotAnError) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64 * 2, 10);
  Put(ns, "s", sequence);
  PageCollector pages;
  const auto fetched =
      client_->Fetch(ns, {{KeyOf("s", 0), KeyOf("absent", 0), KeyOf("s", 1)}}, pages);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_TRUE(fetched->blocks[0].status.ok());
  EXPECT_TRUE(absl::IsNotFound(fetched->blocks[1].status)) << fetched->blocks[1].status;
  EXPECT_TRUE(fetched->blocks[2].status.ok());
  EXPECT_EQ(pages.pages.size(), 4u);
}

TEST_F(CacheTest, RemoveAndClearForgetBlocksAndListShowsTheRest) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  const ClientNamespace other = Open("other", [] {
    NamespaceSpec spec = SmallSpec();
    spec.salt = "pepper";
    return spec;
  }());
  Sequence sequence(SmallSpec(), 64 * 3, 11);
  Put(ns, "s", sequence);
  Put(other, "s", sequence);
  auto removed = client_->Remove(ns, {{KeyOf("s", 2), KeyOf("absent", 0)}});
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(*removed, 1u);
  auto listed = client_->List("n");
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_EQ(listed->size(), 2u);
  listed = client_->List("");
  ASSERT_TRUE(listed.ok());
  EXPECT_EQ(listed->size(), 5u);
  const auto cleared = client_->Clear(ns);
  ASSERT_TRUE(cleared.ok()) << cleared.status();
  EXPECT_EQ(*cleared, 2u);
  const auto hits = client_->Lookup(other, KeysOf("s", 3));
  ASSERT_TRUE(hits.ok());
  EXPECT_EQ(hits->hit_blocks, 3u) << "another namespace's blocks stay";
}

TEST_F(CacheTest, ANameIsBoundToOneIdentity) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  NamespaceSpec other = SmallSpec();
  other.value_bits = 4;
  const auto refused = client_->OpenNamespace("n", other);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("value_bits"));
  const auto again = client_->OpenNamespace("n", SmallSpec());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->fingerprint, ns.fingerprint);
  const auto found = client_->FindNamespace("n");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->spec, SmallSpec());
  EXPECT_TRUE(absl::IsNotFound(client_->FindNamespace("absent").status()));
}

TEST_F(CacheTest, BatchesOverTheLimitAreRefusedNamingBoth) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  const auto refused = client_->Lookup(ns, KeysOf("s", 40000));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("40000"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("32768"));
  // A message over the limit of bytes: refused before it is read.
  const auto oversized = client_->Lookup(ns, KeysOf("s", 200000));
  EXPECT_EQ(oversized.status().code(), absl::StatusCode::kResourceExhausted) << oversized.status();
  EXPECT_THAT(std::string(oversized.status().message()), HasSubstr("4194304"));
}

TEST_F(CacheTest, DurableWithoutADiskIsRefused) {
  Start();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 12);
  const std::vector<StoreBlock> blocks = sequence.Blocks("s");
  StoreOptions options;
  options.wait_durable = true;
  const auto refused = client_->Store(ns, blocks, options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
}

TEST_F(CacheTest, AfterADrainStoresAreUnavailableAndReadsGoOn) {
  StartDurable();
  const ClientNamespace ns = Open("n", SmallSpec());
  Sequence sequence(SmallSpec(), 64, 13);
  Put(ns, "s", sequence);
  const auto drained = client_->Drain();
  ASSERT_TRUE(drained.ok()) << drained.status();
  const std::vector<StoreBlock> blocks = sequence.Blocks("t");
  EXPECT_TRUE(absl::IsUnavailable(client_->Store(ns, blocks, {}).status()));
  EXPECT_FALSE(Get(ns, KeysOf("s", 1)).empty());
  const auto status = client_->Status();
  ASSERT_TRUE(status.ok());
  EXPECT_TRUE(status->draining);
}

TEST_F(CacheTest, ForkedChildrenAreRefused) {
  Start();
  Open("n", SmallSpec());
  const pid_t child = fork();
  if (child == 0) {
    const absl::StatusCode old = client_->Stat().status().code();
    const absl::StatusCode made =
        Client::Create({.address = absl::StrCat("unix:", socket())}).status().code();
    const absl::StatusCode want = absl::StatusCode::kFailedPrecondition;
    _exit(old == want && made == want ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(client_->Stat().ok()) << "the parent goes on";
}

}  // namespace
}  // namespace kvmill::testing
