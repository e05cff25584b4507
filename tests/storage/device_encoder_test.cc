// Blocks written from pages that lie in a device's memory: the bytes that the same values give from
// host memory, nothing before they are ready, and clean errors.
#include "storage/device_encoder.h"

#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

// K and V of one block in a device's memory as an engine might lay them out: pages of 16 tokens
// that go up or down, all layers and heads of a token together, rows that are padded.
class EnginePages {
 public:
  static constexpr std::uint32_t kPageTokens = 16;
  EnginePages(Device& device, std::uint32_t layers, std::uint32_t heads, std::uint32_t head_dim,
              std::uint32_t tokens)
      : layers_(layers), heads_(heads), head_dim_(head_dim), tokens_(tokens) {
    row_bytes_ = std::size_t{head_dim} * 2 + 32;
    token_bytes_ = row_bytes_ * layers * heads * 2;
    page_count_ = (tokens + kPageTokens - 1) / kPageTokens;
    bytes_.resize(token_bytes_ * kPageTokens * page_count_);
    auto memory = device.Allocate(bytes_.size(), "engine");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    // The last page lies first.
    for (std::size_t page = 0; page < page_count_; ++page) {
      pages_.push_back(memory_->address() + (page_count_ - 1 - page) * token_bytes_ * kPageTokens);
    }
  }
  // As ValuesOf has them: [layer][head][K, V][token, channel].
  void Fill(const std::vector<std::uint16_t>& values) {
    std::size_t at = 0;
    for (std::size_t half = 0; half < std::size_t{layers_} * heads_ * 2; ++half) {
      for (std::size_t token = 0; token < tokens_; ++token) {
        const std::size_t page = page_count_ - 1 - token / kPageTokens;
        std::byte* row = bytes_.data() + (page * kPageTokens + token % kPageTokens) * token_bytes_ +
                         half * row_bytes_;
        std::memcpy(row, &values[at], std::size_t{head_dim_} * 2);
        at += head_dim_;
      }
    }
  }
  absl::Status Upload(DeviceStream& stream) {
    return stream.Copy(memory_->address(), bytes_.data(), bytes_.size());
  }
  HeadInput Head(std::uint32_t layer, std::uint32_t head) const {
    HeadInput input;
    const std::size_t half = (std::size_t{layer} * heads_ + head) * 2;
    for (HeadPages* pages : {&input.k, &input.v}) {
      pages->pages = pages_.data();
      pages->page_tokens = kPageTokens;
      pages->token_stride_bytes = static_cast<std::ptrdiff_t>(token_bytes_);
      pages->offset_bytes = (half + (pages == &input.v ? 1 : 0)) * row_bytes_;
    }
    return input;
  }

 private:
  const std::uint32_t layers_, heads_, head_dim_, tokens_;
  std::size_t row_bytes_ = 0, token_bytes_ = 0, page_count_ = 0;
  std::vector<std::byte> bytes_;
  std::vector<const std::byte*> pages_;
  std::unique_ptr<DeviceMemory> memory_;
};

class DeviceEncoderTest : public TieredStoreTest {
 protected:
  void SetUp() override {
    auto encoder = DeviceEncoder::Create(*device_, 2);
    ASSERT_TRUE(encoder.ok()) << encoder.status();
    encoder_ = *std::move(encoder);
    stream_ = *device_->CreateStream();
  }
  absl::Status PutFromDevice(const BlockId& id, const BlockOrigin& origin, const Values& values) {
    EnginePages pages(*device_, kLayers, kHeads, kDim, origin.token_count);
    pages.Fill(values);
    absl::Status uploaded = pages.Upload(*stream_);
    if (uploaded.ok()) uploaded = stream_->Synchronize();
    if (!uploaded.ok()) return uploaded;
    auto writer = store_->BeginStore(id, origin);
    if (!writer.ok()) return writer.status();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<HeadInput> heads = {pages.Head(layer, 0), pages.Head(layer, 1)};
      const auto written = writer->WriteDeviceHeads(layer, 0, heads, *encoder_, nullptr);
      if (!written.ok()) return written.status();
    }
    return absl::OkStatus();
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
  // The same block from the device and from host memory.
  void ExpectTheSame(const BlockId& id, const BlockOrigin& origin, const Values& values) {
    const absl::Status put = PutFromDevice(id, origin, values);
    ASSERT_TRUE(put.ok()) << put;
    const std::vector<std::string> from_device = PagesOf(id);
    ASSERT_EQ(*store_->Remove(space_, {id.key}), 1u);
    ASSERT_TRUE(Put(id, origin, values).ok());
    EXPECT_EQ(from_device, PagesOf(id));
  }

