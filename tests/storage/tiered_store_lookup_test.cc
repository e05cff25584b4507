// Lookups that know what other nodes have: how far the prefix reaches then, and what is counted.
#include <gmock/gmock.h>

#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::ElementsAre;

class TieredStoreLookupTest : public TieredStoreTest {
 protected:
  static std::vector<BlockKey> Keys(std::uint64_t count) {
    std::vector<BlockKey> keys;
    for (std::uint64_t number = 0; number < count; ++number) keys.push_back(Key(number));
    return keys;
  }
  TieredStore::LookupResult Look(std::uint64_t count, const std::vector<bool>& elsewhere,
                                 bool is_last_word = true) {
    TieredStore::LookupOptions options;
    options.elsewhere = &elsewhere;
    options.is_last_word = is_last_word;
    return store_->Lookup(space_, Keys(count), {}, options);
  }
  std::uint64_t Hits(Tier tier) const {
    return store_->stats().hit_blocks[static_cast<std::size_t>(tier)];
  }
};

TEST_F(TieredStoreLookupTest, BlocksElsewhereFillTheGaps) {
  Open(false);
  for (const std::uint64_t number : {0, 2, 5}) ASSERT_TRUE(Put(number).ok());
  const TieredStore::LookupResult found = Look(6, {true, true, false, true, false, true});
  EXPECT_EQ(found.hit_blocks, 4u) << "nobody has block 4";
  EXPECT_THAT(found.tiers, ElementsAre(Tier::kHost, Tier::kPeer, Tier::kHost, Tier::kPeer));
  EXPECT_EQ(found.hit_tokens, 4u * kTokens);
  EXPECT_EQ(Hits(Tier::kPeer), 2u);
  EXPECT_EQ(Hits(Tier::kHost), 2u);
  EXPECT_EQ(Look(6, {}).hit_blocks, 1u) << "nobody could be asked";
  EXPECT_THAT(store_->Present(space_, Keys(6)), ElementsAre(true, false, true, false, false, true));
  EXPECT_THAT(store_->Present(space_ + 1, Keys(1)), ElementsAre(false));
}

TEST_F(TieredStoreLookupTest, WhoAsksAgainIsCountedOnce) {
  Open(false);
  ASSERT_TRUE(Put(0).ok());
  EXPECT_EQ(Look(2, {}, false).hit_blocks, 1u);
  EXPECT_EQ(store_->stats().lookup_blocks, 0u);
  EXPECT_EQ(store_->stats().lookup_partial, 0u);
  EXPECT_EQ(Hits(Tier::kHost), 0u);
  EXPECT_EQ(Look(2, {false, true}).hit_blocks, 2u);
  EXPECT_EQ(store_->stats().lookup_blocks, 2u);
  EXPECT_EQ(store_->stats().lookup_hit, 1u);
  // Nobody asks again when there is nothing to ask for.
  EXPECT_EQ(Look(1, {}, false).hit_blocks, 1u);
  EXPECT_EQ(store_->stats().lookup_hit, 2u);
  EXPECT_EQ(Hits(Tier::kHost), 2u);
}

TEST_F(TieredStoreLookupTest, OfAWindowOnlyTheEndIsNeeded) {
  NamespaceSpec spec = Spec();
  spec.groups.push_back(spec.groups[0]);
  spec.groups[0].layers = {0};
  spec.groups[1].layers = {1};
  spec.groups[1].attention = AttentionKind::kWindow;
  spec.groups[1].window_tokens = 2 * kTokens;
  Open(false, spec);
  const auto put = [&](std::uint64_t number, std::uint8_t group) {
    auto writer = store_->BeginStore({space_, group, Key(number)}, {.token_count = kTokens});
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      ASSERT_TRUE(WriteHead(*writer, ValuesOf(number), 0, head).ok());
    }
  };
  for (std::uint64_t number = 0; number < 4; ++number) put(number, 0);
  put(3, 1);
  EXPECT_EQ(store_->Lookup(space_, Keys(4)).hit_blocks, 0u) << "of the window one is missing";
  const TieredStore::LookupResult found = Look(4, {false, false, true, false});
  EXPECT_EQ(found.hit_blocks, 4u);
  EXPECT_THAT(found.tiers, ElementsAre(Tier::kHost, Tier::kHost, Tier::kPeer, Tier::kHost));
  EXPECT_THAT(store_->Present(space_, Keys(4)), ElementsAre(false, false, false, true));
}

}  // namespace
}  // namespace kvmill
