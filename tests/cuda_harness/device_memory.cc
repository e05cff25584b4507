// The Harness of harness.h on a real device: the same tests with the kernels that nvcc compiled, in
// memory that host and device share. No faults are found here; compute-sanitizer may look instead.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>

#include "tests/cuda_harness/harness.h"

namespace kvmill {
namespace cuda_harness {
namespace {

// Skips every test of a program on machines without a device.
class DeviceEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
  }
};

const testing::Environment* const device_environment =
    testing::AddGlobalTestEnvironment(new DeviceEnvironment);  // GoogleTest owns it.

}  // namespace

class Executor {
 public:
  Executor() = default;
  ~Executor() {
    for (void* const bytes : allocations) cudaFree(bytes);
  }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  std::vector<void*> allocations;
  std::vector<Fault> faults;
};

Harness::Harness(std::uint32_t /*seed*/) : executor_(std::make_unique<Executor>()) {}
Harness::~Harness() { Finish().IgnoreError(); }  // Memory in use must not be freed.

void* Harness::AllocateBytes(std::size_t bytes, const std::string& name) {
  void* data = nullptr;
  const cudaError_t error = cudaMallocManaged(&data, bytes == 0 ? 1 : bytes);
  if (error != cudaSuccess) throw std::runtime_error(name + ": " + cudaGetErrorString(error));
  std::memset(data, 0, bytes);
  executor_->allocations.push_back(data);
  return data;
}

bool Harness::LimitSharedBytes(std::size_t /*bytes_max*/) { return false; }

absl::Status Harness::Finish() {
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

const std::vector<Fault>& Harness::faults() const { return executor_->faults; }

}  // namespace cuda_harness
}  // namespace kvmill
