// CudaDevice over fake_cuda.h: what it says when something is missing, that enqueuing never waits,
// that every handle is given back whatever fails, and what a broken device does.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "storage/core/status_macros.h"
#include "storage/device/cuda_device.h"
#include "tests/storage/device/fake_cuda.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

using fake_cuda::Machine;
using testing::HasSubstr;

std::size_t OpenFiles() {
  std::size_t count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(CudaDeviceFakeTest, SaysWhatIsMissing) {
  struct Case {
    Machine machine;
    const char* device;
    const char* says;
  };
  const Case cases[] = {
      {{.driver_version = 0}, "cuda:0", "cuda:0: there is no NVIDIA driver"},
      {{.driver_version = 12020, .count_error = cudaErrorInsufficientDriver},
       "cuda:0",
       "is for CUDA 12.2, this build needs"},
      {{.count_error = cudaErrorSystemDriverMismatch}, "cuda:0", "does not answer"},
      {{.device_count = 0}, "cuda:0", "shows no GPU"},
      {{.device_count = 1}, "cuda:1", "cuda:1: there is 1 GPU here"},
      {{.device_count = 2}, "cuda:2", "cuda:2: there are 2 GPUs here"},
      {{.capability_major = 7}, "cuda:0", "compute capability 7.0"},
      {{.shares_memory = false}, "cuda:0", "cannot be shared"},
      {{.missing_symbol = "cuMemMap"}, "cuda:0", "has no cuMemMap; update the driver"},
  };
  for (const Case& c : cases) {
    fake_cuda::Boot(c.machine);
    const auto device = OpenDevice(c.device);
    ASSERT_FALSE(device.ok()) << c.says;
    EXPECT_EQ(device.status().code(), absl::StatusCode::kUnavailable) << device.status();
    EXPECT_THAT(std::string(device.status().message()), HasSubstr(c.says));
  }
}

TEST(CudaDeviceFakeTest, AutoTakesTheFirstGpuThatAnswersOrTheHost) {
  EXPECT_EQ((*OpenDevice("auto"))->info().name, "cuda:0");
  fake_cuda::Boot({.driver_version = 0});
  EXPECT_EQ((*OpenDevice("auto"))->info().name, "host");
  fake_cuda::Boot({.capability_major = 7});
  EXPECT_EQ((*OpenDevice("auto"))->info().name, "host");
}

TEST(CudaDeviceFakeTest, DescribesTheDevice) {
  fake_cuda::Boot({.device_count = 2});
  const auto device = *OpenDevice("cuda:1");
  EXPECT_EQ(device->info().kind, DeviceKind::kCuda);
  EXPECT_EQ(device->info().name, "cuda:1");
  EXPECT_EQ(device->info().description, "Fake, sm_90");
  EXPECT_EQ(device->info().memory_bytes, Machine().memory_bytes);
  EXPECT_FALSE(device->info().host_accessible);
  EXPECT_EQ(device->info().attention_workers, 8u);  // Two for each of four multiprocessors.
}

TEST(CudaDeviceFakeTest, RoundsUpToTheGranularity) {
  fake_cuda::Boot({.granularity = std::size_t{32} << 20});
  const auto device = *OpenDevice("cuda:0");
  const auto memory = *device->Allocate((std::size_t{32} << 20) + 1, "pool");
  EXPECT_EQ(memory->bytes(), std::size_t{64} << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->address()) % (std::size_t{32} << 20), 0u);
}

TEST(CudaDeviceFakeTest, AFullDeviceSaysWhatIsFree) {
  fake_cuda::Boot({.memory_bytes = std::size_t{64} << 20});
  const auto device = *OpenDevice("cuda:0");
  const auto memory = *device->Allocate(std::size_t{40} << 20, "first");
  const auto more = device->Allocate(std::size_t{40} << 20, "second");
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(more.status().message()),
              testing::AllOf(HasSubstr("41943040 bytes for second"),
                             HasSubstr("25165824 of 67108864 bytes of the device are free")));
}

TEST(CudaDeviceFakeTest, PinningTooMuchNamesTheLimit) {
  fake_cuda::Boot({.locked_bytes_max = 4096});
  const auto device = *OpenDevice("cuda:0");
  std::vector<std::byte> host(8192);
  const absl::Status status = device->Pin(absl::MakeSpan(host));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("8192 bytes"), HasSubstr("ulimit -l")));
  EXPECT_EQ(device->Pin(absl::MakeSpan(host).first(4096)), absl::OkStatus());  // Nothing stayed.
  device->Unpin(absl::MakeSpan(host).first(4096));
}

