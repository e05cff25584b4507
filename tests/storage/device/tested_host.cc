#include "tests/storage/device/tested_device.h"

namespace kvmill {

std::string TestedDeviceName() { return "host"; }

absl::Status Hold(DeviceStream& stream, Gate& gate) {
  return stream.Call([&gate](const absl::Status&) { gate.Pass(); });
}

EngineAllocation AllocateAsEngine(Device& device, std::size_t bytes) {
  auto memory = device.Allocate(bytes, "engine");
  EXPECT_TRUE(memory.ok()) << memory.status();
  std::shared_ptr<DeviceMemory> owner = *std::move(memory);
  return {owner->address(), owner};
}

}  // namespace kvmill
