// Owners of the runtime's handles. Making one needs CudaContext::Use; so does its end, which brings
// its own.
//
// Internal to storage/device.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_HANDLES_H_
#define KVMILL_STORAGE_DEVICE_CUDA_HANDLES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "storage/core/status_macros.h"
#include "storage/device/cuda_context.h"

namespace kvmill {

// A handle whose end cannot fail in a way that matters: what is left of a broken context goes with
// the process.
template <typename Handle, cudaError_t (*kDestroy)(Handle)>
class CudaOwner {
 public:
  CudaOwner() = default;
  CudaOwner(const CudaContext& context, Handle handle) : context_(&context), handle_(handle) {}
  CudaOwner(CudaOwner&& other) noexcept : context_(other.context_), handle_(other.handle_) {
    other.handle_ = nullptr;
  }
  CudaOwner& operator=(CudaOwner&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaOwner() {
    if (handle_ == nullptr) return;
    const CudaContext::Use use(*context_);
    kDestroy(handle_);
  }
  Handle get() const { return handle_; }

 private:
  const CudaContext* context_ = nullptr;
  Handle handle_ = nullptr;
};

using CudaStreamHandle = CudaOwner<cudaStream_t, cudaStreamDestroy>;
using CudaEventHandle = CudaOwner<cudaEvent_t, cudaEventDestroy>;
using CudaHostBuffer = CudaOwner<void*, cudaFreeHost>;  // Pinned.

// Of no order with the default stream, which others may use.
inline absl::StatusOr<CudaStreamHandle> MakeCudaStream(CudaContext& context) {
  cudaStream_t stream = nullptr;
  KVMILL_RETURN_IF_ERROR(
      context.Check("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  return CudaStreamHandle(context, stream);
}

// Without timing, which costs; who waits for it sleeps.
inline absl::StatusOr<CudaEventHandle> MakeCudaEvent(CudaContext& context) {
  cudaEvent_t event = nullptr;
  KVMILL_RETURN_IF_ERROR(context.Check(
      "event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync)));
  return CudaEventHandle(context, event);
}

inline absl::StatusOr<CudaHostBuffer> MakeCudaHostBuffer(CudaContext& context, std::size_t bytes) {
  void* buffer = nullptr;
  KVMILL_RETURN_IF_ERROR(
      context.Check("staging buffer", cudaHostAlloc(&buffer, bytes, cudaHostAllocDefault)));
  return CudaHostBuffer(context, buffer);
}

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_HANDLES_H_
