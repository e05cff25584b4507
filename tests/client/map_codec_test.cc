#include "client/map_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/long_form.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

// Two layer groups, of 3 layers and of 1.
NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.block_tokens = 128;
  spec.groups = {LayerGroup{.layers = {0, 1, 2}, .kv_heads = 8, .head_dim = 128},
                 LayerGroup{.layers = {3}, .kv_heads = 8, .head_dim = 128}};
  return spec;
}

constexpr std::uint64_t kArenaBytes = 64 << 20;

PagePosition Page(std::uint32_t arena, std::uint64_t offset, std::uint64_t generation_offset,
                  std::uint64_t generation, std::uint32_t bytes = 4096) {
  return {arena, bytes, offset, generation, generation_offset};
}

// Blocks 0 (both groups), 1 (the first group missed) of a request for two.
v1::MapReply Example(std::vector<PagePosition>* pages) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  const std::uint32_t a = writer.AddArena({Tier::kHost, 3, 9}, kArenaBytes);
  const std::uint32_t b = writer.AddArena({Tier::kHost, 4, 1}, kArenaBytes);
  EXPECT_EQ(writer.AddArena({Tier::kHost, 3, 9}, kArenaBytes), a);
  // One run; a run and a page in another arena; one page.
  const std::vector<PagePosition> one = {Page(a, 8192, 64, 2), Page(a, 12288, 72, 4),
                                         Page(a, 16384, 80, 2)};
  const std::vector<PagePosition> other = {Page(b, 0, 0, 8)};
  writer.AddBlock(Tier::kHost, 128, one);
  writer.AddBlock(Tier::kDisk, 128, other);
  writer.AddFailure(2, absl::NotFoundError("miss"));
  writer.AddBlock(Tier::kHost, 17, {Page(b, 65536, 128, 6, 1024)});
  reply.set_first_lease(100);
  if (pages != nullptr) {
    *pages = one;
    pages->insert(pages->end(), other.begin(), other.end());
    pages->push_back(Page(b, 65536, 128, 6, 1024));
  }
  return reply;
}

TEST(MapCodecTest, WhatIsWrittenIsRead) {
  std::vector<PagePosition> pages;
  const v1::MapReply reply = Example(&pages);
  EXPECT_EQ(reply.run_arenas_size(), 3) << "adjacent pages are one run";
  const auto content = ReadMapReply(reply, Spec(), 2);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->pages, pages);
  ASSERT_EQ(content->blocks.size(), 4u);
  EXPECT_EQ(content->blocks[0].lease, 100u);
  EXPECT_EQ(content->blocks[1].lease, 101u);
  EXPECT_EQ(content->blocks[1].tier, Tier::kDisk);
  EXPECT_EQ(content->blocks[1].first_page, 3u);
  EXPECT_TRUE(absl::IsNotFound(content->blocks[2].status));
  EXPECT_EQ(content->blocks[3].lease, 102u);
  EXPECT_EQ(content->blocks[3].token_count, 17u);
  EXPECT_EQ(content->arenas[1].id, (ArenaId{Tier::kHost, 4, 1}));
}

TEST(MapCodecTest, ScatteredPagesAreRunsOfOneAndBackwardsIsNoRun) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({}, kArenaBytes);
  const std::vector<PagePosition> pages = {Page(0, 40960, 8, 2), Page(0, 8192, 16, 2),
                                           Page(0, 12288, 64, 2)};
  writer.AddBlock(Tier::kHost, 128, pages);
  writer.AddFailure(1, absl::NotFoundError("miss"));
  const auto content = ReadMapReply(reply, Spec(), 1);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->pages, pages);
}

// Generations of a GPU's arena are in memory of their own, and may lie where its pages do.
TEST(MapCodecTest, ArenasOfAGpuHaveTheirGenerationsElsewhere) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({Tier::kGpu, 2, 5}, 12288, 8192);
  const std::vector<PagePosition> pages = {Page(0, 0, 8168, 2), Page(0, 4096, 8176, 2),
                                           Page(0, 8192, 8184, 2)};
  writer.AddBlock(Tier::kGpu, 128, pages);
  writer.AddFailure(1, absl::NotFoundError("miss"));
  const auto content = ReadMapReply(reply, Spec(), 1);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->pages, pages);
  EXPECT_EQ(content->arenas[0].id, (ArenaId{Tier::kGpu, 2, 5}));
  EXPECT_EQ(content->arenas[0].generation_bytes, 8192u);
}

TEST(MapCodecTest, ABlockOfManyLayersTakesAHandfulOfBytes) {
  NamespaceSpec spec = Spec();
  spec.groups.resize(1);
  spec.groups[0].layers.resize(36);
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({}, std::uint64_t{256} << 20);
  for (std::uint64_t b = 0; b < 64; ++b) {
    std::vector<PagePosition> pages;
    for (std::uint64_t i = 0; i < 36; ++i) {
      pages.push_back(Page(0, (2 << 20) + (b * 36 + i) * 110912, (b * 36 + i) * 8, 2, 110912));
    }
    writer.AddBlock(Tier::kHost, 128, pages);
  }
  EXPECT_LT(reply.ByteSizeLong(), 64 * 64u);
  EXPECT_TRUE(ReadMapReply(reply, spec, 64).ok());
}

