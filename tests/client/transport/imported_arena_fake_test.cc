// The same over a CUDA of our own: whatever call fails, the error is clean and nothing is left.
#include <dirent.h>
#include <gmock/gmock.h>

#include "tests/client/transport/imported_arena.h"
#include "tests/storage/device/fake_cuda.h"

namespace kvmill {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::size_t OpenFiles() {
  std::size_t count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(ImportedArenaFakeTest, WhateverFailsNothingIsLeftBehind) {
  const std::size_t files = OpenFiles();
  int failures = 0;
  for (int n = 1;; ++n) {
    fake_cuda::Boot({});
    absl::Status status;
    bool failed = false;
    {
      const auto daemon_device = *OpenDevice("cuda:0");
      const auto daemon = *DaemonArena::Create(*daemon_device);
      const auto client_device = *OpenDevice("cuda:0");
      fake_cuda::FailCall(n);
      const auto reader = DeviceReader::Create(*client_device);
      if (reader.ok()) {
        const GenerationMapping mapping(daemon->generations->fd());
        const auto arena = ImportedArena::Create(**reader, daemon->memory->fd(),
                                                 DaemonArena::kBytes, mapping.bytes());
        status = arena.status();
        std::vector<std::byte> bytes(std::size_t{600} << 10);
        if (arena.ok()) status = (*reader)->Read({{(*arena)->address(), absl::MakeSpan(bytes)}});
      } else {
        status = reader.status();
      }
      failed = fake_cuda::HasFailed();
      fake_cuda::FailCall(0);
      EXPECT_EQ(UseArena(*client_device, *daemon), absl::OkStatus()) << "call " << n;
    }
    EXPECT_THAT(fake_cuda::Leaks(), IsEmpty()) << "call " << n;
    EXPECT_THAT(fake_cuda::Problems(), IsEmpty()) << "call " << n;
    EXPECT_EQ(OpenFiles(), files) << "call " << n;
    if (!failed) {
      EXPECT_EQ(status, absl::OkStatus());
      break;
    }
    if (!status.ok()) {
      ++failures;
      EXPECT_FALSE(status.message().empty());
    }
  }
  EXPECT_GT(failures, 10);
}

TEST(ImportedArenaFakeTest, AnotherGpuAndADriverThatCannotPinToReadAreNamed) {
  fake_cuda::Boot({.device_count = 2});
  {
    const auto first = *OpenDevice("cuda:0");
    const auto second = *OpenDevice("cuda:1");
    const auto daemon = *DaemonArena::Create(*first);
    const auto reader = *DeviceReader::Create(*second);
    const GenerationMapping mapping(daemon->generations->fd());
    const auto arena =
        ImportedArena::Create(*reader, daemon->memory->fd(), DaemonArena::kBytes, mapping.bytes());
    EXPECT_THAT(arena.status().ToString(),
                testing::AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("on cuda:1"),
                               HasSubstr("is memory of cuda:0")));
  }
  fake_cuda::Boot({.pins_to_read = false});
  const auto device = *OpenDevice("cuda:0");
  const auto daemon = *DaemonArena::Create(*device);
  const absl::Status used = UseArena(*device, *daemon);
  EXPECT_THAT(used.ToString(),
              testing::AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("cannot pin memory")));
}

}  // namespace
}  // namespace kvmill
