// An engine's memory on the daemon's device: whose it may be, how long it stays open, and what is
// stored from it. On the host, and on CUDA's own entry points with a fake behind them.
#include "service/device_regions.h"

#include <gmock/gmock.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmill/v1/cache.pb.h"
#include "service/page_chunk.h"
#include "storage/core/clock.h"
#include "storage/core/page_layout.h"
#include "tests/storage/device/engine_process.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kLayers = 2;
constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kDim = 64;
constexpr std::uint32_t kTokens = 64;
constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint64_t kRowBytes = std::uint64_t{2} * kDim;
constexpr std::uint64_t kPageBytes = kRowBytes * kHeads * kPageTokens;
constexpr std::uint64_t kPages = 8;  // Of a layer's K, and of its V.

class DeviceRegionsTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (device_ == nullptr) return;
    regions_ = std::make_unique<DeviceRegions>(*device_, 2, geteuid());
    spec_.tenant = "default";
    spec_.model = "test";
    spec_.hash_scheme = "test-1";
    spec_.block_tokens = kTokens;
    LayerGroup group;
    group.layers = {0, 1};
    group.kv_heads = kHeads;
    group.head_dim = kDim;
    spec_.groups = {group};
    EngineLayers layers;
    layers.block_tokens = kTokens;
    layers.head_dim = kDim;
    layers.head_count = kHeads;
    layers.page_tokens = kPageTokens;
    layers.page_count = kPages;
    layers.page_bytes = layers.page_stride_bytes = kPageBytes;
    layers.token_stride_bytes = kRowBytes * kHeads;
    layers.head_stride_bytes = kRowBytes;
    layers.keys = {{0, 0}, {1, 0}};
    layers.values = {{0, kPages * kPageBytes}, {1, kPages * kPageBytes}};
    geometry_.layers = {layers};
    for (std::uint64_t i = 0; i < kLayers; ++i) {
      EngineRegion region;
      region.base = (i + 1) << 32;
      region.bytes = 2 * kPages * kPageBytes;
      region.kind = EngineRegionKind::kDeviceIpc;
      geometry_.regions.push_back(region);
    }
    ASSERT_EQ(CheckGeometry(spec_, geometry_), absl::OkStatus());
  }

  // Behind the door.
  struct Peer : DoorPeer {
    explicit Peer(pid_t of) : fd(static_cast<int>(syscall(SYS_pidfd_open, of, 0))) {
      client = 1;
      uid = geteuid();
      pid = of;
      process = fd.get();
    }
    OwnedFd fd;
  };
  DoorDeviceRegion Message(const IpcMemory& memory, std::uint32_t index) const {
    auto message = MakeDoorMessage<DoorDeviceRegion>();
    message.region = index;
    message.bytes = geometry_.regions[index].bytes;
    message.offset_bytes = memory.offset_bytes + index * message.bytes;
    message.allocation_bytes = memory.allocation_bytes;
    std::memcpy(message.handle.data(), memory.handle.data(), sizeof(message.handle));
    return message;
  }
  absl::Status Share(const DoorPeer& peer, const DoorDeviceRegion& message, EngineMemory* memory) {
    auto region = regions_->Open(peer, message, *memory);
    if (!region.ok()) return region.status();
    return memory->Share(message.region, &*region);
  }
  static std::vector<std::string> PagesOf(TieredStore& store, const BlockId& id) {
    auto ref = store.Fetch(id);
    EXPECT_TRUE(ref.ok()) << ref.status();
    std::vector<std::string> pages;
    for (const auto& page : ref->pages()) {
      pages.emplace_back(reinterpret_cast<const char*>(page.data()), page.size());
    }
    return pages;
  }

  NamespaceSpec spec_;
  EngineGeometry geometry_;
  std::unique_ptr<DeviceRegions> regions_;
};

