#include "storage/device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/device/cuda_context.h"
#include "storage/device/cuda_ipc.h"
#include "storage/device/cuda_memory.h"
#include "storage/device/cuda_stream.h"
#include "storage/device/host_memory.h"

namespace kvmill {
namespace {

// Of the attention kernel, by its registers and shared memory (docs/perf.md).
constexpr std::uint32_t kAttentionBlocksPerMultiprocessor = 2;

std::string MemoryLockLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return absl::StrCat(limit.rlim_cur, " bytes");
}

class CudaDevice : public Device {
 public:
  static absl::StatusOr<std::unique_ptr<Device>> Open(int index) {
    KVMILL_ASSIGN_OR_RETURN(std::unique_ptr<CudaContext> context, CudaContext::Open(index));
    cudaDeviceProp properties{};
    const absl::Status described =
        context->Check("properties", cudaGetDeviceProperties(&properties, index));
    if (!described.ok()) return absl::UnavailableError(described.message());
    DeviceInfo info;
    info.kind = DeviceKind::kCuda;
    info.name = context->name();
    info.description = absl::StrCat(properties.name, ", sm_", properties.major, properties.minor);
    info.memory_bytes = properties.totalGlobalMem;
    info.host_accessible = false;
    static_assert(sizeof(properties.uuid) == sizeof(info.uuid));
    std::memcpy(info.uuid.data(), &properties.uuid, sizeof(info.uuid));
    info.attention_workers =
        kAttentionBlocksPerMultiprocessor *
        static_cast<std::uint32_t>(std::max(1, properties.multiProcessorCount));
    return std::unique_ptr<Device>(new CudaDevice(std::move(context), std::move(info)));
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(std::size_t bytes,
                                                         absl::string_view name) override {
    return CudaMemory::Allocate(context_.get(), bytes, name);
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(int fd, std::size_t bytes) override {
    return CudaMemory::Import(context_.get(), fd, bytes);
  }

  absl::StatusOr<IpcMemory> ExportIpc(const void* start, std::size_t bytes) override {
    return ExportCudaIpc(*context_, start, bytes);
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenIpc(const IpcHandle& handle,
                                                        std::size_t allocation_bytes,
                                                        pid_t) override {
    return CudaIpcMemory::Open(context_.get(), handle, allocation_bytes);
  }

  absl::Status Pin(absl::Span<std::byte> memory) override {
    return Register(memory, MemoryUse::kPinned, cudaHostRegisterPortable);
  }

  absl::Status PinToRead(absl::Span<const std::byte> memory) override {
    if (!context_->pins_to_read()) {
      return absl::FailedPreconditionError(absl::StrCat(
          context_->name(), ": its driver cannot pin memory that may only be read; update it"));
    }
    return Register(memory, MemoryUse::kPinnedToRead,
                    cudaHostRegisterPortable | cudaHostRegisterReadOnly);
  }

  void Unpin(absl::Span<const std::byte> memory) override {
    KVMILL_CHECK(IsMapped(memory));  // Pinned memory went before it was unpinned.
    KVMILL_CHECK(context_->known().RemovePinned(memory.data(), memory.size()));
    const CudaContext::Use use(*context_);
    // What can fail here is a broken context, which ends with the process.
    context_->Check("unpin", cudaHostUnregister(const_cast<std::byte*>(memory.data())))
        .IgnoreError();
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    return CudaStream::Create(context_.get());
  }

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return CudaDeviceEvent::Create(context_.get());
  }

  std::size_t AttendWorkspaceBytes(const AttentionShape& shape, std::size_t sequence_count,
                                   std::size_t, std::uint32_t worker_count) const override {
    return AttentionCudaWorkspaceBytes(shape.format, sequence_count, worker_count);
  }

 private:
  CudaDevice(std::unique_ptr<CudaContext> context, DeviceInfo info)
      : context_(std::move(context)), info_(std::move(info)) {}

  absl::Status Register(absl::Span<const std::byte> memory, MemoryUse memory_use, unsigned flags) {
    KVMILL_RETURN_IF_ERROR(context_->error());
    KVMILL_RETURN_IF_ERROR(CheckMapped(context_->name(), memory));
    // First of all, so that it is refused if it is pinned or the device's.
    KnownMemory& known = context_->known();
    KVMILL_RETURN_IF_ERROR(known.Add(memory.data(), memory.size(), memory_use));
    const CudaContext::Use use(*context_);
    // The runtime takes no pointer to const, and writes nothing.
    const absl::Status status = context_->Check(
        "pin", cudaHostRegister(const_cast<std::byte*>(memory.data()), memory.size(), flags));
    if (status.ok()) return status;
    known.Remove(memory.data(), memory.size(), memory_use);
    if (!absl::IsResourceExhausted(status)) return status;
    return absl::ResourceExhaustedError(
        absl::StrCat(status.message(), "; ", memory.size(),
                     " bytes, the limit of locked memory (ulimit -l) is ", MemoryLockLimit()));
  }

  const std::unique_ptr<CudaContext> context_;
  const DeviceInfo info_;
};

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index) {
  return CudaDevice::Open(index);
}

CUstream_st* NativeCudaStream(DeviceStream& stream) {
  auto* own = dynamic_cast<CudaStream*>(&stream);
  return own == nullptr ? nullptr : own->get();
}

}  // namespace kvmill