  const std::unique_ptr<Device> device_ = MakeHostDevice();
  std::unique_ptr<DeviceEncoder> encoder_;
  std::unique_ptr<DeviceStream> stream_;
};

TEST_F(DeviceEncoderTest, PagesOnADeviceGiveTheBytesThatTheyGiveInHostMemory) {
  NamespaceSpec spec = Spec();
  spec.sink_blocks = 1;
  Open(false, spec);
  ExpectTheSame(Id(1), {.token_count = kTokens, .block_index = 1}, ValuesOf(1));
  EXPECT_EQ(store_->stats().raw_blocks, 0u);
  // In 16 bits: a sink block, a tail, and a head whose scales no tile holds.
  ExpectTheSame(Id(2), {.token_count = kTokens, .block_index = 0}, ValuesOf(2));
  ExpectTheSame({space_, 0, TailKey(Key(1), 23, Key(3))},
                {.parent = Key(1), .token_count = 23, .block_index = 2, .tail_key = Key(3)},
                ValuesOf(3, 23));
  Values values = ValuesOf(4);
  const std::size_t head_values = std::size_t{2} * kTokens * kDim;
  for (std::size_t i = 0; i < head_values; ++i) values[head_values + i] = FloatToFloat16(60000.0f);
  ExpectTheSame(Id(4), {.token_count = kTokens, .block_index = 1}, values);
}

TEST_F(DeviceEncoderTest, NonFiniteValuesAreNamed) {
  Open(false);
  Values values = ValuesOf(1);
  values[(std::size_t{2} * kHeads + 3) * kTokens * kDim + 5 * kDim + 7] = 0x7C00;
  const absl::Status put = PutFromDevice(Id(1), {.token_count = kTokens}, values);
  EXPECT_EQ(put.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(put.message()), HasSubstr("V of layer 1 head 1 token 5 channel 7"));
  EXPECT_EQ(HostUsedBytes(), 0u);
}

