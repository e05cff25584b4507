#include "service/node_devices.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/units.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {

absl::Status CheckEncodes(const Config& config, const DeviceInfo& device) {
  if (config.encode_algorithm != "refined" || device.kind != DeviceKind::kCuda) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "--encode-algorithm refined: no kernel of a GPU does it, and what engines have in the memory "
      "of device ",
      device.name, " would be encoded as kvarn; want kvarn, or --device host"));
}

absl::StatusOr<NodeDevices> OpenNodeDevices(const Config& config) {
  absl::StatusOr<std::unique_ptr<Device>> opened = OpenDevice(config.device);
  if (!opened.ok()) {
    return absl::Status(opened.status().code(),
                        absl::StrCat("--device ", config.device, ": ", opened.status().message()));
  }
  NodeDevices devices;
  devices.device = *std::move(opened);
  const DeviceInfo& info = devices.device->info();
  KVMILL_RETURN_IF_ERROR(CheckEncodes(config, info));
  LogInfo(absl::StrCat("device ", info.name, ": ", info.description));
  if (config.gpu_bytes == 0) return devices;
  if (info.kind == DeviceKind::kHost) {
    if (config.device == "auto") {
      return absl::FailedPreconditionError(
          absl::StrCat("--gpu-bytes ", FormatBytes(config.gpu_bytes),
                       ": no GPU answers; want 0, or --device host to try the tiers without one"));
    }
    LogWarning(absl::StrCat("--device host with --gpu-bytes ", FormatBytes(config.gpu_bytes),
                            ": host memory stands in for a GPU's; this is for tests of the tiers"));
    devices.stand_in = MakeHostDevice();
  } else if (config.gpu_bytes > info.memory_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("--gpu-bytes ", FormatBytes(config.gpu_bytes),
                                                     ": device ", info.name, " has ",
                                                     FormatBytes(info.memory_bytes)));
  }
  return devices;
}

}  // namespace kvmill
