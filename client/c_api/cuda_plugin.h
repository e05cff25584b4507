// libkvmill_cuda.so: GPUs for libkvmill.so, which loads it from beside itself when a client names
// one. The two are of one build: C++ objects pass between them.
//
// A library of its own, because CUDA's runtime keeps 4 KiB of thread-local memory. Protobuf's makes
// that of libkvmill.so static, of which a process has less to give to what it loads later. Internal
// to client/c_api.
#ifndef KVMILL_CLIENT_C_API_CUDA_PLUGIN_H_
#define KVMILL_CLIENT_C_API_CUDA_PLUGIN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "storage/device/device.h"

namespace kvmill::c_api {

struct CudaPlugin {
  const char* version;  // kvmill_version() of its libkvmill.so, and what it was compiled by.
  int (*device_count)();
  absl::StatusOr<std::unique_ptr<Device>> (*open)(int index);
};

inline constexpr const char* kCudaPluginVersion = KVMILL_VERSION ", " __VERSION__;
inline constexpr const char* kCudaPluginFile = "libkvmill_cuda.so.2";
inline constexpr const char* kCudaPluginSymbol = "kvmill_cuda_plugin";

}  // namespace kvmill::c_api

#endif  // KVMILL_CLIENT_C_API_CUDA_PLUGIN_H_