TEST(CudaDeviceFakeTest, ADriverThatCannotPinToReadSaysSo) {
  fake_cuda::Boot({.pins_to_read = false});
  const auto device = *OpenDevice("cuda:0");
  const std::vector<std::byte> host(4096);
  const absl::Status status = device->PinToRead(host);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:0: its driver cannot pin memory"));
}

TEST(CudaDeviceFakeTest, MemoryOfAnotherGpuIsNotImported) {
  fake_cuda::Boot({.device_count = 2});
  const auto first = *OpenDevice("cuda:0");
  const auto second = *OpenDevice("cuda:1");
  const auto memory = *first->Allocate(1, "pool");
  const auto imported = second->Import(memory->fd(), memory->bytes());
  EXPECT_EQ(imported.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(imported.status().message()), HasSubstr("is memory of cuda:0"));
  // Both work side by side on one thread.
  const auto stream = *second->CreateStream();
  const auto other = *second->Allocate(1, "other");
  std::uint32_t value = 5, back = 0;
  ASSERT_EQ(stream->Copy(other->address(), &value, 4), absl::OkStatus());
  ASSERT_EQ(stream->Copy(&back, other->address(), 4), absl::OkStatus());
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
  EXPECT_EQ(back, 5u);
  EXPECT_EQ(fake_cuda::CurrentDevice(), -1);  // The thread is left as it was.
}

// Some drivers map device memory only to read and write.
TEST(CudaDeviceFakeTest, ImportsWhereTheDriverCannotProtect) {
  fake_cuda::Boot({.protects_memory = false});
  const auto device = *OpenDevice("cuda:0");
  const auto memory = *device->Allocate(1, "pool");
  const auto imported = device->Import(memory->fd(), memory->bytes());
  ASSERT_TRUE(imported.ok()) << imported.status();
  const auto stream = *device->CreateStream();
  std::byte value{};
  EXPECT_EQ(stream->Copy((*imported)->address(), &value, 1).code(),
            absl::StatusCode::kInvalidArgument);
}

// Copies of every kind and every kernel behind a stream that is held: if one of them waited, this
// would not end; that none may wait is counted.
TEST(CudaDeviceFakeTest, EnqueuingDoesNotWait) {
  const auto device = *OpenDevice("cuda:0");
  const auto stream = *device->CreateStream();
  const auto other = *device->CreateStream();
  const auto event = *device->CreateEvent();
  const auto memory = *device->Allocate(std::size_t{16} << 20, "pool");
  std::vector<std::byte> pageable(std::size_t{3} << 20), pinned(std::size_t{3} << 20);
  ASSERT_EQ(device->Pin(absl::MakeSpan(pinned)), absl::OkStatus());
  Gate gate;
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  const int waits = fake_cuda::WaitCount();
  std::byte* const at = memory->address();
  EXPECT_EQ(stream->Copy(at, pageable.data(), pageable.size()), absl::OkStatus());
  EXPECT_EQ(stream->Copy(at + (8 << 20), at, pageable.size()), absl::OkStatus());
  EXPECT_EQ(stream->Copy(pinned.data(), at, pinned.size()), absl::OkStatus());
  EXPECT_EQ(stream->Copy(pageable.data(), pinned.data(), pinned.size()), absl::OkStatus());
  EXPECT_EQ(stream->Record(*event), absl::OkStatus());
  EXPECT_EQ(other->Wait(*event), absl::OkStatus());
  EXPECT_EQ(other->Copy(pageable.data(), at, pageable.size()), absl::OkStatus());
  EXPECT_EQ(fake_cuda::WaitCount(), waits);
  gate.Open();
  EXPECT_EQ(other->Synchronize(), absl::OkStatus());
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
  device->Unpin(absl::MakeSpan(pinned));
}

TEST(CudaDeviceFakeTest, MemoryOfAnotherGpuIsNotOpenedByHandle) {
  fake_cuda::Boot({.device_count = 2, .opens_own = true});
  const auto first = *OpenDevice("cuda:0");
  const auto second = *OpenDevice("cuda:1");
  const EngineAllocation memory = AllocateAsEngine(*first, 4096);  // On cuda:0.
  const auto exported = first->ExportIpc(memory.address, 4096);
  ASSERT_TRUE(exported.ok()) << exported.status();
  const auto opened = second->OpenIpc(exported->handle, 4096, 0);
  EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(opened.status().message()),
              HasSubstr("cuda:1: the handle is of memory of cuda:0"));
  // What Allocate made goes to others by its descriptor.
  const auto pool = *first->Allocate(1, "pool");
  EXPECT_THAT(std::string(first->ExportIpc(pool->address(), 1).status().message()),
              HasSubstr("only memory of cudaMalloc has such a handle"));
}

