// The device that a test program is about: one set of tests, linked with one of tested_*.cc.
#ifndef KVMILL_TESTS_STORAGE_DEVICE_TESTED_DEVICE_H_
#define KVMILL_TESTS_STORAGE_DEVICE_TESTED_DEVICE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"

namespace kvmill {

// A place that nobody gets past before it is opened.
class Gate {
 public:
  ~Gate() { Open(); }
  void Open() {
    MutexLock lock(mu_);
    open_ = true;
    changed_.NotifyAll();
  }
  void Pass() {
    MutexLock lock(mu_);
    arrived_ = true;
    changed_.NotifyAll();
    while (!open_) changed_.Wait(mu_);
  }
  void AwaitArrival() {
    MutexLock lock(mu_);
    while (!arrived_) changed_.Wait(mu_);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool open_ = false;
  bool arrived_ = false;
};

// As OpenDevice names it.
std::string TestedDeviceName();
// Nothing that is enqueued on the stream afterwards runs before the gate is opened.
absl::Status Hold(DeviceStream& stream, Gate& gate);

// Memory as an engine's own library allocates it; freed by what comes with it.
struct EngineAllocation {
  std::byte* address = nullptr;
  std::shared_ptr<void> owner;  // Of whichever kind the device has.
};
EngineAllocation AllocateAsEngine(Device& device, std::size_t bytes);
// What an engine of the tests has in its memory: two finite fp16 values a word.
inline std::uint32_t EngineWord(std::uint32_t index) { return (index * 2654435761u) & 0x3FFF3FFFu; }

// Device memory that is written here and uploaded as a whole, with the addresses that it has there.
class DeviceImage {
 public:
  DeviceImage(Device& device, std::size_t bytes) {
    auto memory = device.Allocate(bytes, "test-image");
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    image_.resize(memory_->bytes());
  }

  // Where it will be on the device.
  std::byte* PutBytes(const void* from, std::size_t bytes, std::size_t alignment = 16) {
    used_ = (used_ + alignment - 1) / alignment * alignment;
    EXPECT_LE(used_ + bytes, image_.size());
    if (from != nullptr && bytes != 0) std::memcpy(image_.data() + used_, from, bytes);
    std::byte* const at = memory_->address() + used_;
    used_ += bytes;
    return at;
  }
  std::byte* Reserve(std::size_t bytes, std::size_t alignment = 256) {
    return PutBytes(nullptr, bytes, alignment);
  }
  template <typename T>
  T* Put(const std::vector<T>& values) {
    return reinterpret_cast<T*>(PutBytes(values.data(), values.size() * sizeof(T)));
  }
  absl::Status Upload(DeviceStream& stream) const {
    return stream.Copy(memory_->address(), image_.data(), std::max<std::size_t>(1, used_));
  }
  DeviceMemory& memory() { return *memory_; }

 private:
  std::unique_ptr<DeviceMemory> memory_;
  std::vector<std::byte> image_;
  std::size_t used_ = 0;
};

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenDevice(TestedDeviceName());
    if (!device.ok() && TestedDeviceName() != "host") {
      GTEST_SKIP() << "no device: " << device.status().message();
    }
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  std::unique_ptr<DeviceStream> Stream() {
    auto stream = device_->CreateStream();
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  }
  std::unique_ptr<DeviceEvent> Event() {
    auto event = device_->CreateEvent();
    EXPECT_TRUE(event.ok()) << event.status();
    return *std::move(event);
  }
  std::unique_ptr<DeviceMemory> Memory(std::size_t bytes) {
    auto memory = device_->Allocate(bytes, "test");
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }
  template <typename T>
  std::vector<T> Download(DeviceStream& stream, const void* from, std::size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(stream.Copy(values.data(), from, count * sizeof(T)), absl::OkStatus());
    EXPECT_EQ(stream.Synchronize(), absl::OkStatus());
    return values;
  }

  std::unique_ptr<Device> device_;
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_STORAGE_DEVICE_TESTED_DEVICE_H_
