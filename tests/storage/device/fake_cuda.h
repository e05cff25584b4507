// The entry points of CUDA that CudaDevice uses, in memory: linked before libcudart they make the
// same code run on machines without a GPU. Streams are threads, device memory is a memfd, exported
// by its file descriptor, kernels are those of the CPU. It says what a program did wrong that CUDA
// would not say, or not at once, and fails when it is told to.
#ifndef KVMILL_TESTS_STORAGE_DEVICE_FAKE_CUDA_H_
#define KVMILL_TESTS_STORAGE_DEVICE_FAKE_CUDA_H_

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/device/known_memory.h"

namespace kvmill::fake_cuda {

struct Machine {
  int driver_version = 13000;  // 0: no driver.
  int device_count = 1;
  cudaError_t count_error = cudaSuccess;
  int capability_major = 9;
  bool shares_memory = true;
  bool protects_memory = true;  // Whether device memory can be mapped to read only.
  bool pins_to_read = true;     // Whether host memory that is mapped to read only can be pinned.
  std::size_t granularity = std::size_t{2} << 20;
  std::size_t memory_bytes = std::size_t{4} << 30;
  std::size_t locked_bytes_max = std::size_t{1} << 30;
  std::string missing_symbol;  // Of the driver.
  bool opens_own = false;      // Whether a process may open a handle of its own memory.
};

// A new machine: the old one must have been left clean.
void Boot(const Machine& machine);
// What was done wrong so far: wrong handles, sizes, threads without a context, pageable memory in
// asynchronous copies, calls from callbacks.
std::vector<std::string> Problems();
// What was made and not ended, by kind.
std::vector<std::string> Leaks();
// The `n`-th call from now that can fail does, with out of memory; 0: none does.
void FailCall(int n);
bool HasFailed();
// Calls that wait for the device, or may.
int WaitCount();
void CountWait();

// A place that is passed once.
class Point {
 public:
  void Pass();
  bool passed();
  void Wait();

 private:
  std::mutex mu_;
  std::condition_variable passes_;
  bool passed_ = false;
};

// Everything of the fake; one lock. Threads of streams take it never while they work.
struct State {
  std::mutex mu;
  Machine machine;
  std::vector<std::string> problems;
  int fail_in = 0;
  bool has_failed = false;
  int waits = 0;
  cudaError_t broken = cudaSuccess;  // What every call answers from now on.

  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::map<const void*, std::size_t> host_allocations, registrations;
  struct Physical {
    int fd;
    std::size_t bytes;
    int device;
    bool exported_kind;
  };
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  std::map<CUdeviceptr, std::size_t> reserved, mapped;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped_handle;
  std::size_t physical_bytes = 0;
  CUmemGenericAllocationHandle next_handle = 100;
  std::map<int, int> retained;  // Device to count.
  // Of cudaMalloc, and what was opened by handles, which has one address however often it was.
  struct Linear {
    std::size_t bytes = 0;
    int fd = -1;
    int device = 0;
    int openings = 0;  // 0: of cudaMalloc here.
    ino_t inode = 0;
  };
  std::map<CUdeviceptr, Linear> linear;
  KnownMemory known;  // What kernels and copies can reach.
};
State& Global();
void Problem(const std::string& what);

// At the beginning of a call: the error that it shall answer. `can_fail`: counts for FailCall.
cudaError_t Enter(const char* call, bool can_fail, bool needs_context = true);
cudaError_t Answer(cudaError_t error);  // Keeps it for cudaGetLastError.
int CurrentDevice();                    // -1 without a context.
CUcontext ContextOf(int device);
std::vector<CUcontext>& ContextStack();  // Of the thread.

// Kernels: `work` runs at the stream's place; its error breaks the device.
cudaError_t Enqueue(CUstream_st* stream, std::function<cudaError_t()> work);
void* DriverEntryPoint(const std::string& symbol, unsigned version);

}  // namespace kvmill::fake_cuda

struct CUstream_st {
  int device = 0;
  std::thread thread;
  std::mutex mu;
  std::condition_variable work_there, idle;
  std::deque<std::function<cudaError_t()>> queue;
  bool busy = false;
  bool stop = false;
};

struct CUevent_st {
  int device = 0;
  std::mutex mu;
  std::shared_ptr<kvmill::fake_cuda::Point> point;
};

#endif  // KVMILL_TESTS_STORAGE_DEVICE_FAKE_CUDA_H_
