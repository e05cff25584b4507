#include "storage/device/cuda_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/device/cuda_handles.h"
#include "storage/device/host_memory.h"

namespace kvmill {

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Allocate(CudaContext* context,
                                                                 std::size_t bytes,
                                                                 absl::string_view name) {
  KVMILL_RETURN_IF_ERROR(context->error());
  const CudaContext::Use use(*context);
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, MemoryUse::kAllocated));
  KVMILL_RETURN_IF_ERROR(memory->RoundUp(bytes));
  absl::Status status = memory->Create();
  if (status.ok()) status = memory->Map();
  if (status.ok()) status = memory->Zero();
  if (absl::IsResourceExhausted(status)) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) cudaGetLastError();
    return absl::ResourceExhaustedError(absl::StrCat(status.message(), "; ", memory->bytes_,
                                                     " bytes for ", name, ", ", free_bytes, " of ",
                                                     total_bytes, " bytes of the device are free"));
  }
  KVMILL_RETURN_IF_ERROR(status);
  return memory;
}

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Import(CudaContext* context, int fd,
                                                               std::size_t bytes) {
  KVMILL_RETURN_IF_ERROR(context->error());
  const CudaContext::Use use(*context);
  std::unique_ptr<CudaMemory> memory(new CudaMemory(context, MemoryUse::kImported));
  KVMILL_RETURN_IF_ERROR(memory->RoundUp(bytes));
  KVMILL_RETURN_IF_ERROR(memory->TakeHandle(fd));
  KVMILL_RETURN_IF_ERROR(memory->Map());
  return memory;
}

CudaMemory::~CudaMemory() {
  const CudaContext::Use use(*context_);
  const CudaDriver& driver = context_->driver();
  if (is_known_) KVMILL_CHECK(context_->known().Remove(address(), bytes_, use_));
  if (is_mapped_) driver.unmap(address_, bytes_);
  if (address_ != 0) driver.address_free(address_, bytes_);
  if (fd_ >= 0) close(fd_);
  if (has_handle_) driver.release(handle_);
}

CUmemAllocationProp CudaMemory::Properties() const {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = context_->index();
  // For network cards, which UCX lets read it.
  properties.allocFlags.gpuDirectRDMACapable = context_->has_rdma() ? 1 : 0;
  return properties;
}

absl::Status CudaMemory::RoundUp(std::size_t bytes) {
  KVMILL_ASSIGN_OR_RETURN(const std::size_t rounded, RoundUpDeviceMemory(bytes));
  const CUmemAllocationProp properties = Properties();
  KVMILL_RETURN_IF_ERROR(context_->Check(
      "granularity",
      context_->driver().granularity(&step_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM)));
  step_ = std::max(step_, kDeviceMemoryStep);  // Both are powers of two.
  bytes_ = (rounded + step_ - 1) / step_ * step_;
  return absl::OkStatus();
}

absl::Status CudaMemory::Create() {
  const CUmemAllocationProp properties = Properties();
  KVMILL_RETURN_IF_ERROR(
      context_->Check("memory", context_->driver().create(&handle_, bytes_, &properties, 0)));
  has_handle_ = true;
  KVMILL_RETURN_IF_ERROR(context_->Check(
      "export of memory", context_->driver().export_handle(
                              &fd_, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)));
  fcntl(fd_, F_SETFD, FD_CLOEXEC);
  return absl::OkStatus();
}

absl::Status CudaMemory::TakeHandle(int fd) {
  // The driver's answer to what is no file at all is not worth reading.
  if (fcntl(fd, F_GETFD) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(context_->name(), ": file descriptor ", fd, " is not open"));
  }
  const CUresult imported = context_->driver().import_handle(
      &handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (imported != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat(context_->Check("import of memory", imported).message(), ": file descriptor ",
                     fd, " is no memory of a GPU"));
  }
  has_handle_ = true;
  CUmemAllocationProp properties{};
  KVMILL_RETURN_IF_ERROR(
      context_->Check("import of memory", context_->driver().properties_of(&properties, handle_)));
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties.location.id != context_->index()) {
    return absl::InvalidArgumentError(absl::StrCat(context_->name(), ": file descriptor ", fd,
                                                   " is memory of cuda:", properties.location.id));
  }
  return absl::OkStatus();
}

absl::Status CudaMemory::Map() {
  const CudaDriver& driver = context_->driver();
  KVMILL_RETURN_IF_ERROR(
      context_->Check("address range", driver.address_reserve(&address_, bytes_, step_, 0, 0)));
  KVMILL_RETURN_IF_ERROR(
      context_->Check("map of memory", driver.map(address_, bytes_, 0, handle_, 0)));
  is_mapped_ = true;
  if (use_ == MemoryUse::kImported) {
    // Not every driver can protect memory of a device; Copy refuses to write to it in any case.
    if (!SetAccess(CU_MEM_ACCESS_FLAGS_PROT_READ).ok()) {
      KVMILL_RETURN_IF_ERROR(SetAccess(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    }
  } else {
    KVMILL_RETURN_IF_ERROR(SetAccess(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  }
  KVMILL_RETURN_IF_ERROR(context_->known().Add(address(), bytes_, use_));
  is_known_ = true;
  return absl::OkStatus();
}

absl::Status CudaMemory::SetAccess(CUmemAccess_flags flags) const {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->index();
  access.flags = flags;
  return context_->Check("access to memory",
                         context_->driver().set_access(address_, bytes_, &access, 1));
}

absl::Status CudaMemory::Zero() {
  KVMILL_ASSIGN_OR_RETURN(const CudaStreamHandle stream, MakeCudaStream(*context_));
  KVMILL_RETURN_IF_ERROR(
      context_->Check("zeroing of memory", cudaMemsetAsync(address(), 0, bytes_, stream.get())));
  return context_->CheckWait("zeroing of memory", cudaStreamSynchronize(stream.get()));
}

}  // namespace kvmill
