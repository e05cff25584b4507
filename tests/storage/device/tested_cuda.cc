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

EngineAllocation AllocateAsEngine(Device&, std::size_t bytes) {
  // On threads of their own, so that the test's does not get a current device.
  void* memory = nullptr;
  std::thread([&] {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
  }).join();
  const auto free_memory = [](void* p) {
    std::thread([p] {
      cudaSetDevice(0);
      EXPECT_EQ(cudaFree(p), cudaSuccess);
    }).join();
  };
  return {static_cast<std::byte*>(memory), {memory, free_memory}};
}

}  // namespace kvmill
