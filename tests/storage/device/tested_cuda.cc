#include <cuda_runtime_api.h>

#include <thread>

#include "storage/device/cuda_device.h"
#include "tests/storage/device/tested_device.h"

namespace kvmill {

std::string TestedDeviceName() { return "cuda:0"; }

absl::Status Hold(DeviceStream& stream, Gate& gate) {
  // A Call does not hold back what comes after it. On a thread of its own, so that the test's does
  // not get a current device.
  cudaError_t error = cudaSuccess;
  std::thread([&] {
    error = cudaSetDevice(0);
    if (error != cudaSuccess) return;
    error = cudaLaunchHostFunc(
        NativeCudaStream(stream), [](void* g) { static_cast<Gate*>(g)->Pass(); }, &gate);
  }).join();
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

}  // namespace kvmill
