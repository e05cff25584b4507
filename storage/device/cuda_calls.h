// Calls back when a stream has got somewhere, exactly once, also when the device breaks.
//
// cudaLaunchHostFunc drops its function when the context has an error. So a call is an event and an
// entry in a queue; a thread waits for the events one after the other, and what it learns, good or
// bad, it passes on.
//
// Internal to storage/device. One thread at a time, as the stream.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_CALLS_H_
#define KVMILL_STORAGE_DEVICE_CUDA_CALLS_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "storage/core/mutex.h"
#include "storage/device/cuda_context.h"
#include "storage/device/cuda_handles.h"

namespace kvmill {

class CudaCalls {
 public:
  explicit CudaCalls(CudaContext* context) : context_(context) {}
  // After the last call.
  ~CudaCalls();

  // Needs CudaContext::Use. `done` is not called when this returns an error.
  absl::Status Add(cudaStream_t stream, std::function<void(absl::Status)> done);
  // Waits until all have been called.
  void Drain();

 private:
  struct Pending {
    CudaEventHandle event;
    std::function<void(absl::Status)> done;
  };
  void Main();
  absl::Status Start();
  absl::StatusOr<CudaEventHandle> TakeEvent();

  CudaContext* const context_;
  std::thread thread_;  // Started by the first call.
  Mutex mu_;
  CondVar pending_there_, idle_;
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<CudaEventHandle> unused_events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_CALLS_H_
