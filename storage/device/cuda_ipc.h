// GPU memory of another process's allocator, by the legacy inter-process handles of CUDA: what
// engines have is made by cudaMalloc, which exports nothing else.
//
// Internal to storage/device. Immutable after construction.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_IPC_H_
#define KVMILL_STORAGE_DEVICE_CUDA_IPC_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "storage/device/cuda_context.h"
#include "storage/device/device.h"

namespace kvmill {

absl::StatusOr<IpcMemory> ExportCudaIpc(CudaContext& context, const void* start, std::size_t bytes);

class CudaIpcMemory : public DeviceMemory {
 public:
  // `context` outlives it.
  static absl::StatusOr<std::unique_ptr<CudaIpcMemory>> Open(CudaContext* context,
                                                             const IpcHandle& handle,
                                                             std::size_t allocation_bytes);
  ~CudaIpcMemory() override;

  std::byte* address() const override { return static_cast<std::byte*>(address_); }
  std::size_t bytes() const override { return bytes_; }
  int fd() const override { return -1; }

 private:
  CudaIpcMemory(CudaContext* context, std::size_t bytes) : context_(context), bytes_(bytes) {}
  // Whether what was opened is what the caller spoke of.
  absl::Status Check() const;

  CudaContext* const context_;
  const std::size_t bytes_;
  void* address_ = nullptr;  // Open when it is not null.
  bool is_known_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_IPC_H_
