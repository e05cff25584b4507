// GPUs, as OpenDevice finds them. Builds without CUDA have none.
//
// Internal to storage/device. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_DEVICE_H_
#define KVMILL_STORAGE_DEVICE_CUDA_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "storage/device/device.h"

struct CUstream_st;  // What a cudaStream_t points to.

namespace kvmill {

// 0 without a driver, and in builds without CUDA.
int CudaDeviceCount();

// UNAVAILABLE saying what is missing.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index);

// What the stream is for CUDA, to enqueue what DeviceStream has no word for. Null for a stream of
// another kind of device.
CUstream_st* NativeCudaStream(DeviceStream& stream);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_DEVICE_H_