TEST_F(DeviceRegionsTest, AChunkOnTheDeviceBecomesTheBytesOfACopy) {
  auto store = TieredStore::Create(
      {.host_bytes = 8 << 20, .arena_bytes = 8 << 20, .blocks_max = 64, .prefault = false},
      SystemClock(), nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto ns = (*store)->OpenNamespace("test", spec_);
  ASSERT_TRUE(ns.ok()) << ns.status();
  EngineProcess engine;
  const Peer peer(engine.pid());
  EngineMemory memory(ns->id, geometry_);
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    ASSERT_EQ(Share(peer, Message(engine.memory, i), &memory), absl::OkStatus());
  }
  EXPECT_EQ(memory.shared(0)->allocation(), memory.shared(1)->allocation()) << "opened once";

  v1::StoreChunk chunk;
  chunk.set_token_count(kTokens);
  chunk.set_kind(v1::CHUNK_PAGES16);
  chunk.set_layer_count(kLayers);
  chunk.set_head_count(kHeads);
  const std::vector<std::uint64_t> numbers = {6, 0, 7, 3};
  for (const std::uint64_t number : numbers) chunk.mutable_pages()->add_numbers(number);
  ASSERT_EQ(CheckPageChunk(*ns, memory, chunk), absl::OkStatus());
  EXPECT_TRUE(IsOnGpu(memory, chunk));
  const BlockId id = {ns->id, 0, *BlockKey::FromBytes("a block of some engine")};
  const BlockOrigin origin = {.token_count = kTokens};
  {
    auto writer = (*store)->BeginStore(id, origin);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const auto written = WritePageChunk(*ns, memory, chunk, *writer);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_TRUE(written->sealed);
    EXPECT_EQ(written->written_heads, kLayers * kHeads);
  }
  const std::vector<std::string> from_device = PagesOf(**store, id);
  ASSERT_EQ(*(*store)->Remove(ns->id, {id.key}), 1u);

  // What the engine has there, here.
  std::vector<std::uint32_t> words(EngineProcess::kBytes / 4);
  for (std::uint32_t i = 0; i < words.size(); ++i) words[i] = EngineWord(i);
  const auto* const bytes =
      reinterpret_cast<const std::byte*>(words.data()) + EngineProcess::kOffset;
  auto writer = (*store)->BeginStore(id, origin);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      std::vector<const std::byte*> keys, values;
      for (const std::uint64_t number : numbers) {
        keys.push_back(bytes + layer * 2 * kPages * kPageBytes + number * kPageBytes);
        values.push_back(keys.back() + kPages * kPageBytes);
      }
      HeadInput input;
      for (HeadPages* half : {&input.k, &input.v}) {
        half->pages = half == &input.k ? keys.data() : values.data();
        half->offset_bytes = head * kRowBytes;
        half->page_tokens = kPageTokens;
        half->token_stride_bytes = static_cast<std::ptrdiff_t>(kRowBytes * kHeads);
      }
      ASSERT_TRUE(writer->WriteHeads(layer, head, {input}).ok());
    }
  }
  EXPECT_EQ(from_device, PagesOf(**store, id));
}

