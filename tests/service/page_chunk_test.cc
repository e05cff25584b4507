// One chunk of a store of pages: from memory that only a device's streams can touch it becomes the
// bytes that it becomes from host memory.
#include "service/page_chunk.h"

#include <gmock/gmock.h>

#include <cstring>
#include <memory>
#include <vector>

#include "kernels/float16.h"
#include "storage/device_encoder.h"
#include "tests/storage/hidden_device.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kPageTokens = 16;

class PageChunkTest : public TieredStoreTest {
 protected:
  static constexpr std::uint64_t kPageCount = 6;
  static constexpr std::uint64_t kTokenBytes = std::uint64_t{2} * kDim * kHeads + 16;
  static constexpr std::uint64_t kPageBytes = kTokenBytes * kPageTokens;
  static constexpr std::uint64_t kRegionBytes = 2 * kLayers * kPageCount * kPageBytes;
  static constexpr std::uint64_t kPages[] = {5, 0, 2, 3};

  void SetUp() override {
    Open(false);
    ns_ = *store_->OpenNamespace("test", Spec());
    auto encoder = DeviceEncoder::Create(device_, 1);
    ASSERT_TRUE(encoder.ok()) << encoder.status();
    encoder_ = *std::move(encoder);
    EngineLayers layers;
    layers.block_tokens = kTokens;
    layers.head_dim = kDim;
    layers.head_count = kHeads;
    layers.page_tokens = kPageTokens;
    layers.page_count = kPageCount;
    layers.page_bytes = layers.page_stride_bytes = kPageBytes;
    layers.token_stride_bytes = kTokenBytes;
    layers.head_stride_bytes = std::uint64_t{2} * kDim;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      layers.keys.push_back({0, 2 * layer * kPageCount * kPageBytes});
      layers.values.push_back({0, (2 * layer + 1) * kPageCount * kPageBytes});
    }
    geometry_.layers = {layers};
    geometry_.regions.resize(1);
    geometry_.regions[0].base = 0x10000;
    geometry_.regions[0].bytes = kRegionBytes;
    geometry_.regions[0].kind = EngineRegionKind::kDeviceIpc;
    ASSERT_EQ(CheckGeometry(Spec(), geometry_), absl::OkStatus());
  }

  // The values of a block, [layer][head][K, V][token, channel], in the device's pages.
  std::unique_ptr<EngineMemory> OnDevice(const Values& values, std::uint32_t tokens) {
    std::vector<std::byte> bytes(kRegionBytes, std::byte{0xFF});  // NaN elsewhere.
    std::size_t at = 0;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        for (std::uint32_t half = 0; half < 2; ++half) {
          for (std::uint32_t token = 0; token < tokens; ++token, at += kDim) {
            std::memcpy(
                bytes.data() +
                    ((2 * layer + half) * kPageCount + kPages[token / kPageTokens]) * kPageBytes +
                    token % kPageTokens * kTokenBytes + std::size_t{2} * head * kDim,
                &values[at], std::size_t{2} * kDim);
          }
        }
      }
    }
    auto allocation = std::make_shared<DeviceAllocation>();
    auto memory = device_.Allocate(bytes.size() + 64, "engine");
    EXPECT_TRUE(memory.ok()) << memory.status();
    std::memcpy(device_.Real((*memory)->address()) + 64, bytes.data(), bytes.size());
    allocation->memory = *std::move(memory);
    allocation->encoder = encoder_.get();
    auto engine = std::make_unique<EngineMemory>(space_, geometry_);
    auto region = SharedRegion::In(allocation, 64, kRegionBytes);
    EXPECT_TRUE(region.ok()) << region.status();
    EXPECT_EQ(engine->Share(0, &*region), absl::OkStatus());
    return engine;
  }
  static v1::StoreChunk Chunk(std::uint32_t tokens) {
    v1::StoreChunk chunk;
    chunk.set_token_count(tokens);
    chunk.set_kind(v1::CHUNK_PAGES16);
    chunk.set_layer_count(kLayers);
    chunk.set_head_count(kHeads);
    for (std::uint32_t page = 0; page * kPageTokens < tokens; ++page) {
      chunk.mutable_pages()->add_numbers(kPages[page]);
    }
    return chunk;
  }
  std::vector<std::string> PagesOf(const BlockId& id) {
    auto ref = store_->Fetch(id);
    EXPECT_TRUE(ref.ok()) << ref.status();
    std::vector<std::string> pages;
    for (const auto& page : ref->pages()) {
      pages.emplace_back(reinterpret_cast<const char*>(page.data()), page.size());
    }
    return pages;
  }
  absl::StatusOr<WriteResult> Write(const BlockId& id, const BlockOrigin& origin,
                                    const Values& values) {
    const auto memory = OnDevice(values, origin.token_count);
    const v1::StoreChunk chunk = Chunk(origin.token_count);
    EXPECT_EQ(CheckPageChunk(ns_, *memory, chunk), absl::OkStatus());
    EXPECT_TRUE(IsOnGpu(*memory, chunk));
    auto writer = store_->BeginStore(id, origin);
    if (!writer.ok()) return writer.status();
    return WritePageChunk(ns_, *memory, chunk, *writer);
  }
  void ExpectTheSame(const BlockId& id, const BlockOrigin& origin, const Values& values) {
    const auto written = Write(id, origin, values);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_TRUE(written->sealed);
    const std::vector<std::string> from_device = PagesOf(id);
    ASSERT_EQ(*store_->Remove(space_, {id.key}), 1u);
    ASSERT_TRUE(Put(id, origin, values).ok());
    EXPECT_EQ(from_device, PagesOf(id));
  }

  HiddenDevice device_;
  std::unique_ptr<DeviceEncoder> encoder_;
  TieredStore::NamespaceInfo ns_;
  EngineGeometry geometry_;
};

TEST_F(PageChunkTest, PagesThatOnlyTheDeviceReachesBecomeTheSameBytes) {
  ExpectTheSame(Id(1), {.token_count = kTokens}, ValuesOf(1));
  // In 16 bits: a tail, and a head whose scales no tile holds.
  ExpectTheSame({space_, 0, TailKey(Key(1), 23, Key(2))},
                {.parent = Key(1), .token_count = 23, .block_index = 1, .tail_key = Key(2)},
                ValuesOf(2, 23));
  Values values = ValuesOf(3);
  for (std::size_t i = 0; i < std::size_t{kTokens} * kDim; ++i) values[i] = FloatToFloat16(6e4f);
  ExpectTheSame(Id(3), {.token_count = kTokens}, values);
}

TEST_F(PageChunkTest, NonFiniteValuesAreNamed) {
  Values values = ValuesOf(4);
  values[std::size_t{5} * kDim + 7] = 0x7C00;
  const auto written = Write(Id(4), {.token_count = kTokens}, values);
  EXPECT_THAT(written.status().ToString(), HasSubstr("K of layer 0 head 0 token 5 channel 7"));
}

TEST_F(PageChunkTest, AnErrorOfTheDeviceIsTheBlocks) {
  device_.fail_to_device = 1;
  const auto written = Write(Id(5), {.token_count = kTokens}, ValuesOf(5));
  EXPECT_THAT(written.status().ToString(), HasSubstr("told to fail"));
  EXPECT_EQ(HostUsedBytes(), 0u);
  ExpectTheSame(Id(5), {.token_count = kTokens}, ValuesOf(5));  // And the next one is fine.
}

}  // namespace
}  // namespace kvmill
