#include "client/c_api/cuda_plugin.h"

#include "client/kvmill.h"
#include "storage/device/cuda_device.h"

extern "C" KVMILL_API const kvmill::c_api::CudaPlugin kvmill_cuda_plugin;
const kvmill::c_api::CudaPlugin kvmill_cuda_plugin = {
    kvmill::c_api::kCudaPluginVersion, &kvmill::CudaDeviceCount, &kvmill::OpenCudaDevice};
