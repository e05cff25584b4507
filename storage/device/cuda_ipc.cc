#include "storage/device/cuda_ipc.h"

#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"

namespace kvmill {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(IpcHandle));

absl::StatusOr<IpcMemory> ExportCudaIpc(CudaContext& context, const void* start,
                                        std::size_t bytes) {
  KVMILL_RETURN_IF_ERROR(context.error());
  const CudaContext::Use use(context);
  const auto begin = reinterpret_cast<CUdeviceptr>(start);
  CUdeviceptr base = 0;
  std::size_t allocation_bytes = 0;
  // The handle is of all of the allocation, wherever in it a pointer points.
  if (context.driver().address_range(&base, &allocation_bytes, begin) != CUDA_SUCCESS ||
      bytes == 0 || bytes > base + allocation_bytes - begin) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %d bytes at %p are not within memory of cudaMalloc", context.name(), bytes, start));
  }
  cudaIpcMemHandle_t handle;
  const absl::Status exported = context.Check(
      "export of memory", cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)));
  if (!exported.ok()) {
    KVMILL_RETURN_IF_ERROR(context.error());
    if (absl::IsResourceExhausted(exported)) return exported;
    return absl::InvalidArgumentError(
        absl::StrCat(exported.message(), ": only memory of cudaMalloc has such a handle"));
  }
  IpcMemory memory;
  std::memcpy(memory.handle.data(), &handle, sizeof(handle));
  memory.allocation_bytes = allocation_bytes;
  memory.offset_bytes = begin - base;
  return memory;
}

absl::StatusOr<std::unique_ptr<CudaIpcMemory>> CudaIpcMemory::Open(CudaContext* context,
                                                                   const IpcHandle& handle,
                                                                   std::size_t allocation_bytes) {
  KVMILL_RETURN_IF_ERROR(context->error());
  const CudaContext::Use use(*context);
  cudaIpcMemHandle_t cuda_handle;
  std::memcpy(&cuda_handle, handle.data(), sizeof(cuda_handle));
  std::unique_ptr<CudaIpcMemory> memory(new CudaIpcMemory(context, allocation_bytes));
  void* address = nullptr;
  const cudaError_t error =
      cudaIpcOpenMemHandle(&address, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    const absl::Status status = context->Check("opening another process's memory", error);
    KVMILL_RETURN_IF_ERROR(context->error());
    // What CUDA answers when the process is this one.
    if (error == cudaErrorDeviceUninitialized) {
      return absl::FailedPreconditionError(
          absl::StrCat(status.message(), ": memory of this process needs no opening"));
    }
    if (absl::IsResourceExhausted(status)) return status;
    return absl::InvalidArgumentError(
        absl::StrCat(status.message(), ": the handle names no memory that is there"));
  }
  memory->address_ = address;
  KVMILL_RETURN_IF_ERROR(memory->Check());
  KVMILL_RETURN_IF_ERROR(
      context->known().Add(memory->address_, memory->bytes_, MemoryUse::kForeign));
  memory->is_known_ = true;
  return memory;
}

absl::Status CudaIpcMemory::Check() const {
  cudaPointerAttributes attributes{};
  KVMILL_RETURN_IF_ERROR(context_->Check("opening another process's memory",
                                         cudaPointerGetAttributes(&attributes, address_)));
  // Memory of a peer can be opened, and would be read through the bus.
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != context_->index()) {
    return absl::InvalidArgumentError(
        absl::StrCat(context_->name(), ": the handle is of memory of cuda:", attributes.device));
  }
  CUdeviceptr base = 0;
  std::size_t allocation_bytes = 0;
  KVMILL_RETURN_IF_ERROR(
      context_->Check("opening another process's memory",
                      context_->driver().address_range(&base, &allocation_bytes,
                                                       reinterpret_cast<CUdeviceptr>(address_))));
  // It may have been rounded up.
  if (bytes_ != 0 && bytes_ <= base + allocation_bytes - reinterpret_cast<CUdeviceptr>(address_)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(context_->name(), ": the handle is of ",
                                                 allocation_bytes, " bytes, not of ", bytes_));
}

CudaIpcMemory::~CudaIpcMemory() {
  if (is_known_) {
    KVMILL_CHECK(context_->known().Remove(address_, bytes_, MemoryUse::kForeign));
  }
  if (address_ == nullptr) return;
  const CudaContext::Use use(*context_);
  // What can fail here is a broken context, which ends with the process.
  context_->Check("closing another process's memory", cudaIpcCloseMemHandle(address_))
      .IgnoreError();
}

}  // namespace kvmill