// Everything that a user of the device does, until the first error.
absl::Status UseDevice(const EngineAllocation& engine) {
  KVMILL_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, OpenCudaDevice(0));
  KVMILL_ASSIGN_OR_RETURN(const auto memory, device->Allocate(std::size_t{4} << 20, "pool"));
  KVMILL_ASSIGN_OR_RETURN(const auto imported, device->Import(memory->fd(), memory->bytes()));
  KVMILL_ASSIGN_OR_RETURN(const IpcMemory exported, device->ExportIpc(engine.address, 4096));
  KVMILL_ASSIGN_OR_RETURN(const auto opened,
                          device->OpenIpc(exported.handle, exported.allocation_bytes, 0));
  std::vector<std::byte> pageable(std::size_t{2} << 20), pinned(4096);
  KVMILL_RETURN_IF_ERROR(device->Pin(absl::MakeSpan(pinned)));
  const auto use = [&]() -> absl::Status {
    KVMILL_ASSIGN_OR_RETURN(const auto stream, device->CreateStream());
    KVMILL_ASSIGN_OR_RETURN(const auto event, device->CreateEvent());
    KVMILL_RETURN_IF_ERROR(stream->Copy(memory->address(), pageable.data(), pageable.size()));
    KVMILL_RETURN_IF_ERROR(stream->Copy(pageable.data(), memory->address(), pageable.size()));
    KVMILL_RETURN_IF_ERROR(stream->Copy(pinned.data(), memory->address(), pinned.size()));
    KVMILL_RETURN_IF_ERROR(stream->Record(*event));
    KVMILL_RETURN_IF_ERROR(stream->Wait(*event));
    std::atomic<int> calls{0};
    const absl::Status called = stream->Call([&](const absl::Status&) { ++calls; });
    KVMILL_RETURN_IF_ERROR(event->Synchronize());
    const absl::Status status = stream->Synchronize();
    EXPECT_EQ(calls, called.ok() ? 1 : 0);
    return called.ok() ? status : called;
  };
  const absl::Status status = use();
  device->Unpin(absl::MakeSpan(pinned));
  return status;
}

TEST(CudaDeviceFakeTest, WhateverFailsNothingIsLeftBehind) {
  const std::size_t files = OpenFiles();
  int failures = 0;
  for (int n = 1;; ++n) {
    fake_cuda::Boot({.opens_own = true});
    absl::Status status;
    bool failed = false;
    {
      const EngineAllocation engine = AllocateAsEngine(*OpenDevice("cuda:0").value(), 4096);
      fake_cuda::FailCall(n);
      status = UseDevice(engine);
      failed = fake_cuda::HasFailed();
      fake_cuda::FailCall(0);
    }
    EXPECT_THAT(fake_cuda::Leaks(), testing::IsEmpty()) << "call " << n;
    EXPECT_THAT(fake_cuda::Problems(), testing::IsEmpty()) << "call " << n;
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
  EXPECT_GT(failures, 40);
}

TEST(CudaDeviceFakeTest, ABrokenDeviceSaysSoToAllItsStreams) {
  const auto device = *OpenDevice("cuda:0");
  const auto stream = *device->CreateStream();
  const auto other = *device->CreateStream();
  const auto memory = *device->Allocate(4096, "pool");
  ASSERT_EQ(stream->Decode(TileFormat(), Frame::kModel,
                           reinterpret_cast<const DecodeArgs*>(memory->address()), 1),
            absl::OkStatus());
  const absl::Status error = stream->Synchronize();
  EXPECT_EQ(error.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(error.message()),
              testing::AllOf(HasSubstr("cuda:0: "), HasSubstr("cudaErrorIllegalAddress"),
                             HasSubstr("cannot use the device any more")));
  EXPECT_EQ(other->Synchronize(), error);
  EXPECT_EQ(device->Allocate(1, "more").status(), error);
  EXPECT_EQ(device->CreateStream().status(), error);
  EXPECT_EQ(device->CreateEvent().status(), error);
  std::vector<std::byte> host(4096);
  EXPECT_EQ(device->Pin(absl::MakeSpan(host)), error);
}

}  // namespace
}  // namespace kvmill
