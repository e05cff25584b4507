// Memory: what an allocation promises, copies between every two kinds of it, pinning, and what is
// refused.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <random>

#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

using DeviceMemoryTest = DeviceTest;

std::vector<std::byte> RandomBytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

TEST_F(DeviceMemoryTest, IsZeroedAlignedAndRoundedUp) {
  const auto stream = Stream();
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{2} << 20, (std::size_t{2} << 20) + 1}) {
    const auto memory = Memory(bytes);
    EXPECT_GE(memory->bytes(), bytes);
    EXPECT_EQ(memory->bytes() % (std::size_t{2} << 20), 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->address()) % (std::size_t{2} << 20), 0u);
    EXPECT_GE(memory->fd(), 0);
    const auto content = Download<std::byte>(*stream, memory->address(), memory->bytes());
    EXPECT_EQ(content, std::vector<std::byte>(memory->bytes()));
  }
}

TEST_F(DeviceMemoryTest, WhatThereIsNotIsRefusedWithNumbers) {
  const std::size_t too_much = std::size_t{1} << 50;
  const auto memory = device_->Allocate(too_much, "too-much");
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(memory.status().message()), testing::HasSubstr(std::to_string(too_much)));
  EXPECT_EQ(device_->Allocate(0, "none").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Allocate(std::numeric_limits<std::size_t>::max(), "all").status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Every size around the sizes of pages and staging buffers, at odd addresses.
TEST_F(DeviceMemoryTest, CopiesBetweenAnyTwoPlaces) {
  const auto stream = Stream();
  constexpr std::size_t kMax = (std::size_t{5} << 20) + 3;
  const auto memory = Memory(2 * kMax + 64);
  std::vector<std::byte> pinned(2 * kMax + 64);
  ASSERT_EQ(device_->Pin(absl::MakeSpan(pinned)), absl::OkStatus());
  unsigned seed = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{1} << 20,
                                  (std::size_t{1} << 20) + 1, kMax}) {
    const std::vector<std::byte> from = RandomBytes(bytes, ++seed);
    std::vector<std::byte> to(bytes), other(bytes);
    std::byte* const device = memory->address() + 1;
    std::byte* const device2 = device + kMax;
    std::byte* const host = pinned.data() + 3;
    std::byte* const host2 = host + kMax;
    // Pageable, device, device, pinned, pinned, device, pageable, pageable.
    ASSERT_EQ(stream->Copy(device, from.data(), bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(device2, device, bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(host, device2, bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(host2, host, bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(device, host2, bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(other.data(), device, bytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(to.data(), other.data(), bytes), absl::OkStatus());
    ASSERT_EQ(stream->Synchronize(), absl::OkStatus());
    EXPECT_EQ(to, from) << bytes << " bytes";
  }
  device_->Unpin(absl::MakeSpan(pinned));
}

// Earlier work on the stream may write what a later copy reads, also where that is host memory that
// is not pinned: it must not be read at the time of enqueuing.
TEST_F(DeviceMemoryTest, ACopyFromHostMemoryReadsItWhenItIsItsTurn) {
  const auto stream = Stream();
  constexpr std::size_t kBytes = std::size_t{3} << 20;
  const auto memory = Memory(2 * kBytes);
  const std::vector<std::byte> values = RandomBytes(kBytes, 9);
  ASSERT_EQ(stream->Copy(memory->address(), values.data(), kBytes), absl::OkStatus());
  ASSERT_EQ(stream->Synchronize(), absl::OkStatus());
  std::vector<std::byte> host(kBytes);
  Gate gate;
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  ASSERT_EQ(stream->Copy(host.data(), memory->address(), kBytes), absl::OkStatus());
  ASSERT_EQ(stream->Copy(memory->address() + kBytes, host.data(), kBytes), absl::OkStatus());
  gate.Open();
  EXPECT_EQ(Download<std::byte>(*stream, memory->address() + kBytes, kBytes), values);
}

TEST_F(DeviceMemoryTest, WhatCouldNeverRunIsRefusedAtOnce) {
  const auto stream = Stream();
  const auto memory = Memory(4096);
  std::byte* const at = memory->address();
  std::byte host[16] = {};
  const auto code = [](const absl::Status& status) { return status.code(); };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(stream->Copy(nullptr, at, 1)), kBad);
  EXPECT_EQ(code(stream->Copy(at, nullptr, 1)), kBad);
  EXPECT_EQ(code(stream->Copy(at, at + 15, 16)), kBad);
  EXPECT_EQ(code(stream->Copy(at + 15, at, 16)), kBad);
  EXPECT_EQ(code(stream->Copy(at, host, std::numeric_limits<std::size_t>::max())), kBad);
  TileFormat odd;
  odd.head_dim = 96;
  EncodeArgs encode;
  DecodeArgs decode;
  EncodeResult result;
  EXPECT_EQ(code(stream->Encode(odd, Frame::kModel, &encode, 1, &result)), kBad);
  EXPECT_EQ(code(stream->Encode(TileFormat(), Frame::kModel, nullptr, 1, &result)), kBad);
  EXPECT_EQ(code(stream->Encode(TileFormat(), Frame::kModel, &encode, 1, nullptr)), kBad);
  EXPECT_EQ(code(stream->Encode(TileFormat(), static_cast<Frame>(2), &encode, 1, &result)), kBad);
  EXPECT_EQ(code(stream->Decode(odd, Frame::kModel, &decode, 1)), kBad);
  EXPECT_EQ(code(stream->Decode(TileFormat(), Frame::kModel, nullptr, 1)), kBad);
  AttentionArgs attention;
  attention.shape.q_heads = attention.shape.kv_heads = 1;
  AttentionSequence sequence;
  attention.sequences = {&sequence, 1};
  EXPECT_EQ(code(stream->Attend(attention, 1, nullptr)), kBad);
  EXPECT_EQ(code(stream->Attend(attention, 1, at + 16)), kBad);
  EXPECT_EQ(code(stream->Attend(attention, 0, at)), kBad);
  attention.shape.q_heads = 0;
  EXPECT_EQ(code(stream->Attend(attention, 1, at)), kBad);
  EXPECT_EQ(code(stream->CheckGenerations(nullptr, 1, nullptr)), kBad);
  // Nothing at all is fine, and none of this stays with the stream.
  EXPECT_EQ(stream->Copy(at, host, 0), absl::OkStatus());
  EXPECT_EQ(stream->Encode(TileFormat(), Frame::kModel, nullptr, 0, nullptr), absl::OkStatus());
  EXPECT_EQ(stream->Decode(TileFormat(), Frame::kModel, nullptr, 0), absl::OkStatus());
  EXPECT_EQ(stream->CheckGenerations(nullptr, 0, nullptr), absl::OkStatus());
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
}

TEST_F(DeviceMemoryTest, WhatIsPinnedOrTheDevicesIsNotPinnedAgain) {
  std::vector<std::byte> host(1 << 16);
  const auto span = absl::MakeSpan(host);
  ASSERT_EQ(device_->Pin(span), absl::OkStatus());
  EXPECT_EQ(device_->Pin(span).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Pin(span.subspan(100, 8)).code(), absl::StatusCode::kInvalidArgument);
  device_->Unpin(span);
  EXPECT_EQ(device_->Pin(span), absl::OkStatus());
  device_->Unpin(span);
  const auto memory = Memory(4096);
  EXPECT_EQ(device_->Pin({memory->address(), 4096}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Pin({}).code(), absl::StatusCode::kInvalidArgument);
  void* const gone =
      mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  munmap(static_cast<std::byte*>(gone) + 4096, 4096);
  EXPECT_EQ(device_->Pin({static_cast<std::byte*>(gone), 8192}).code(),
            absl::StatusCode::kInvalidArgument);
  munmap(gone, 4096);
}

// What another process shares to be read: generation words, for one.
TEST_F(DeviceMemoryTest, MemoryThatMayOnlyBeReadIsPinnedToRead) {
  constexpr std::size_t kBytes = std::size_t{1} << 16;
  const int fd = memfd_create("shared", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  const std::uint64_t generation = 4;
  ASSERT_EQ(pwrite(fd, &generation, sizeof(generation), 8), 8);
  void* const mapped = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const absl::Span<const std::byte> words(static_cast<const std::byte*>(mapped), kBytes);
  const auto stream = Stream();
  const absl::Status pinned = device_->PinToRead(words);
  ASSERT_EQ(pinned, absl::OkStatus());
  EXPECT_EQ(device_->PinToRead(words).code(), absl::StatusCode::kInvalidArgument);
  DeviceImage image(*device_, 4096);
  const auto* word = reinterpret_cast<const std::uint64_t*>(words.data() + 8);
  const GenerationCheck* checks =
      image.Put(std::vector<GenerationCheck>{{word, generation}, {word, generation + 2}});
  auto* changed = image.Put(std::vector<std::uint32_t>{0});
  ASSERT_EQ(image.Upload(*stream), absl::OkStatus());
  ASSERT_EQ(stream->CheckGenerations(checks, 2, changed), absl::OkStatus());
  EXPECT_EQ(Download<std::uint32_t>(*stream, changed, 1), std::vector<std::uint32_t>{1});
  // It is read, and nothing else.
  EXPECT_EQ(Download<std::uint64_t>(*stream, word, 1), std::vector<std::uint64_t>{generation});
  EXPECT_EQ(stream->Copy(mapped, &generation, 8).code(), absl::StatusCode::kInvalidArgument);
  device_->Unpin(words);
  ASSERT_EQ(device_->PinToRead(words), absl::OkStatus()) << "nothing stayed";
  device_->Unpin(words);
  munmap(mapped, kBytes);
  close(fd);
}

TEST_F(DeviceMemoryTest, ImportRefusesWhatIsNoMemoryOfADevice) {
  constexpr std::size_t kBytes = std::size_t{2} << 20;
  EXPECT_EQ(device_->Import(-1, kBytes).status().code(), absl::StatusCode::kInvalidArgument);
  const int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  EXPECT_EQ(device_->Import(fd, kBytes).status().code(), absl::StatusCode::kInvalidArgument);
  close(fd);
  const auto memory = Memory(kBytes);
  EXPECT_EQ(device_->Import(memory->fd(), 2 * kBytes).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Import(memory->fd(), 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DeviceMemoryTest, ImportedMemoryShowsWhatTheOwnerWritesAndIsReadOnly) {
  const auto stream = Stream();
  const auto memory = Memory(1 << 16);
  const auto imported = device_->Import(memory->fd(), memory->bytes());
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ((*imported)->fd(), -1);
  EXPECT_EQ((*imported)->bytes(), memory->bytes());
  EXPECT_NE((*imported)->address(), memory->address());
  const std::vector<std::byte> values = RandomBytes(5000, 4);
  ASSERT_EQ(stream->Copy(memory->address() + 100, values.data(), values.size()), absl::OkStatus());
  EXPECT_EQ(Download<std::byte>(*stream, (*imported)->address() + 100, values.size()), values);
  EXPECT_EQ(stream->Copy((*imported)->address(), values.data(), 1).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvmill
