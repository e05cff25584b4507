// The order in which a store of pages sends its blocks, and what it tells about their ends.
#include "client/page_pieces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>

namespace kvmill {
namespace {

using ::testing::HasSubstr;

// Two groups: layers 0, 2, 4 with 4 heads, layers 1, 3 with 2 heads.
NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.model = "m";
  spec.hash_scheme = "h";
  spec.block_tokens = 128;
  spec.groups = {LayerGroup{.layers = {0, 2, 4}, .kv_heads = 4, .head_dim = 128},
                 LayerGroup{.layers = {1, 3}, .kv_heads = 2, .head_dim = 128}};
  return spec;
}

EngineLayers Entry(std::uint32_t group, std::uint32_t layer_begin, std::size_t layers,
                   std::uint32_t head_begin, std::uint32_t heads) {
  EngineLayers l;
  l.group = group;
  l.layer_begin = layer_begin;
  l.head_begin = head_begin;
  l.head_count = heads;
  l.page_tokens = 16;
  l.keys.resize(layers);
  l.values.resize(layers);
  return l;
}

class PagePiecesTest : public testing::Test {
 protected:
  void Make(std::uint32_t count) {
    numbers_ = {10, 11, 12, 13, 14, 15, 16, 17};
    lists_.clear();
    for (std::size_t group = 0; group < spec_.groups.size(); ++group) {
      bool has = false;
      for (const EngineLayers& entry : geometry_.layers) has = has || entry.group == group;
      lists_.push_back(has ? PageNumbers(numbers_) : PageNumbers());
    }
    blocks_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      PageBlock block;
      block.key = *BlockKey::FromBytes("key" + std::to_string(i));
      block.token_count = 128;
      block.block_index = i;
      block.pages = lists_;
      blocks_.push_back(block);
    }
    ASSERT_TRUE(CheckPageBlocks(spec_, geometry_, blocks_).ok());
    pieces_ = std::make_unique<PagePieces>(spec_, geometry_, blocks_);
  }
  // Everything that Next gives now; counts how often each (block, group, layer, head) came.
  std::vector<v1::StoreChunk> Take() {
    std::vector<v1::StoreChunk> chunks;
    v1::StoreChunk chunk;
    while (pieces_->Next(&chunk)) {
      for (std::uint32_t l = 0; l < chunk.layer_count(); ++l) {
        for (std::uint32_t h = 0; h < chunk.head_count(); ++h) {
          ++came_[{chunk.sequence(), chunk.group(), chunk.layer_begin() + l,
                   chunk.head_begin() + h}];
        }
      }
      if (chunk.last()) ++lasts_[{chunk.sequence(), chunk.group()}];
      chunks.push_back(chunk);
    }
    return chunks;
  }

  const NamespaceSpec spec_ = Spec();
  EngineGeometry geometry_;
  std::vector<std::uint64_t> numbers_;
  std::vector<PageNumbers> lists_;
  std::vector<PageBlock> blocks_;
  std::unique_ptr<PagePieces> pieces_;
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>, int> came_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> lasts_;
};

TEST_F(PagePiecesTest, EverythingReadyComesOnceAndBlockByBlock) {
  geometry_.layers = {Entry(0, 0, 3, 0, 4), Entry(1, 0, 2, 0, 2)};
  Make(3);
  EXPECT_TRUE(Take().empty()) << "nothing is ready";
  EXPECT_FALSE(pieces_->sent_anything());
  pieces_->Ready(PageStoreOptions::kAllLayers);
  EXPECT_TRUE(pieces_->all_ready());
  const auto chunks = Take();
  std::uint32_t block = 0;
  for (const v1::StoreChunk& chunk : chunks) {
    EXPECT_GE(chunk.sequence(), block);
    block = chunk.sequence();
    EXPECT_EQ(chunk.pages().numbers_size(), 8);
    EXPECT_EQ(chunk.pages().numbers(7), 17u);
    EXPECT_EQ(chunk.key(), "key" + std::to_string(block));
    EXPECT_EQ(chunk.kind(), v1::CHUNK_PAGES16);
    // 256 KiB a layer of the first group.
    EXPECT_LE(chunk.layer_count() * chunk.head_count() * 64 * 1024, 512u * 1024);
  }
  EXPECT_EQ(came_.size(), 3u * (3 * 4 + 2 * 2));
  for (const auto& [what, times] : came_) EXPECT_EQ(times, 1);
  EXPECT_EQ(lasts_.size(), 6u);
  for (const auto& [what, times] : lasts_) EXPECT_EQ(times, 1);
  EXPECT_TRUE(pieces_->finished());
  EXPECT_FALSE(pieces_->AtRest(0));
  pieces_->Closed(0, 0);
  EXPECT_FALSE(pieces_->AtRest(0));
  pieces_->Closed(0, 1);
  EXPECT_TRUE(pieces_->AtRest(0));
  EXPECT_TRUE(Take().empty()) << "the daemon knows";
}

