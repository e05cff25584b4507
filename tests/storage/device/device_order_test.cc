// Order: on a stream always, between streams by events only; callbacks exactly once; and that what
// was enqueued has not happened before somebody waited for it.
#include <atomic>
#include <cstdint>
#include <numeric>

#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

using DeviceOrderTest = DeviceTest;

std::vector<std::uint32_t> Numbers(std::size_t count, std::uint32_t first) {
  std::vector<std::uint32_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

constexpr std::size_t kCount = 3000;
constexpr std::size_t kBytes = kCount * sizeof(std::uint32_t);

TEST_F(DeviceOrderTest, WorkOnAStreamRunsInTheOrderOfItsEnqueuing) {
  const auto stream = Stream();
  const auto memory = Memory(4 * kBytes);
  std::byte* const at = memory->address();
  std::vector<std::uint32_t> values = Numbers(kCount, 1);
  std::vector<std::uint32_t> back(kCount);
  // Each copy reads what the one before wrote; many times, so that a reordering shows.
  for (int round = 0; round < 50; ++round) {
    ASSERT_EQ(stream->Copy(at, values.data(), kBytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(at + kBytes, at, kBytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(at + 2 * kBytes, at + kBytes, kBytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(back.data(), at + 2 * kBytes, kBytes), absl::OkStatus());
    ASSERT_EQ(stream->Synchronize(), absl::OkStatus());
    ASSERT_EQ(back, values);
    for (std::uint32_t& v : values) ++v;
  }
}

// Whoever reads a result without waiting for it reads something else: this is what makes a
// forgotten Synchronize show.
TEST_F(DeviceOrderTest, NothingHasHappenedBeforeSomebodyWaits) {
  const auto stream = Stream();
  const auto memory = Memory(kBytes);
  const std::vector<std::uint32_t> values = Numbers(kCount, 7);
  std::vector<std::uint32_t> back(kCount, 0);
  ASSERT_EQ(stream->Copy(memory->address(), values.data(), kBytes), absl::OkStatus());
  ASSERT_EQ(stream->Synchronize(), absl::OkStatus());

  Gate gate;
  const auto event = Event();
  ASSERT_EQ(Hold(*stream, gate), absl::OkStatus());
  ASSERT_EQ(stream->Copy(back.data(), memory->address(), kBytes), absl::OkStatus());
  ASSERT_EQ(stream->Record(*event), absl::OkStatus());
  EXPECT_EQ(back, std::vector<std::uint32_t>(kCount, 0));
  EXPECT_FALSE(event->Done());
  gate.Open();
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
  EXPECT_TRUE(event->Done());
  EXPECT_EQ(back, values);
}

TEST_F(DeviceOrderTest, WithoutAnEventAStreamDoesNotWaitForAnother) {
  const auto held = Stream();
  const auto other = Stream();
  const auto memory = Memory(kBytes);
  const std::vector<std::uint32_t> values = Numbers(kCount, 3);
  Gate gate;
  ASSERT_EQ(Hold(*held, gate), absl::OkStatus());
  const std::vector<std::uint32_t> late = Numbers(kCount, 100);
  ASSERT_EQ(held->Copy(memory->address(), late.data(), kBytes), absl::OkStatus());
  ASSERT_EQ(other->Copy(memory->address(), values.data(), kBytes), absl::OkStatus());
  EXPECT_EQ(Download<std::uint32_t>(*other, memory->address(), kCount), values);
  gate.Open();
  EXPECT_EQ(held->Synchronize(), absl::OkStatus());
  EXPECT_EQ(Download<std::uint32_t>(*other, memory->address(), kCount), late);
}

TEST_F(DeviceOrderTest, AnEventOrdersStreams) {
  const auto first = Stream();
  const auto second = Stream();
  const auto event = Event();
  const auto memory = Memory(2 * kBytes);
  std::byte* const at = memory->address();
  const std::vector<std::uint32_t> values = Numbers(kCount, 11);
  std::vector<std::uint32_t> back(kCount, 0);

  Gate gate;
  ASSERT_EQ(Hold(*first, gate), absl::OkStatus());
  ASSERT_EQ(first->Copy(at, values.data(), kBytes), absl::OkStatus());
  ASSERT_EQ(first->Record(*event), absl::OkStatus());
  ASSERT_EQ(second->Wait(*event), absl::OkStatus());
  ASSERT_EQ(second->Copy(at + kBytes, at, kBytes), absl::OkStatus());
  ASSERT_EQ(second->Copy(back.data(), at + kBytes, kBytes), absl::OkStatus());
  std::atomic<bool> called{false};
  ASSERT_EQ(second->Call([&](const absl::Status&) { called = true; }), absl::OkStatus());
  EXPECT_FALSE(event->Done());
  EXPECT_FALSE(called);
  EXPECT_EQ(back, std::vector<std::uint32_t>(kCount, 0));

  gate.Open();
  EXPECT_EQ(second->Synchronize(), absl::OkStatus());
  EXPECT_EQ(event->Synchronize(), absl::OkStatus());
  EXPECT_EQ(back, values);
}

TEST_F(DeviceOrderTest, AWaitIsForTheRecordBeforeIt) {
  const auto first = Stream();
  const auto second = Stream();
  const auto event = Event();
  EXPECT_TRUE(event->Done());  // Before the first Record.
  EXPECT_EQ(event->Synchronize(), absl::OkStatus());
  ASSERT_EQ(second->Wait(*event), absl::OkStatus());  // Nothing to wait for.

  ASSERT_EQ(first->Record(*event), absl::OkStatus());
  ASSERT_EQ(second->Wait(*event), absl::OkStatus());
  Gate gate;
  ASSERT_EQ(Hold(*first, gate), absl::OkStatus());
  ASSERT_EQ(first->Record(*event), absl::OkStatus());  // Later than the Wait.
  EXPECT_EQ(second->Synchronize(), absl::OkStatus());
  EXPECT_FALSE(event->Done());
  gate.Open();
  EXPECT_EQ(event->Synchronize(), absl::OkStatus());
  EXPECT_TRUE(event->Done());
}

TEST_F(DeviceOrderTest, AnEventMayGoBeforeItsStreamHasPassedIt) {
  const auto first = Stream();
  const auto second = Stream();
  Gate gate;
  ASSERT_EQ(Hold(*first, gate), absl::OkStatus());
  {
    const auto event = Event();
    ASSERT_EQ(first->Record(*event), absl::OkStatus());
    ASSERT_EQ(second->Wait(*event), absl::OkStatus());
  }
  gate.Open();
  EXPECT_EQ(second->Synchronize(), absl::OkStatus());
}

TEST_F(DeviceOrderTest, AnEventOfAnotherDeviceIsRefused) {
  const auto other = MakeHostDevice();
  const auto event = other->CreateEvent();
  ASSERT_TRUE(event.ok());
  const auto stream = Stream();
  EXPECT_EQ(stream->Record(**event).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stream->Wait(**event).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
}

TEST_F(DeviceOrderTest, CallsComeOnceInOrderAndAfterWhatWasBefore) {
  const auto stream = Stream();
  const auto memory = Memory(kBytes);
  std::vector<std::uint32_t> back(kCount, 0);
  const std::vector<std::uint32_t> values = Numbers(kCount, 5);
  constexpr int kCalls = 100;
  std::vector<int> order;  // By the device's thread only, until the stream is gone.
  bool copied = false;
  {
    const auto calling = Stream();
    ASSERT_EQ(calling->Copy(memory->address(), values.data(), kBytes), absl::OkStatus());
    ASSERT_EQ(calling->Copy(back.data(), memory->address(), kBytes), absl::OkStatus());
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_EQ(calling->Call([&, i](const absl::Status& status) {
        EXPECT_EQ(status, absl::OkStatus());
        if (i == 0) copied = back == values;
        order.push_back(i);
      }),
                absl::OkStatus());
    }
  }  // Nobody synchronized: the end of the stream waits for the calls.
  EXPECT_TRUE(copied);
  std::vector<int> want(kCalls);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(order, want);
  EXPECT_EQ(stream->Call(nullptr).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DeviceOrderTest, AStreamThatGoesWaitsForItsWork) {
  const auto memory = Memory(kBytes);
  const std::vector<std::uint32_t> values = Numbers(kCount, 21);
  std::vector<std::uint32_t> back(kCount, 0);
  {
    const auto stream = Stream();
    ASSERT_EQ(stream->Copy(memory->address(), values.data(), kBytes), absl::OkStatus());
    ASSERT_EQ(stream->Copy(back.data(), memory->address(), kBytes), absl::OkStatus());
  }
  EXPECT_EQ(back, values);
}

}  // namespace
}  // namespace kvmill
