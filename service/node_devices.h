// The device of a daemon, and what holds its GPU tier: the same one, or for tests another that
// stands in.
//
// For node.cc, which owns them. Here is what --device and --gpu-bytes together allow; what a device
// can do is in storage/device/.
#ifndef KVMILL_SERVICE_NODE_DEVICES_H_
#define KVMILL_SERVICE_NODE_DEVICES_H_

#include <memory>

#include "absl/status/statusor.h"
#include "service/config.h"
#include "storage/device/device.h"

namespace kvmill {

struct NodeDevices {
  std::unique_ptr<Device> device;
  std::unique_ptr<Device> stand_in;  // For a GPU, where the device is the host: for tests.

  // Null without one.
  Device* gpu() const {
    return device->info().kind == DeviceKind::kCuda ? device.get() : stand_in.get();
  }
};

// FAILED_PRECONDITION: the device would encode what is in its memory otherwise than
// --encode-algorithm says.
absl::Status CheckEncodes(const Config& config, const DeviceInfo& device);

// Logs which one it is. Errors name the option, its value and what is there: those of OpenDevice
// and CheckEncodes, FAILED_PRECONDITION for --gpu-bytes without a GPU, RESOURCE_EXHAUSTED for more
// than it has.
absl::StatusOr<NodeDevices> OpenNodeDevices(const Config& config);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_NODE_DEVICES_H_