TEST_F(DeviceEncoderTest, NothingIsReadBeforeThePagesAreReady) {
  Open(false);
  EnginePages pages(*device_, kLayers, kHeads, kDim, kTokens);
  pages.Fill(ValuesOf(9));
  ASSERT_TRUE(pages.Upload(*stream_).ok());  // Of a block before, on the same pages.
  pages.Fill(ValuesOf(1));
  std::atomic<bool> open{false};
  ASSERT_TRUE(stream_
                  ->Call([&](const absl::Status&) {
                    while (!open) std::this_thread::yield();
                  })
                  .ok());
  ASSERT_TRUE(pages.Upload(*stream_).ok());
  const auto ready = *device_->CreateEvent();
  ASSERT_TRUE(stream_->Record(*ready).ok());
  std::atomic<bool> written{false};
  std::thread writer_thread([&] {
    auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const std::vector<HeadInput> heads = {pages.Head(layer, 0), pages.Head(layer, 1)};
      EXPECT_TRUE(writer->WriteDeviceHeads(layer, 0, heads, *encoder_, ready.get()).ok());
    }
    written = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(written);
  open = true;
  writer_thread.join();
  EXPECT_TRUE(GetIs(1));
}

// More than one batch, into pages of a pool in the device's memory.
TEST_F(DeviceEncoderTest, ManyTilesGoStraightIntoTheDevicesOwnPool) {
  constexpr std::uint32_t kManyLayers = 40, kManyHeads = 8;
  const TileFormat format = *ParseTileFormat("k4v2_g64", 64);
  const std::size_t record_bytes = RecordBytes(format);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Values values(std::size_t{kManyLayers} * kManyHeads * 2 * 64 * 64);
  for (std::uint16_t& value : values) value = FloatToFloat16(normal(random));
  EnginePages pages(*device_, kManyLayers, kManyHeads, 64, 64);
  pages.Fill(values);
  ASSERT_TRUE(pages.Upload(*stream_).ok());
  const auto ready = *device_->CreateEvent();
  ASSERT_TRUE(stream_->Record(*ready).ok());

  const auto pool = *PagePool::Create({.capacity_bytes = 16 << 20,
                                       .arena_bytes = 16 << 20,
                                       .prefault = false,
                                       .device = device_.get()});
  std::vector<SlotRef> slots;
  ASSERT_TRUE(pool->Acquire(1, kManyHeads * record_bytes, kManyLayers, &slots).ok());
  std::vector<std::byte> on_host(kManyLayers * kManyHeads * record_bytes);
  std::vector<EncodeArgs> to_pool, to_host;
  for (std::uint32_t layer = 0; layer < kManyLayers; ++layer) {
    for (std::uint32_t head = 0; head < kManyHeads; ++head) {
      const HeadInput input = pages.Head(layer, head);
      to_pool.push_back({input.k, input.v, pool->Bytes(slots[layer]).data() + head * record_bytes});
      to_host.push_back({input.k, input.v, on_host.data() + to_host.size() * record_bytes});
    }
  }
  std::vector<EncodeResult> results(to_pool.size(), EncodeResult::kNonFinite);
  const std::vector<EncodeResult> tiles(to_pool.size(), EncodeResult::kTile);
  ASSERT_TRUE(
      encoder_->Encode(format, Frame::kModel, to_pool, ready.get(), absl::MakeSpan(results)).ok());
  EXPECT_EQ(results, tiles);
  results.assign(results.size(), EncodeResult::kNonFinite);
  ASSERT_TRUE(
      encoder_->Encode(format, Frame::kModel, to_host, nullptr, absl::MakeSpan(results)).ok());
  EXPECT_EQ(results, tiles);
  for (std::uint32_t layer = 0; layer < kManyLayers; ++layer) {
    std::vector<std::byte> page(kManyHeads * record_bytes);
    ASSERT_TRUE(stream_->Copy(page.data(), pool->Bytes(slots[layer]).data(), page.size()).ok());
    ASSERT_TRUE(stream_->Synchronize().ok());
    ASSERT_EQ(std::memcmp(page.data(), on_host.data() + layer * page.size(), page.size()), 0)
        << "layer " << layer;
  }
  std::vector<std::byte> record(record_bytes);
  std::vector<std::byte> scratch(EncodeScratchBytes(format) + 64);
  const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.data()) % 64;
  EncodeArgs last = to_host.back();
  last.record = record.data();
  EncodeTilesCpu(format, Frame::kModel, {last}, absl::MakeSpan(results).first(1),
                 absl::MakeSpan(scratch).subspan(64 - off, EncodeScratchBytes(format)));
  EXPECT_EQ(std::memcmp(record.data(), to_host.back().record, record_bytes), 0);
  for (const SlotRef slot : slots) pool->Release(slot);
}

TEST_F(DeviceEncoderTest, ADevicesErrorGivesTheBlockUpAndNothingElse) {
  Open(false);
  const Values values = ValuesOf(1);
  for (int i = 0; i < 5; ++i) {  // More often than there are lanes.
    HeadViews not_on_the_device(values, 0, 0, kTokens);
    auto writer = store_->BeginStore(Id(1), {.token_count = kTokens});
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto written =
        writer->WriteDeviceHeads(0, 0, {not_on_the_device.input}, *encoder_, nullptr);
    EXPECT_THAT(written.status().ToString(), HasSubstr("neither memory of the device nor pinned"));
    EXPECT_TRUE(absl::IsAborted(WriteHead(*writer, values, 0, 1).status()));
  }
  EXPECT_EQ(HostUsedBytes(), 0u);
  ASSERT_TRUE(PutFromDevice(Id(1), {.token_count = kTokens}, values).ok());
  EXPECT_TRUE(GetIs(1));
}

}  // namespace
}  // namespace kvmill