TEST_F(DeviceRegionsTest, RecordsOnTheDeviceAreChecked) {
  auto store = TieredStore::Create(
      {.host_bytes = 8 << 20, .arena_bytes = 8 << 20, .blocks_max = 64, .prefault = false},
      SystemClock(), nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto ns = (*store)->OpenNamespace("test", spec_);
  ASSERT_TRUE(ns.ok()) << ns.status();
  const std::size_t record_bytes = RecordBytes(FormatOf(spec_, spec_.groups[0]));
  EngineLayers& layers = geometry_.layers[0];
  layers.element = EngineElement::kRecords;
  layers.page_tokens = kTokens;
  layers.page_count = 2;
  layers.head_stride_bytes = record_bytes;
  layers.page_bytes = layers.page_stride_bytes = kHeads * record_bytes;
  layers.token_stride_bytes = 0;
  layers.values.clear();
  ASSERT_EQ(CheckGeometry(spec_, geometry_), absl::OkStatus());
  EngineProcess engine;
  const Peer peer(engine.pid());
  EngineMemory memory(ns->id, geometry_);
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    ASSERT_EQ(Share(peer, Message(engine.memory, i), &memory), absl::OkStatus());
  }
  v1::StoreChunk chunk;
  chunk.set_token_count(kTokens);
  chunk.set_kind(v1::CHUNK_RECORDS);
  chunk.set_layer_count(kLayers);
  chunk.set_head_count(kHeads);
  chunk.mutable_pages()->add_numbers(1);
  ASSERT_EQ(CheckPageChunk(*ns, memory, chunk), absl::OkStatus());
  const BlockId id = {ns->id, 0, *BlockKey::FromBytes("records")};
  auto writer = (*store)->BeginStore(id, {.token_count = kTokens});
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto written = WritePageChunk(*ns, memory, chunk, *writer);
  ASSERT_TRUE(written.ok()) << written.status();  // Any words of the engine's are finite scales.
  std::vector<std::uint32_t> words(EngineProcess::kBytes / 4);
  for (std::uint32_t i = 0; i < words.size(); ++i) words[i] = EngineWord(i);
  const auto* const bytes = reinterpret_cast<const char*>(words.data()) + EngineProcess::kOffset;
  const std::vector<std::string> pages = PagesOf(**store, id);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const char* page = bytes + layer * geometry_.regions[0].bytes + kHeads * record_bytes;
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      EXPECT_NE(pages[layer].find(std::string(page + head * record_bytes, record_bytes)),
                std::string::npos)
          << layer << " " << head;
    }
  }
}

TEST_F(DeviceRegionsTest, MemoryIsOpenedForItsOwnerOnly) {
  EngineProcess engine;
  EngineMemory memory(1, geometry_);
  const DoorDeviceRegion message = Message(engine.memory, 0);
  Peer stranger(getpid());
  Peer owner(engine.pid());
  if (device_->info().knows_ipc_owner) {
    const absl::Status refused = Share(stranger, message, &memory);
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
    EXPECT_THAT(refused.ToString(), HasSubstr(absl::StrCat("came from process ", getpid())));
    Peer unseen = std::move(owner);
    unseen.process = -1;
    EXPECT_EQ(Share(unseen, message, &memory).code(), absl::StatusCode::kPermissionDenied);
  } else {
    stranger.uid = geteuid() + 1;
    const absl::Status refused = Share(stranger, message, &memory);
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << refused;
    EXPECT_THAT(refused.ToString(), HasSubstr("does not tell whose memory a handle is of"));
  }
  EXPECT_EQ(memory.shared(0), nullptr);
  const Peer again(engine.pid());
  EXPECT_EQ(Share(again, message, &memory), absl::OkStatus());
  EXPECT_EQ(Share(again, message, &memory).code(), absl::StatusCode::kAlreadyExists);
  engine.End();
  EngineMemory other(1, geometry_);
  EXPECT_FALSE(Share(again, message, &other).ok()) << "it has ended";
}

TEST_F(DeviceRegionsTest, AnotherGpuIsNamed) {
  EngineProcess engine;
  const Peer peer(engine.pid());
  EngineMemory memory(1, geometry_);
  DoorDeviceRegion message = Message(engine.memory, 0);
  std::memcpy(message.device.data(), device_->info().uuid.data(), message.device.size());
  EXPECT_EQ(Share(peer, message, &memory), absl::OkStatus());
  message = Message(engine.memory, 1);
  message.device.fill(0x5A);
  const absl::Status refused = Share(peer, message, &memory);
  if (device_->info().uuid == std::array<std::byte, 16>{}) {
    EXPECT_EQ(refused, absl::OkStatus()) << "it has no name of its own to compare";
    return;
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("memory of GPU 5a5a5a5a"));
}

}  // namespace
}  // namespace kvmill
