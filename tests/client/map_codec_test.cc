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

MappedRun Pages(std::uint32_t arena, std::uint64_t offset, std::uint64_t generation_offset,
                std::uint32_t pages = 1, std::uint32_t stride = 0, std::uint32_t bytes = 4096) {
  return {arena, pages, bytes, stride, offset, generation_offset};
}

// Blocks 0 (both groups), 1 (the first group missed) of a request for two.
v1::MapReply Example(std::vector<MappedRun>* runs) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  const std::uint32_t a = writer.AddArena({Tier::kHost, 3, 9}, kArenaBytes);
  const std::uint32_t b = writer.AddArena({Tier::kHost, 4, 1}, kArenaBytes);
  EXPECT_EQ(writer.AddArena({Tier::kHost, 3, 9}, kArenaBytes), a);
  // Three pages; one in another arena; one of another size.
  const std::vector<MappedRun> all = {Pages(a, 8192, 64, 3, 4096), Pages(b, 0, 0),
                                      Pages(b, 65536, 128, 1, 0, 1024)};
  writer.AddBlock(Tier::kHost, 128, {&all[0], 1});
  writer.AddBlock(Tier::kDisk, 128, {&all[1], 1});
  writer.AddFailure(2, absl::NotFoundError("miss"));
  writer.AddBlock(Tier::kHost, 17, {&all[2], 1});
  reply.set_first_lease(100);
  if (runs != nullptr) *runs = all;
  return reply;
}

TEST(MapCodecTest, WhatIsWrittenIsRead) {
  std::vector<MappedRun> runs;
  const v1::MapReply reply = Example(&runs);
  const auto content = ReadMapReply(reply, Spec(), 2);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->runs, runs);
  EXPECT_EQ(content->page_count, 5u);
  ASSERT_EQ(content->blocks.size(), 4u);
  EXPECT_EQ(content->blocks[0].lease, 100u);
  EXPECT_EQ(content->blocks[1].lease, 101u);
  EXPECT_EQ(content->blocks[1].tier, Tier::kDisk);
  EXPECT_EQ(content->blocks[1].first_run, 1u);
  EXPECT_EQ(content->blocks[1].run_count, 1u);
  EXPECT_EQ(content->blocks[1].first_page, 3u);
  EXPECT_TRUE(absl::IsNotFound(content->blocks[2].status));
  EXPECT_EQ(content->blocks[3].lease, 102u);
  EXPECT_EQ(content->blocks[3].token_count, 17u);
  EXPECT_EQ(content->blocks[3].first_page, 4u);
  EXPECT_EQ(content->arenas[1].id, (ArenaId{Tier::kHost, 4, 1}));
  EXPECT_EQ(content->runs[0].page(2), (PagePosition{0, 4096, 16384, 80}));
}

// From a daemon that sends generations unasked: the reader loads them itself.
TEST(MapCodecTest, GenerationsOfAnOlderDaemonArePassedOver) {
  std::vector<MappedRun> runs;
  v1::MapReply reply = Example(&runs);
  MapReplyWriter(&reply).AddGenerations({2, 4, 2, 8, 6});
  ASSERT_EQ(reply.generations_size(), 5);
  EXPECT_EQ(reply.generations(3), 8u);
  const auto content = ReadMapReply(reply, Spec(), 2);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->runs, runs);
}

TEST(MapCodecTest, ABlockMayBeOfSeveralRuns) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({}, kArenaBytes);
  const std::vector<MappedRun> runs = {Pages(0, 40960, 8), Pages(0, 8192, 64, 2, 8192)};
  writer.AddBlock(Tier::kHost, 128, runs);
  writer.AddFailure(1, absl::NotFoundError("miss"));
  const auto content = ReadMapReply(reply, Spec(), 1);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->runs, runs);
  EXPECT_EQ(content->blocks[0].run_count, 2u);
  EXPECT_EQ(content->page_count, 3u);
}

// Generations of a GPU's arena are in memory of their own, and may lie where its pages do.
TEST(MapCodecTest, ArenasOfAGpuHaveTheirGenerationsElsewhere) {
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({Tier::kGpu, 2, 5}, 12288, 8192);
  const MappedRun run = Pages(0, 0, 8168, 3, 4096);
  writer.AddBlock(Tier::kGpu, 128, {&run, 1});
  writer.AddFailure(1, absl::NotFoundError("miss"));
  const auto content = ReadMapReply(reply, Spec(), 1);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->runs, std::vector<MappedRun>{run});
  EXPECT_EQ(content->arenas[0].id, (ArenaId{Tier::kGpu, 2, 5}));
  EXPECT_EQ(content->arenas[0].generation_bytes, 8192u);
}

TEST(MapCodecTest, ABlockOfManyLayersTakesAHandfulOfBytes) {
  NamespaceSpec spec = Spec();
  spec.groups.resize(1);
  spec.groups[0].layers.resize(36);
  v1::MapReply reply;
  MapReplyWriter writer(&reply);
  writer.AddArena({}, std::uint64_t{512} << 20);
  for (std::uint64_t b = 0; b < 64; ++b) {
    // Two extents of 18 slots, as the daemon's pool lays them.
    const std::vector<MappedRun> runs = {
        Pages(0, (2 * b + 1) << 21, (2 * b + 1) * 16384, 18, 116480, 110912),
        Pages(0, (2 * b + 2) << 21, (2 * b + 2) * 16384, 18, 116480, 110912)};
    writer.AddBlock(Tier::kHost, 128, runs);
  }
  EXPECT_LT(reply.ByteSizeLong(), 64 * 48u);
  EXPECT_TRUE(ReadMapReply(reply, spec, 64).ok());
}

TEST(MapCodecTest, RepliesThatDoNotFitAreRefused) {
  const std::vector<std::pair<std::function<void(v1::MapReply&)>, std::string>> cases = {
      {[](v1::MapReply& r) { r.set_run_offset_bytes(0, kArenaBytes); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_offset_bytes(0, ~std::uint64_t{0}); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_stride_bytes(0, 0xFFFFFFFF); }, "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_page_bytes(0, 0); }, "run_offset_bytes"},
      // Headers of pages are read as aligned memory.
      {[](v1::MapReply& r) { r.set_run_offset_bytes(0, r.run_offset_bytes(0) + 8); },
       "run_offset_bytes"},
      {[](v1::MapReply& r) { r.set_run_stride_bytes(0, r.run_stride_bytes(0) + 8); },
       "run_stride_bytes"},
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
    std::size_t pages = 0;
    for (const MappedRun& run : content->runs) {
      ASSERT_LT(run.arena_index, content->arenas.size());
      const std::uint64_t end = content->arenas[run.arena_index].arena_bytes;
      pages += run.page_count;
      for (const std::uint32_t i : {0u, run.page_count - 1}) {
        ASSERT_LE(run.page(i).offset_bytes, end);
        ASSERT_LE(run.page(i).page_bytes, end - run.page(i).offset_bytes);
        ASSERT_LE(run.page(i).generation_offset_bytes, end - 8);
      }
    }
    ASSERT_EQ(pages, content->page_count);
  }
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace kvmill
