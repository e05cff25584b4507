#include "service/node_devices.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/units.h"
#include "storage/core/log.h"

namespace kvmill {

absl::StatusOr<NodeDevices> OpenNodeDevices(const Config& config) {
  absl::StatusOr<std::unique_ptr<Device>> opened = OpenDevice(config.device);
  if (!opened.ok()) {
    return absl::Status(opened.status().code(),
                        absl::StrCat("--device ", config.device, ": ", opened.status().message()));
  }
  NodeDevices devices;
  devices.device = *std::move(opened);
  const DeviceInfo& info = devices.device->info();
  if (config.encode_algorithm == "refined" &&
      (info.kind == DeviceKind::kCuda || config.gpu_bytes > 0)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--encode-algorithm refined: no kernel of a GPU does it, and device ", info.name,
        " with --gpu-bytes ", FormatBytes(config.gpu_bytes),
        " would encode what it holds as kvarn; want kvarn, or --device host without --gpu-bytes"));
  }
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
