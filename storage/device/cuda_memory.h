// GPU memory that can be handed to another process: physical memory of cuMemCreate, exported as a
// file descriptor and mapped at a reserved range of addresses.
//
// Internal to storage/device. Immutable after construction.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_MEMORY_H_
#define KVMILL_STORAGE_DEVICE_CUDA_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/device/cuda_context.h"
#include "storage/device/device.h"

namespace kvmill {

class CudaMemory : public DeviceMemory {
 public:
  // `context` outlives it.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Allocate(CudaContext* context,
                                                              std::size_t bytes,
                                                              absl::string_view name);
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Import(CudaContext* context, int fd,
                                                            std::size_t bytes);
  ~CudaMemory() override;

  std::byte* address() const override { return reinterpret_cast<std::byte*>(address_); }
  std::size_t bytes() const override { return bytes_; }
  int fd() const override { return fd_; }

 private:
  CudaMemory(CudaContext* context, MemoryUse use) : context_(context), use_(use) {}
  CUmemAllocationProp Properties() const;
  // Sets bytes_ and step_.
  absl::Status RoundUp(std::size_t bytes);
  absl::Status Create();
  absl::Status TakeHandle(int fd);
  absl::Status Map();
  absl::Status SetAccess(CUmemAccess_flags flags) const;
  absl::Status Zero();

  CudaContext* const context_;
  const MemoryUse use_;
  std::size_t bytes_ = 0;
  std::size_t step_ = 0;  // What sizes and addresses are multiples of.
  // Each is undone by the destructor, from the last to the first.
  bool has_handle_ = false;
  CUmemGenericAllocationHandle handle_ = 0;
  int fd_ = -1;
  CUdeviceptr address_ = 0;
  bool is_mapped_ = false;
  bool is_known_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_MEMORY_H_
