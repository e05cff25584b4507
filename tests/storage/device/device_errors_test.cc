// Errors of work that has been enqueued: they stay, and calls hear of them. On a GPU such an error
// ends the device for the process, so each test runs in a process of its own.
#include <unistd.h>

#include <atomic>
#include <iostream>
#include <mutex>

#include "tests/storage/device/tested_device.h"

namespace kvmill {
namespace {

// Ends the process with 0 when `condition` held all along.
class Verdict {
 public:
  void Expect(bool condition, const char* what) {
    if (condition) return;
    std::cerr << "not so: " << what << std::endl;
    failed_ = true;
  }
  [[noreturn]] void Exit() const { _exit(failed_ ? 1 : 0); }

 private:
  bool failed_ = false;
};

class DeviceErrorsTest : public DeviceTest {
 protected:
  void SetUp() override {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    DeviceTest::SetUp();
  }

  // What a kernel cannot reach.
  static absl::Status EnqueueAFault(DeviceStream& stream, const DeviceMemory& memory) {
    // A list on the device whose tile is nowhere.
    return stream.Decode(TileFormat(), Frame::kModel,
                         reinterpret_cast<const DecodeArgs*>(memory.address()), 1);
  }

  [[noreturn]] void UseAfterAFault() {
    Verdict verdict;
    auto memory = Memory(4096);
    auto stream = Stream();
    auto event = Event();
    std::atomic<int> before{0}, after{0};
    std::mutex mu;
    absl::Status before_status = absl::UnknownError("not called"), after_status;
    Gate gate;
    verdict.Expect(Hold(*stream, gate).ok(), "hold");
    verdict.Expect(EnqueueAFault(*stream, *memory).ok(), "the fault is enqueued");
    verdict.Expect(stream
                       ->Call([&](absl::Status status) {
                         const std::lock_guard<std::mutex> lock(mu);
                         ++after;
                         after_status = std::move(status);
                       })
                       .ok(),
                   "call");
    verdict.Expect(stream->Record(*event).ok(), "record");
    gate.Open();
    const absl::Status error = stream->Synchronize();
    verdict.Expect(!error.ok(), "Synchronize answers the error");
    verdict.Expect(!error.message().empty(), "the error says something");
    verdict.Expect(after == 1, "the call behind came once");
    verdict.Expect(!after_status.ok(), "the call behind heard of it");
    verdict.Expect(event->Done(), "the event is passed");
    verdict.Expect(!event->Synchronize().ok(), "whoever waits for the event hears of it");
    std::byte x{}, y{};
    verdict.Expect(stream->Copy(&x, &y, 1) == error, "copy answers it");
    verdict.Expect(EnqueueAFault(*stream, *memory) == error, "decode answers it");
    verdict.Expect(stream->Record(*event) == error, "record answers it");
    verdict.Expect(stream->Wait(*event) == error, "wait answers it");
    verdict.Expect(stream->Call([&](const absl::Status&) { ++before; }) == error,
                   "call answers it");
    verdict.Expect(stream->Synchronize() == error, "it stays");
    stream.reset();
    verdict.Expect(before == 0 && after == 1, "no call came twice, or after an error");
    verdict.Exit();
  }

  [[noreturn]] void EndAfterAFault() {
    Verdict verdict;
    auto memory = Memory(4096);
    std::atomic<int> calls{0}, errors{0};
    Gate gate;
    {
      auto stream = Stream();
      verdict.Expect(Hold(*stream, gate).ok(), "hold");
      const auto count = [&](const absl::Status& status) {
        ++calls;
        if (!status.ok()) ++errors;
      };
      verdict.Expect(EnqueueAFault(*stream, *memory).ok(), "the fault is enqueued");
      for (int i = 0; i < 5; ++i) verdict.Expect(stream->Call(count).ok(), "call");
      gate.Open();
    }
    verdict.Expect(calls == 5 && errors == 5, "five calls, five errors");
    verdict.Exit();
  }
};

TEST_F(DeviceErrorsTest, StayWithTheStreamAndReachEveryCallOnce) {
  EXPECT_EXIT(UseAfterAFault(), testing::ExitedWithCode(0), "");
}

TEST_F(DeviceErrorsTest, CallsComeAtTheEndOfAStreamThatBroke) {
  EXPECT_EXIT(EndAfterAFault(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace kvmill
