#include "storage/device/device.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "storage/device/cuda_device.h"

namespace kvmill {

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view name) {
  if (name == "host") return MakeHostDevice();
  if (name == "auto") {
    const int count = CudaDeviceCount();
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice(i);
      if (device.ok()) return device;
    }
    return MakeHostDevice();
  }
  absl::string_view index_text = name;
  int index = 0;
  if (!absl::ConsumePrefix(&index_text, "cuda:") || index_text.empty() ||
      index_text.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(index_text, &index)) {
    return absl::InvalidArgumentError(
        absl::StrCat("device \"", name, "\": want auto, host or cuda:N"));
  }
  return OpenCudaDevice(index);
}

}  // namespace kvmill
