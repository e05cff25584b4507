// What only HostDevice promises: queues with a limit, threads that sleep, sealed memory, and that
// misuse is found.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

TEST(HostDeviceTest, EnqueuingOnAFullQueueWaits) {
  constexpr std::size_t kQueueMax = 4;
  const auto device = MakeHostDevice(kQueueMax);
  const auto stream = *device->CreateStream();
  Gate gate;
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  gate.AwaitArrival();  // The thread has it: the queue is empty.
  std::atomic<std::size_t> enqueued{0};
  std::atomic<int> calls{0};
  std::thread caller([&] {
    for (std::size_t i = 0; i <= kQueueMax; ++i) {
      EXPECT_EQ(stream->Call([&](const absl::Status&) { ++calls; }), absl::OkStatus());
      ++enqueued;
    }
  });
  while (enqueued < kQueueMax) std::this_thread::yield();
  // The one too many has nowhere to go; a while is enough to see it if it had.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(enqueued, kQueueMax);
  EXPECT_EQ(calls, 0);
  gate.Open();
  caller.join();
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
  EXPECT_EQ(calls, static_cast<int>(kQueueMax) + 1);
}

TEST(HostDeviceTest, IdleStreamsUseNoProcessor) {
  const auto device = MakeHostDevice();
  const auto stream = *device->CreateStream();
  const auto waiting = *device->CreateStream();
  const auto event = *device->CreateEvent();
  Gate gate;
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  ASSERT_EQ(stream->Record(*event), absl::OkStatus());
  ASSERT_EQ(waiting->Wait(*event), absl::OkStatus());
  const auto processor_ms = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
  };
  const auto before = processor_ms();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(processor_ms() - before, 100);  // One that spins takes 200.
  gate.Open();
  EXPECT_EQ(waiting->Synchronize(), absl::OkStatus());
}

TEST(HostDeviceTest, NobodyElseCanWriteOrResizeItsMemory) {
  const auto device = MakeHostDevice();
  const auto memory = *device->Allocate(1 << 20, "sealed");
  EXPECT_EQ(mmap(nullptr, memory->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd(), 0),
            MAP_FAILED);
  EXPECT_EQ(ftruncate(memory->fd(), 4096), -1);
  EXPECT_EQ(ftruncate(memory->fd(), static_cast<off_t>(memory->bytes() * 2)), -1);
  EXPECT_EQ(pwrite(memory->fd(), "x", 1, 0), -1);
  // Opened anew it is as sealed as before.
  const int again = open(absl::StrCat("/proc/self/fd/", memory->fd()).c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(again, 0);
  EXPECT_EQ(mmap(nullptr, memory->bytes(), PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
  EXPECT_EQ(pwrite(again, "x", 1, 0), -1);
  close(again);
  *memory->address() = std::byte{1};  // We can.
}

TEST(HostDeviceTest, AnErrorIsWithWhoeverWaitsForIt) {
  const auto device = MakeHostDevice();
  const auto failing = *device->CreateStream();
  const auto waiting = *device->CreateStream();
  const auto event = *device->CreateEvent();
  Gate gate;
  ASSERT_EQ(Hold(*failing, gate), absl::OkStatus());
  DecodeArgs out_of_reach;
  ASSERT_EQ(failing->Decode(TileFormat(), Frame::kModel, &out_of_reach, 1), absl::OkStatus());
  ASSERT_EQ(failing->Record(*event), absl::OkStatus());
  ASSERT_EQ(waiting->Wait(*event), absl::OkStatus());
  std::byte from{1}, to{2};
  ASSERT_EQ(waiting->Copy(&to, &from, 1), absl::OkStatus());
  gate.Open();
  const absl::Status error = failing->Synchronize();
  EXPECT_FALSE(error.ok());
  EXPECT_TRUE(event->Done());
  EXPECT_EQ(event->Synchronize(), error);
  EXPECT_EQ(waiting->Synchronize(), error);
  EXPECT_EQ(to, std::byte{2});  // What was to be copied may never have come.
}

using HostDeviceDeathTest = testing::Test;

TEST(HostDeviceDeathTest, FindsMisuse) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto device = MakeHostDevice();
  std::vector<std::byte> host(4096);
  const auto span = absl::MakeSpan(host);
  EXPECT_DEATH(device->Unpin(span), "Remove");
  ASSERT_EQ(device->Pin(span), absl::OkStatus());
  EXPECT_DEATH(device->Unpin(span.first(100)), "Remove");
  device->Unpin(span);

  EXPECT_DEATH(
      {
        void* const gone =
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        const absl::Span<std::byte> memory(static_cast<std::byte*>(gone), 4096);
        if (!device->Pin(memory).ok()) _exit(0);
        munmap(gone, 4096);
        device->Unpin(memory);
      },
      "IsMapped");
  EXPECT_DEATH(
      {
        auto short_lived = MakeHostDevice();
        auto memory = short_lived->Allocate(1, "outlives");
        short_lived.reset();
      },
      "known.empty");
  EXPECT_DEATH(
      {
        auto short_lived = MakeHostDevice();
        auto stream = short_lived->CreateStream();
        short_lived.reset();
      },
      "alive == 0");
}

}  // namespace
}  // namespace kvmill
