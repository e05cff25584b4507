// A daemon's arena on a device, imported by a client: on whatever device is tested.
#include "tests/client/transport/imported_arena.h"

#include <gmock/gmock.h>

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ImportedArenaTest = DeviceTest;

TEST_F(ImportedArenaTest, BytesAndGenerationsOfTheDaemonAreSeen) {
  const auto daemon = DaemonArena::Create(*device_);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  // Another device object: as in another process.
  const auto client = OpenDevice(TestedDeviceName());
  ASSERT_TRUE(client.ok()) << client.status();
  for (int i = 0; i < 3; ++i) {
    const absl::Status used = UseArena(**client, **daemon);
    EXPECT_TRUE(used.ok()) << used;
  }
}

TEST_F(ImportedArenaTest, WhatTheDeviceCannotHaveIsAFailedPrecondition) {
  const auto daemon = DaemonArena::Create(*device_);
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto reader = DeviceReader::Create(*device_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const GenerationMapping mapping((*daemon)->generations->fd());
  const auto code = [&](int fd, absl::Span<const std::byte> generations) {
    const auto arena = ImportedArena::Create(**reader, fd, DaemonArena::kBytes, generations);
    EXPECT_THAT(arena.status().ToString(), HasSubstr("cannot be used on"));
    return arena.status().code();
  };
  EXPECT_EQ(code(-1, mapping.bytes()), absl::StatusCode::kFailedPrecondition);
  // Generations that are pinned already: the import that worked goes again.
  ASSERT_TRUE(device_->PinToRead(mapping.bytes()).ok());
  EXPECT_EQ(code((*daemon)->memory->fd(), mapping.bytes()), absl::StatusCode::kFailedPrecondition);
  device_->Unpin(mapping.bytes());
}

}  // namespace
}  // namespace kvmill
