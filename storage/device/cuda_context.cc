#include "storage/device/cuda_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/device/cuda_device.h"

namespace kvmill {
namespace {

constexpr const char* kOrHost = "or use the host";

// "13.0" of 13000.
std::string VersionName(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// Errors after which every call answers the same, until the process ends.
bool EndsContext(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

absl::Status Unavailable(absl::string_view name, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(name, ": ", what, ", ", kOrHost));
}

// Whether there are a driver that is new enough, and that device.
absl::Status CheckDevice(int index, absl::string_view name) {
  int driver_version = 0;
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess || driver_version == 0) {
    cudaGetLastError();
    return Unavailable(name,
                       "there is no NVIDIA driver; install one (in a container: give it the GPU)");
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver) {
    return Unavailable(
        name, absl::StrCat("the NVIDIA driver is for CUDA ", VersionName(driver_version),
                           ", this build needs ", VersionName(CUDART_VERSION / 1000 * 1000),
                           " or later; update the driver"));
  }
  if (error != cudaSuccess && error != cudaErrorNoDevice) {
    return Unavailable(
        name, absl::StrCat("the NVIDIA driver does not answer: ", cudaGetErrorString(error), " (",
                           cudaGetErrorName(error), "); see nvidia-smi"));
  }
  if (count == 0) {
    return Unavailable(name,
                       "the NVIDIA driver shows no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (index < 0 || index >= count) {
    return Unavailable(name, absl::StrCat("there ", count == 1 ? "is 1 GPU" : "are ",
                                          count == 1 ? "" : absl::StrCat(count, " GPUs"),
                                          " here, counted from cuda:0; name another"));
  }
  return absl::OkStatus();
}

// Every function in the form that it has had since `version`, the form of its type.
template <typename Function>
absl::Status Find(absl::string_view device, const char* symbol, unsigned version,
                  Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    cudaGetLastError();
    return Unavailable(device,
                       absl::StrCat("the NVIDIA driver has no ", symbol, "; update the driver"));
  }
  *function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

absl::StatusOr<CudaDriver> LoadDriver(absl::string_view name) {
  CudaDriver d;
  KVMILL_RETURN_IF_ERROR(Find(name, "cuInit", 2000, &d.init));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuGetErrorName", 6000, &d.error_name));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuGetErrorString", 6000, &d.error_string));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuDeviceGet", 2000, &d.device_get));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuDeviceGetAttribute", 2000, &d.device_get_attribute));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuDevicePrimaryCtxRetain", 7000, &d.primary_context_retain));
  KVMILL_RETURN_IF_ERROR(
      Find(name, "cuDevicePrimaryCtxRelease", 11000, &d.primary_context_release));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuCtxPushCurrent", 4000, &d.push_context));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuCtxPopCurrent", 4000, &d.pop_context));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemGetAllocationGranularity", 10020, &d.granularity));
  KVMILL_RETURN_IF_ERROR(
      Find(name, "cuMemGetAllocationPropertiesFromHandle", 10020, &d.properties_of));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemCreate", 10020, &d.create));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemRelease", 10020, &d.release));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemAddressReserve", 10020, &d.address_reserve));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemAddressFree", 10020, &d.address_free));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemMap", 10020, &d.map));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemUnmap", 10020, &d.unmap));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemSetAccess", 10020, &d.set_access));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemExportToShareableHandle", 10020, &d.export_handle));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemImportFromShareableHandle", 10020, &d.import_handle));
  KVMILL_RETURN_IF_ERROR(Find(name, "cuMemGetAddressRange", 3020, &d.address_range));
  return d;
}

}  // namespace

CudaContext::CudaContext(int index, const CudaDriver& driver)
    : index_(index), name_(absl::StrCat("cuda:", index)), driver_(driver) {}

absl::StatusOr<std::unique_ptr<CudaContext>> CudaContext::Open(int index) {
  const std::string name = absl::StrCat("cuda:", index);
  KVMILL_RETURN_IF_ERROR(CheckDevice(index, name));
  KVMILL_ASSIGN_OR_RETURN(const CudaDriver driver, LoadDriver(name));
  std::unique_ptr<CudaContext> context(new CudaContext(index, driver));
  const absl::Status retained = context->Retain();
  if (!retained.ok()) {
    return absl::UnavailableError(absl::StrCat(retained.message(), ", ", kOrHost));
  }
  return context;
}

absl::Status CudaContext::Retain() {
  KVMILL_RETURN_IF_ERROR(Check("cuInit", driver_.init(0)));
  KVMILL_RETURN_IF_ERROR(Check("cuDeviceGet", driver_.device_get(&device_, index_)));
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    return driver_.device_get_attribute(&value, which, device_) == CUDA_SUCCESS ? value : 0;
  };
  const int major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  if (major < 8) {
    return absl::UnavailableError(
        absl::StrCat(name_, ": compute capability ", major, ".",
                     attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                     "; the kernels need 8.0 or later: name another"));
  }
  if (attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0 ||
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0) {
    return absl::UnavailableError(
        absl::StrCat(name_, ": its memory cannot be shared between processes: name another"));
  }
  if (attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) == 0) {
    return absl::UnavailableError(
        absl::StrCat(name_, ": it cannot read pinned memory by the host's address: name another"));
  }
  has_rdma_ = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  pins_to_read_ = attribute(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) != 0;
  return Check("primary context", driver_.primary_context_retain(&context_, device_));
}

CudaContext::~CudaContext() {
  KVMILL_CHECK(alive_ == 0);     // Streams and events.
  KVMILL_CHECK(known_.empty());  // Memory, and what is pinned.
  if (context_ != nullptr) driver_.primary_context_release(device_);
}

absl::Status CudaContext::Check(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // The runtime keeps it for the thread's next caller otherwise.
  const std::string message = absl::StrCat(name_, ": ", what, ": ", cudaGetErrorString(error), " (",
                                           cudaGetErrorName(error), ")");
  if (EndsContext(error)) return End(absl::InternalError(message));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorInvalidValue:
    case cudaErrorHostMemoryAlreadyRegistered:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status CudaContext::Check(absl::string_view what, CUresult error) {
  if (error == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  const char* error_name = nullptr;
  driver_.error_string(error, &text);
  driver_.error_name(error, &error_name);
  const std::string message =
      absl::StrCat(name_, ": ", what, ": ", text != nullptr ? text : "unknown error", " (",
                   error_name != nullptr ? error_name : absl::StrCat(static_cast<int>(error)), ")");
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    case CUDA_ERROR_INVALID_VALUE:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status CudaContext::CheckWait(absl::string_view what, cudaError_t error) {
  absl::Status status = Check(what, error);
  return status.ok() ? status : End(std::move(status));
}

absl::Status CudaContext::error() const {
  MutexLock lock(mu_);
  return error_;
}

// The first one is the one that explains.
absl::Status CudaContext::End(absl::Status error) {
  MutexLock lock(mu_);
  if (error_.ok()) {
    error_ = absl::InternalError(
        absl::StrCat(error.message(), "; this process cannot use the device any more"));
  }
  return error_;
}

CudaContext::Use::Use(const CudaContext& context)
    : context_(context), pushed_(context.driver_.push_context(context.context_) == CUDA_SUCCESS) {}

CudaContext::Use::~Use() {
  CUcontext popped = nullptr;
  if (pushed_) context_.driver_.pop_context(&popped);
}

}  // namespace kvmill
