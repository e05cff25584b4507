// What storage/device/cuda_device.cc is elsewhere: GPUs come from a library of their own.
#include "storage/device/cuda_device.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "client/c_api/cuda_plugin.h"
#include "client/kvmill.h"

namespace kvmill {
namespace {

using c_api::CudaPlugin;

absl::StatusOr<const CudaPlugin*> Load() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&kvmill_version), &self) == 0 ||
      self.dli_fname == nullptr) {
    return absl::UnavailableError("nobody knows where libkvmill.so is");
  }
  std::string path = self.dli_fname;
  path.resize(path.rfind('/') + 1);  // Empty where there is none: the loader searches.
  path += c_api::kCudaPluginFile;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat("no CUDA in this installation: ", dlerror()));
  }
  const auto* const plugin =
      static_cast<const CudaPlugin*>(dlsym(library, c_api::kCudaPluginSymbol));
  if (plugin == nullptr || std::string(plugin->version) != c_api::kCudaPluginVersion) {
    return absl::UnavailableError(
        absl::StrCat(path, " is of another build: ", plugin == nullptr ? "?" : plugin->version,
                     ", want ", c_api::kCudaPluginVersion));
  }
  return plugin;
}

const absl::StatusOr<const CudaPlugin*>& Plugin() {
  static const absl::StatusOr<const CudaPlugin*> plugin = Load();  // For as long as the process.
  return plugin;
}

}  // namespace

int CudaDeviceCount() { return Plugin().ok() ? (*Plugin())->device_count() : 0; }

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index) {
  if (!Plugin().ok()) return Plugin().status();
  return (*Plugin())->open(index);
}

CUstream_st* NativeCudaStream(DeviceStream&) { return nullptr; }

}  // namespace kvmill
