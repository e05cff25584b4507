// Builds without CUDA.
#include "absl/strings/str_cat.h"
#include "storage/device/cuda_device.h"

namespace kvmill {

int CudaDeviceCount() { return 0; }

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index) {
  return absl::UnavailableError(
      absl::StrCat("cuda:", index,
                   ": this build has no CUDA; configure it with -DKVMILL_CUDA=ON "
                   "where nvcc is installed, or use the host"));
}

CUstream_st* NativeCudaStream(DeviceStream&) { return nullptr; }

}  // namespace kvmill
