// Starting a kernel on a stream: the host half of device.h. Enqueues only; never allocates or
// synchronizes; legal while the stream is captured into a graph.
#ifndef KVMILL_KERNELS_CUDA_LAUNCH_H_
#define KVMILL_KERNELS_CUDA_LAUNCH_H_

#include <cstddef>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "kernels/cuda/device.h"

struct CUstream_st;  // What a cudaStream_t points to.

namespace kvmill {
namespace device {

struct LaunchShape {
  unsigned blocks = 0;
  unsigned threads = 0;  // Of a block, a multiple of 32.
  std::size_t shared_bytes = 0;
};

#ifdef __CUDACC__

// Shared memory that a block may ask for on the current device; 0 where there is none: a launch
// then says why.
inline std::size_t SharedBytesMax() {
  int device = 0;
  int bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  return static_cast<std::size_t>(bytes);
}

inline absl::Status LaunchError(cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(cudaGetErrorString(error));
}

template <std::size_t... kIndex, typename... Parameters>
absl::Status LaunchWith(void (*kernel)(Parameters...), const LaunchShape& shape,
                        CUstream_st* stream, std::tuple<Parameters...>& parameters,
                        std::index_sequence<kIndex...>) {
  // Beyond this a kernel must ask for its shared memory.
  constexpr std::size_t kSharedBytesDefault = 48 << 10;
  const auto* function = reinterpret_cast<const void*>(kernel);
  if (shape.shared_bytes > kSharedBytesDefault) {
    const cudaError_t error =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return LaunchError(error);
  }
  void* pointers[] = {&std::get<kIndex>(parameters)...};
  return LaunchError(cudaLaunchKernel(function, dim3(shape.blocks), dim3(shape.threads), pointers,
                                      shape.shared_bytes, stream));
}

#else

std::size_t SharedBytesMax();  // Defined by the harness.

// Defined by the harness. Runs `body(parameters)` once per thread; the parameters are constant
// memory. INTERNAL says what the kernel did wrong.
absl::Status RunOnHost(const LaunchShape& shape, const void* parameters,
                       std::size_t parameter_bytes, void (*body)(const void*));

template <typename... Parameters>
struct KernelCall {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> parameters;
};

#endif

// Launches `kernel(arguments...)`. The arguments are copied.
template <typename... Parameters, typename... Arguments>
absl::Status Launch(void (*kernel)(Parameters...), const LaunchShape& shape, CUstream_st* stream,
                    const Arguments&... arguments) {
#ifdef __CUDACC__
  std::tuple<Parameters...> parameters(arguments...);
  return LaunchWith(kernel, shape, stream, parameters, std::index_sequence_for<Parameters...>());
#else
  (void)stream;
  using Call = KernelCall<Parameters...>;
  const Call call{kernel, std::tuple<Parameters...>(arguments...)};
  return RunOnHost(shape, &call, sizeof(call), [](const void* p) {
    const Call& c = *static_cast<const Call*>(p);
    std::apply(c.kernel, c.parameters);
  });
#endif
}

}  // namespace device
}  // namespace kvmill

#endif  // KVMILL_KERNELS_CUDA_LAUNCH_H_
