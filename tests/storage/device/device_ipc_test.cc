// Memory of an engine in another process, by handle: it is read where it is, encoded from there,
// and closed again.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/float16.h"
#include "tests/storage/device/tested_device.h"

extern char** environ;

namespace kvmill {
namespace {

constexpr std::size_t kBytes = std::size_t{2} << 20;
constexpr std::size_t kOffset = 4096;

// This program once more, as the engine of importer_main.
class Engine {
 public:
  Engine() {
    int to_child[2], from_child[2];
    EXPECT_EQ(pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from_child, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], 1);
    const std::string program = "/proc/self/exe";
    std::vector<std::string> arguments{program, "--engine", absl::StrCat(kBytes),
                                       absl::StrCat(kOffset)};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&child_, program.c_str(), &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to_child[0]);
    close(from_child[1]);
    input_ = to_child[1];
    std::string line;
    char c = 0;
    while (read(from_child[0], &c, 1) == 1 && c != '\n') line.push_back(c);
    close(from_child[0]);
    std::istringstream words(line);
    std::string hex;
    words >> hex >> memory.allocation_bytes >> memory.offset_bytes;
    const std::string handle = absl::HexStringToBytes(hex);
    EXPECT_EQ(handle.size(), memory.handle.size());
    std::memcpy(memory.handle.data(), handle.data(), std::min(handle.size(), sizeof(IpcHandle)));
  }
  ~Engine() { End(); }
  void End() {
    if (child_ == 0) return;
    close(input_);
    int status = -1;
    EXPECT_EQ(waitpid(child_, &status, 0), child_);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    child_ = 0;
  }
  IpcMemory memory;

 private:
  pid_t child_ = 0;
  int input_ = -1;
};

using DeviceIpcTest = DeviceTest;

TEST_F(DeviceIpcTest, AnotherProcessesMemoryIsReadWhereItIs) {
  const auto stream = Stream();
  Engine engine;
  EXPECT_GE(engine.memory.allocation_bytes, kBytes);
  EXPECT_EQ(engine.memory.offset_bytes, kOffset);
  auto opened = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->bytes(), engine.memory.allocation_bytes);
  EXPECT_EQ((*opened)->fd(), -1);
  auto again = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes);
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
  Engine engine;
  const auto opened = device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes);
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
  const EngineMemory own = AllocateAsEngine(*device_, kBytes);
  const auto exported = device_->ExportIpc(own.address + 100, 200);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_EQ(exported->offset_bytes, 100u);
  EXPECT_EQ(device_->OpenIpc(exported->handle, exported->allocation_bytes).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "it is of this process";
  EXPECT_EQ(device_->ExportIpc(own.address + kBytes - 100, 200).status().code(), kBad);
  EXPECT_EQ(device_->ExportIpc(own.address, 0).status().code(), kBad);
  int on_the_stack = 0;
  EXPECT_EQ(device_->ExportIpc(&on_the_stack, 4).status().code(), kBad);
  EXPECT_EQ(device_->OpenIpc(IpcHandle{}, kBytes).status().code(), kBad);
  Engine engine;
  EXPECT_EQ(device_->OpenIpc(engine.memory.handle, 0).status().code(), kBad);
  EXPECT_EQ(device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes + kBytes)
                .status()
                .code(),
            kBad);
  engine.End();
  EXPECT_EQ(device_->OpenIpc(engine.memory.handle, engine.memory.allocation_bytes).status().code(),
            kBad)
      << "the engine is gone";
}

}  // namespace
}  // namespace kvmill
