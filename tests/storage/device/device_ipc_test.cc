// Memory of an engine in another process, by handle: it is read where it is, encoded from there,
// and closed again.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "kernels/float16.h"
#include "tests/storage/device/engine_process.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

constexpr std::size_t kBytes = EngineProcess::kBytes;
constexpr std::size_t kOffset = EngineProcess::kOffset;

using DeviceIpcTest = DeviceTest;

TEST_F(DeviceIpcTest, AnotherProcessesMemoryIsReadWhereItIs) {
  const auto stream = Stream();
  EngineProcess engine;
  EXPECT_GE(engine.memory.allocation_bytes, kBytes);
  EXPECT_EQ(engine.memory.offset_bytes, kOffset);
  auto opened = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, 0);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->bytes(), engine.memory.allocation_bytes);
  EXPECT_EQ((*opened)->fd(), -1);
  auto again = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, 0);
  ASSERT_TRUE(again.ok()) << again.status();
  const std::byte* const at = (*again)->address() + engine.memory.offset_bytes;
  *opened = nullptr;  // The other opening is not concerned.
  const auto values = Download<std::uint32_t>(*stream, at, (kBytes - kOffset) / 4);
  for (std::uint32_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i], EngineWord(i + kOffset / 4));
  }
  const std::uint32_t value = 1;
  EXPECT_EQ(stream->Copy((*again)->address(), &value, 4).code(),
            absl::StatusCode::kInvalidArgument);
}

// A tile whose K and V are an engine's pages in its own process: the same record as of a copy.
TEST_F(DeviceIpcTest, TilesAreEncodedFromAnotherProcessesPages) {
  const TileFormat format = *ParseTileFormat("k4v2_g64", 64);
  const auto stream = Stream();
  EngineProcess engine;
  const auto opened = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, 0);
  ASSERT_TRUE(opened.ok()) << opened.status();
  constexpr std::size_t kPageBytes = std::size_t{16} * 64 * 2;
  const std::byte* const pages = (*opened)->address() + kOffset;
  const auto values = Download<std::uint16_t>(*stream, pages, 8 * kPageBytes / 2);
  DeviceImage image(*device_, std::size_t{1} << 20);
  std::byte* const copies = image.PutBytes(values.data(), values.size() * 2);
  std::vector<EncodeArgs> tiles(2);
  std::byte* records[2];
  for (int i = 0; i < 2; ++i) {
    const std::byte* const from = i == 0 ? pages : copies;
    std::vector<const std::byte*> lists;
    for (std::size_t page = 0; page < 8; ++page) lists.push_back(from + page * kPageBytes);
    const auto* list = image.Put(lists);
    for (HeadPages* half : {&tiles[i].k, &tiles[i].v}) {
      half->pages = list + (half == &tiles[i].v ? 4 : 0);
      half->page_tokens = 16;
      half->token_stride_bytes = 128;
    }
    records[i] = tiles[i].record = image.Reserve(RecordBytes(format));
  }
  const auto* args = image.Put(tiles);
  auto* results = reinterpret_cast<EncodeResult*>(image.Reserve(2));
  ASSERT_EQ(image.Upload(*stream), absl::OkStatus());
  ASSERT_EQ(stream->Encode(format, Frame::kModel, args, 2, results), absl::OkStatus());
  const auto got = Download<EncodeResult>(*stream, results, 2);
  EXPECT_EQ(got, std::vector<EncodeResult>(2, EncodeResult::kTile));
  EXPECT_EQ(Download<std::byte>(*stream, records[0], RecordBytes(format)),
            Download<std::byte>(*stream, records[1], RecordBytes(format)));
}

TEST_F(DeviceIpcTest, HandlesOfNothingAreRefused) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const EngineAllocation own = AllocateAsEngine(*device_, kBytes);
  const auto exported = device_->ExportIpc(own.address + 100, 200);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->offset_bytes, 100u);
  EXPECT_EQ(device_->OpenIpc(exported->handle, exported->allocation_bytes, 0).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "it is of this process";
  EXPECT_EQ(device_->ExportIpc(own.address + kBytes - 100, 200).status().code(), kBad);
  EXPECT_EQ(device_->ExportIpc(own.address, 0).status().code(), kBad);
  int on_the_stack = 0;
  EXPECT_EQ(device_->ExportIpc(&on_the_stack, 4).status().code(), kBad);
  EXPECT_EQ(device_->OpenIpc(IpcHandle{}, kBytes, 0).status().code(), kBad);
  EngineProcess engine;
  EXPECT_EQ(device_->OpenIpc(engine.memory.handle, 0, 0).status().code(), kBad);
  EXPECT_EQ(device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes + kBytes, 0)
                .status()
                .code(),
            kBad);
  if (device_->info().knows_ipc_owner) {
    EXPECT_TRUE(
        device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, engine.pid()).ok());
    const auto others =
        device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, getppid());
    EXPECT_EQ(others.status().code(), absl::StatusCode::kPermissionDenied) << others.status();
  }
  engine.End();
  EXPECT_EQ(
      device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes, 0).status().code(),
      kBad)
      << "the engine is gone";
}

}  // namespace
}  // namespace kvmill