TEST(MapCodecTest, RepliesThatDoNotFitAreRefused) {
  const std::vector<std::pair<std::function<void(v1::MapReply&)>, std::string>> cases = {
      {[](v1::MapReply& r) { r.set_run_offset_bytes(0, kArenaBytes); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_offset_bytes(0, ~std::uint64_t{0}); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_stride_bytes(0, 0xFFFFFFFF); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_page_bytes(0, 0); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_generation_offset_bytes(0, 65); }, "generation_offset"},
      {[](v1::MapReply& r) { r.set_run_generation_offset_bytes(0, kArenaBytes - 8); },
       "generation_offset"},
      {[](v1::MapReply& r) { r.set_run_arenas(0, 2); }, "run_arena 2"},
      {[](v1::MapReply& r) { r.mutable_arenas(0)->set_tier(v1::TIER_GPU); }, "tier gpu 0, want 1"},
      {[](v1::MapReply& r) { r.mutable_arenas(0)->set_tier(v1::TIER_DISK); }, "tier disk 0"},
      {[](v1::MapReply& r) { r.mutable_arenas(0)->set_generation_bytes(4096); },
       "tier host 4096, want 0"},
      {[](v1::MapReply& r) {
         r.mutable_arenas(0)->set_tier(v1::TIER_GPU);
         r.mutable_arenas(0)->set_generation_bytes(80);  // The run has three words, from 64 on.
       },
       "run_generation_offset_bytes 64, want 80"},
      {[](v1::MapReply& r) { r.set_run_pages(0, 2); }, "pages of a block 2, want 3"},
      {[](v1::MapReply& r) { r.set_run_pages(0, 4); }, "run_pages 4"},
      {[](v1::MapReply& r) { r.set_run_pages(0, 0); }, "run_pages 0"},
      {[](v1::MapReply& r) { r.set_run_counts(0, 9); }, "run"},
      {[](v1::MapReply& r) { r.add_run_pages(1); }, "run_pages 4, want 3"},
      {[](v1::MapReply& r) { r.add_generations(2); }, "generations 6, want 5"},
      {[](v1::MapReply& r) { r.mutable_generations()->RemoveLast(); }, "generations"},
      {[](v1::MapReply& r) { r.add_failures()->set_index(2); }, "token_counts 3, want 2"},
      {[](v1::MapReply& r) { r.mutable_failures(0)->set_index(4); }, "pages of a block 1, want 3"},
      {[](v1::MapReply& r) { r.mutable_failures(0)->mutable_status()->set_code(0); }, "status"},
      {[](v1::MapReply& r) { r.set_token_counts(0, 129); }, "token_count 129"},
      {[](v1::MapReply& r) { r.set_token_counts(0, 0); }, "token_count 0"},
      {[](v1::MapReply& r) { r.set_tiers(0, v1::TIER_UNSPECIFIED); }, "tier 0"},
      {[](v1::MapReply& r) { r.mutable_tiers()->RemoveLast(); }, "tiers 2, want 3"},
  };
  for (const auto& [change, says] : cases) {
    v1::MapReply reply = Example(nullptr);
    change(reply);
    const auto content = ReadMapReply(reply, Spec(), 2);
    ASSERT_FALSE(content.ok()) << says;
    EXPECT_THAT(std::string(content.status().message()), HasSubstr(says));
  }
  EXPECT_FALSE(ReadMapReply(Example(nullptr), Spec(), 1).ok());
  EXPECT_FALSE(ReadMapReply(Example(nullptr), Spec(), 3).ok());
}

TEST(MapCodecTest, WhatDamagedRepliesSayLiesWithinTheirArenas) {
  const std::uint32_t seed = ShortOrLong<std::uint32_t>(1, std::random_device()());
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  google::protobuf::LogSilencer quiet;  // Of every damaged string.
  const std::string good = Example(nullptr).SerializeAsString();
  int read = 0;
  for (int round = 0; round < ShortOrLong(100'000, 10'000'000); ++round) {
    std::string bytes = good;
    for (auto n = 1 + random() % 4; n > 0; --n) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    v1::MapReply reply;
    if (!reply.ParseFromString(bytes)) continue;
    const auto content = ReadMapReply(reply, Spec(), 2);
    if (!content.ok()) continue;
    ++read;
    ASSERT_EQ(content->blocks.size(), 4u);
    for (const PagePosition& page : content->pages) {
      ASSERT_LT(page.arena_index, content->arenas.size());
      const std::uint64_t end = content->arenas[page.arena_index].arena_bytes;
      ASSERT_LE(page.offset_bytes, end);
      ASSERT_LE(page.page_bytes, end - page.offset_bytes);
      ASSERT_LE(page.generation_offset_bytes, end - 8);
    }
  }
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace kvmill