TEST_F(PagePiecesTest, LayersComeWhenTheyAreReadyAndNotBefore) {
  geometry_.layers = {Entry(0, 0, 3, 0, 4), Entry(1, 0, 2, 0, 2)};
  Make(2);
  for (std::uint32_t layers = 0; layers <= 5; ++layers) {
    pieces_->Ready(layers);
    pieces_->Ready(layers / 2);  // Never fewer.
    for (const v1::StoreChunk& chunk : Take()) {
      for (std::uint32_t l = 0; l < chunk.layer_count(); ++l) {
        EXPECT_EQ(spec_.groups[chunk.group()].layers[chunk.layer_begin() + l], layers - 1);
      }
    }
    EXPECT_EQ(pieces_->finished(), layers == 5);
  }
  EXPECT_EQ(came_.size(), 2u * (3 * 4 + 2 * 2));
  EXPECT_EQ(lasts_.size(), 4u);
}

TEST_F(PagePiecesTest, ARankSendsItsHeadsAndLayersAlone) {
  geometry_.layers = {Entry(0, 1, 2, 2, 2)};
  Make(1);
  pieces_->Ready(PageStoreOptions::kAllLayers);
  Take();
  EXPECT_EQ(came_.size(), 4u);
  EXPECT_TRUE((came_.contains({0, 0, 1, 2}) && came_.contains({0, 0, 2, 3})));
  EXPECT_EQ(lasts_.size(), 1u) << "of the other group nothing is said";
  EXPECT_TRUE(pieces_->finished());
}

TEST_F(PagePiecesTest, WhatIsGivenUpEndsAndWhatWasNeverSentIsSilent) {
  geometry_.layers = {Entry(0, 0, 3, 0, 4), Entry(1, 0, 2, 0, 2)};
  Make(2);
  pieces_->Ready(1);  // Layer 0, of the first group.
  Take();
  EXPECT_TRUE(pieces_->GiveUp(0, 1)) << "no result will come";
  EXPECT_FALSE(pieces_->GiveUp(0, 1));
  EXPECT_FALSE(pieces_->GiveUp(0, 0)) << "the daemon will say";
  EXPECT_FALSE(pieces_->AtRest(0));
  const auto ends = Take();
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(ends[0].layer_count(), 0u);
  EXPECT_TRUE(ends[0].last());
  EXPECT_TRUE(ends[0].has_pages());
  pieces_->Closed(0, 0);
  EXPECT_TRUE(pieces_->AtRest(0));
  // A result in the middle: the rest stays here, and the daemon hears that.
  pieces_->Closed(1, 0);
  pieces_->Ready(PageStoreOptions::kAllLayers);
  Take();
  EXPECT_FALSE(came_.contains({1, 0, 1, 0}));
  EXPECT_FALSE(came_.contains({0, 0, 1, 0}));
  EXPECT_TRUE(came_.contains({1, 1, 1, 0}));
  EXPECT_EQ((lasts_[{1, 0}]), 1);
  EXPECT_TRUE(pieces_->finished());
  pieces_->Closed(7, 0);  // Nonsense changes nothing.
  pieces_->Closed(0, 7);
}

TEST_F(PagePiecesTest, BlocksThatDoNotFitAreRefusedByName) {
  geometry_.layers = {Entry(0, 0, 3, 0, 4), Entry(1, 0, 2, 0, 2)};
  Make(1);
  const auto refusal = [&] { return CheckPageBlocks(spec_, geometry_, blocks_).ToString(); };
  blocks_[0].token_count = 129;
  EXPECT_THAT(refusal(), HasSubstr("block 0: token_count 129, want 1 to 128"));
  blocks_[0].token_count = 100;
  EXPECT_THAT(refusal(), HasSubstr("layer group 0: 8 pages, want 7 for 100 tokens"));
  blocks_[0].token_count = 128;
  blocks_[0].pages = absl::MakeConstSpan(lists_).first(1);
  EXPECT_THAT(refusal(), HasSubstr("1 lists of pages, the namespace has 2 layer groups"));
  geometry_.layers.push_back(Entry(0, 0, 1, 0, 4));
  geometry_.layers.back().page_tokens = 32;
  EXPECT_THAT(refusal(), HasSubstr("pages of 16 and of 32 tokens"));
  const std::vector<PageBlock> many(2049, blocks_[0]);
  EXPECT_THAT(CheckPageBlocks(spec_, geometry_, many).ToString(), HasSubstr("at most 4096"));
}

}  // namespace
}  // namespace kvmill
