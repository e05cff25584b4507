#include "client/engine_geometry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "client/convert.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

NamespaceSpec Spec() {
  NamespaceSpec spec;
  spec.model = "model";
  spec.hash_scheme = "scheme";
  spec.block_tokens = 128;
  spec.groups = {LayerGroup{.layers = {0, 1, 2}, .kv_heads = 8, .head_dim = 128}};
  return spec;
}

// Rank 1 of 2: heads 4 to 7 of three layers, pages of 16 tokens [tokens, heads, D], K and V of all
// layers in one region, pages padded to 32 KiB.
EngineGeometry Good() {
  EngineGeometry geometry;
  geometry.regions = {{0x7000'0000, 64 << 20}};
  EngineLayers l;
  l.block_tokens = 128;
  l.head_dim = 128;
  l.head_begin = 4;
  l.head_count = 4;
  l.page_tokens = 16;
  l.page_count = 256;
  l.page_bytes = 16 * 4 * 128 * 2;
  l.page_stride_bytes = 32 << 10;
  l.head_stride_bytes = 256;
  l.token_stride_bytes = 4 * 256;
  for (std::uint64_t i = 0; i < 3; ++i) {
    l.keys.push_back({0, 2 * i * (8 << 20)});
    l.values.push_back({0, (2 * i + 1) * (8 << 20)});
  }
  geometry.layers = {l};
  return geometry;
}

TEST(EngineGeometryTest, WhatFitsPassesAndCrossesTheWireUnchanged) {
  const EngineGeometry good = Good();
  EXPECT_TRUE(CheckGeometry(Spec(), good).ok()) << CheckGeometry(Spec(), good);
  v1::EngineGeometry wire;
  ToProto(good, &wire);
  const auto back = FromProto(wire);
  ASSERT_TRUE(back.ok());
  EngineGeometry said = good;  // What its regions are is told in words.
  for (EngineRegion& region : said.regions) region.kind = EngineRegionKind::kPrivate;
  EXPECT_EQ(*back, said);
  // Heads before tokens, as some engines have it.
  EngineGeometry hnd = good;
  hnd.layers[0].token_stride_bytes = 256;
  hnd.layers[0].head_stride_bytes = 16 * 256;
  EXPECT_TRUE(CheckGeometry(Spec(), hnd).ok()) << CheckGeometry(Spec(), hnd);
  // Records: one a head, a page a block.
  EngineGeometry records = good;
  EngineLayers& l = records.layers[0];
  const std::uint64_t record_bytes = RecordBytes(FormatOf(Spec(), Spec().groups[0]));
  l.element = EngineElement::kRecords;
  l.values.clear();
  l.page_tokens = 128;
  l.token_stride_bytes = 0;
  l.head_stride_bytes = record_bytes;
  l.page_bytes = 4 * record_bytes;
  l.page_stride_bytes = 64 << 10;
  l.page_count = 100;
  EXPECT_TRUE(CheckGeometry(Spec(), records).ok()) << CheckGeometry(Spec(), records);
}

TEST(EngineGeometryTest, EveryMismatchIsRefusedByNameAndValue) {
  using Change = std::function<void(EngineGeometry&)>;
  const auto layers = [](std::function<void(EngineLayers&)> change) {
    return [change](EngineGeometry& g) { change(g.layers[0]); };
  };
  constexpr std::uint64_t kMax = ~std::uint64_t{0};
  const struct {
    Change change;
    const char* says;
    bool differs;  // From the namespace.
  } cases[] = {
      {[](EngineGeometry& g) { g.regions.clear(); }, "0 regions", false},
      {[](EngineGeometry& g) { g.layers.clear(); }, "0 layers", false},
      {[](EngineGeometry& g) { g.regions[0].bytes = 0; }, "bytes 0", false},
      {[](EngineGeometry& g) { g.regions[0].base = kMax - 5; }, "an end below 2^64", false},
      {[](EngineGeometry& g) {
         g.regions.push_back({0x7000'0000 + (64 << 20) - 1, 1});
       },
       "before the next region", false},
      {[](EngineGeometry& g) { g.layers.push_back(g.layers[0]); }, "the same layers and heads",
       false},
      {layers([](EngineLayers& l) { l.group = 1; }), "group 1", true},
      {layers([](EngineLayers& l) { l.layer_begin = 1; }), "layer end 4", true},
      {layers([](EngineLayers& l) { l.keys.clear(); }), "keys 0", false},
      {layers([](EngineLayers& l) { l.values.pop_back(); }), "values 2 places, want 3", false},
      // A producer with other blocks.
      {layers([](EngineLayers& l) { l.block_tokens = 64; }),
       "block_tokens 64, the namespace has 128", true},
      {layers([](EngineLayers& l) { l.head_dim = 64; }), "head_dim 64, the namespace has 128",
       true},
      // Another tensor-parallel size.
      {layers([](EngineLayers& l) { l.head_begin = 5; }),
       "head end 9, the namespace has 8 KV heads", true},
      {layers([](EngineLayers& l) { l.head_count = 0; }), "head_count 0", false},
      {layers([](EngineLayers& l) { l.head_begin = 0xFFFFFFFF; }), "head end 4294967299", true},
      {layers([](EngineLayers& l) { l.element = EngineElement::kBFloat16; }),
       "element bf16, the namespace has fp16", true},
      {layers([](EngineLayers& l) { l.page_tokens = 0; }), "page_tokens 0", false},
      {layers([](EngineLayers& l) { l.page_tokens = 24; }), "page_tokens 24, want a divisor of",
       false},
      {layers([](EngineLayers& l) { l.page_count = 0; }), "page_count 0", false},
      // Padding that is not said.
      {layers([](EngineLayers& l) { l.page_bytes = 16 * 4 * 256 - 1; }),
       "page_bytes 16383, want at least 16384", false},
      {layers([](EngineLayers& l) { l.page_stride_bytes = 100; }), "page_stride_bytes 100", false},
      {layers([](EngineLayers& l) { l.token_stride_bytes = 254; }), "token_stride_bytes 254",
       false},
      {layers([](EngineLayers& l) { l.token_stride_bytes = 3 * 256; }), "do not overlap", false},
      {layers([](EngineLayers& l) { l.head_stride_bytes = 257; }), "head_stride_bytes 257", false},
      {layers([](EngineLayers& l) { l.token_stride_bytes = kMax - 1; }), "page_bytes 16384", false},
      {layers([](EngineLayers& l) { l.page_stride_bytes = kMax; }), "keys[0].offset_bytes 0",
       false},
      {layers([](EngineLayers& l) { l.page_count = kMax; }), "keys[0].offset_bytes", false},
      {layers([](EngineLayers& l) { l.keys[1].region = 1; }), "keys[1].region 1, want below 1",
       false},
      {layers([](EngineLayers& l) { l.values[2].offset_bytes = 60 << 20; }),
       "values[2].offset_bytes 62914560", false},
      {layers([](EngineLayers& l) { l.values[0].offset_bytes += 1; }), "an even one", false},
      {layers([](EngineLayers& l) { l.keys[0].offset_bytes = kMax - 1; }), "keys[0].offset_bytes",
       false},
      {layers([](EngineLayers& l) { l.element = EngineElement::kRecords; }),
       "values 3 places, want 0", false},
      {layers([](EngineLayers& l) {
         l.element = EngineElement::kRecords;
         l.values.clear();
       }),
       "page_tokens 16, want 128", false},
  };
  for (const auto& c : cases) {
    EngineGeometry geometry = Good();
    c.change(geometry);
    const absl::Status status = CheckGeometry(Spec(), geometry);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
    EXPECT_EQ(status.code(), c.differs ? absl::StatusCode::kFailedPrecondition
                                       : absl::StatusCode::kInvalidArgument)
        << status;
  }
  v1::EngineGeometry wire;
  ToProto(Good(), &wire);
  wire.mutable_layers(0)->set_element(v1::ENGINE_ELEMENT_UNSPECIFIED);
  EXPECT_THAT(std::string(FromProto(wire).status().message()), HasSubstr("layers[0]: element 0"));
}

TEST(EngineGeometryTest, WhatARegionIsCrossesTheWireAndItsMemoryDoesNot) {
  EngineGeometry geometry = Good();
  const auto across = [&] {
    v1::EngineGeometry wire;
    ToProto(geometry, &wire);
    const auto back = FromProto(wire);
    EXPECT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->regions[0].fd, -1);
    EXPECT_FALSE(back->regions[0].device_memory.has_value());
    return back->regions[0].kind;
  };
  EngineRegion& region = geometry.regions[0];
  EXPECT_EQ(across(), EngineRegionKind::kPrivate);
  region.fd = 7;
  EXPECT_EQ(across(), EngineRegionKind::kMemfd);
  region.device_memory.emplace();
  EXPECT_THAT(CheckGeometry(Spec(), geometry).ToString(),
              HasSubstr("fd 7, want none beside memory of a GPU"));
  region.fd = -1;
  EXPECT_EQ(across(), EngineRegionKind::kDeviceIpc);
  EXPECT_TRUE(CheckGeometry(Spec(), geometry).ok());
  region.kind = EngineRegionKind::kMemfd;
  EXPECT_THAT(CheckGeometry(Spec(), geometry).ToString(), HasSubstr("kind 2, want 0"));

  v1::EngineGeometry wire;
  ToProto(Good(), &wire);
  wire.mutable_regions(0)->clear_kind();  // An older client.
  EXPECT_EQ(FromProto(wire)->regions[0].kind, EngineRegionKind::kUnsaid);
  wire.mutable_regions(0)->set_kind(static_cast<v1::EngineRegionKind>(4));  // A later one.
  EXPECT_EQ(FromProto(wire).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill
