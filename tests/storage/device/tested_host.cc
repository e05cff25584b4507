#include "tests/storage/device/tested_device.h"

namespace kvmill {

std::string TestedDeviceName() { return "host"; }

absl::Status Hold(DeviceStream& stream, Gate& gate) {
  return stream.Call([&gate](const absl::Status&) { gate.Pass(); });
}

}  // namespace kvmill
