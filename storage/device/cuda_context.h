// What everything of one GPU shares: the driver's functions, the primary context, the memory that
// is known, and the error that ended it.
//
// Internal to storage/device. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_CONTEXT_H_
#define KVMILL_STORAGE_DEVICE_CUDA_CONTEXT_H_

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/core/mutex.h"
#include "storage/device/known_memory.h"

namespace kvmill {

// Functions of libcuda, found by the runtime when the first device is opened: nothing is linked
// with the driver, so programs start where there is none.
struct CudaDriver {
  PFN_cuInit_v2000 init = nullptr;
  PFN_cuGetErrorName_v6000 error_name = nullptr;
  PFN_cuGetErrorString_v6000 error_string = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_context_retain = nullptr;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_context_release = nullptr;
  PFN_cuCtxPushCurrent_v4000 push_context = nullptr;
  PFN_cuCtxPopCurrent_v4000 pop_context = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 granularity = nullptr;
  PFN_cuMemGetAllocationPropertiesFromHandle_v10020 properties_of = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 export_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 import_handle = nullptr;
  PFN_cuMemGetAddressRange_v3020 address_range = nullptr;
};

class CudaContext {
 public:
  // UNAVAILABLE saying what is missing.
  static absl::StatusOr<std::unique_ptr<CudaContext>> Open(int index);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  int index() const { return index_; }
  const std::string& name() const { return name_; }  // "cuda:0"
  const CudaDriver& driver() const { return driver_; }
  bool has_rdma() const { return has_rdma_; }
  bool pins_to_read() const { return pins_to_read_; }  // Memory mapped to read only.
  KnownMemory& known() { return known_; }
  std::atomic<int>& alive() { return alive_; }  // Streams and events.

  // OK, or a Status that names the device, what was tried, and CUDA's word for the error. Errors
  // that end the context stay: see error().
  absl::Status Check(absl::string_view what, cudaError_t error);
  absl::Status Check(absl::string_view what, CUresult error);
  // Of waiting: what shows then is an error of the work, and ends the context.
  absl::Status CheckWait(absl::string_view what, cudaError_t error);
  // What ended the context; OK while it lives.
  absl::Status error() const;

  // Makes the device the calling thread's as long as it lives, and then what it was before. (By the
  // context, not by cudaSetDevice: putting device 0 back would create a context on it.)
  class Use {
   public:
    explicit Use(const CudaContext& context);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const CudaContext& context_;
    const bool pushed_;
  };

 private:
  CudaContext(int index, const CudaDriver& driver);
  absl::Status Retain();
  absl::Status End(absl::Status error);

  const int index_;
  const std::string name_;
  const CudaDriver driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  bool has_rdma_ = false;
  bool pins_to_read_ = false;
  KnownMemory known_;
  std::atomic<int> alive_{0};  // Read at the end, when whoever made them has let go.
  mutable Mutex mu_;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_CONTEXT_H_
