// A stream and an event of a GPU.
//
// Internal to storage/device.
#ifndef KVMILL_STORAGE_DEVICE_CUDA_STREAM_H_
#define KVMILL_STORAGE_DEVICE_CUDA_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "storage/core/mutex.h"
#include "storage/device/cuda_calls.h"
#include "storage/device/cuda_context.h"
#include "storage/device/cuda_handles.h"
#include "storage/device/device.h"

namespace kvmill {

class CudaDeviceEvent : public DeviceEvent {
 public:
  static absl::StatusOr<std::unique_ptr<CudaDeviceEvent>> Create(CudaContext* context);
  ~CudaDeviceEvent() override { --context_->alive(); }
  bool Done() override;
  absl::Status Synchronize() override;

  cudaEvent_t get() const { return event_.get(); }
  const CudaContext* context() const { return context_; }

 private:
  CudaDeviceEvent(CudaContext* context, CudaEventHandle event)
      : context_(context), event_(std::move(event)) {
    ++context_->alive();
  }

  CudaContext* const context_;
  const CudaEventHandle event_;
};

// Copies between places in host memory, as work of a stream.
class HostCopies {
 public:
  // Enqueues it. `name` is for the error.
  absl::Status Enqueue(CudaContext& context, cudaStream_t stream, void* to, const void* from,
                       std::size_t bytes);

 private:
  struct Copy {
    HostCopies* owner;
    void* to;
    const void* from;
    std::size_t bytes;
    std::list<Copy>::iterator self;
  };
  static void Run(void* copy);  // On a thread of the driver's; not when the context has an error.
  void Remove(std::list<Copy>::iterator copy);

  Mutex mu_;
  std::list<Copy> pending_ ABSL_GUARDED_BY(mu_);
};

class CudaStream : public DeviceStream {
 public:
  static absl::StatusOr<std::unique_ptr<CudaStream>> Create(CudaContext* context);
  ~CudaStream() override;

  absl::Status Copy(void* to, const void* from, std::size_t bytes) override;
  absl::Status Encode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                      std::size_t tile_count, EncodeResult* results) override;
  absl::Status Decode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                      std::size_t tile_count) override;
  absl::Status Attend(const AttentionArgs& args, std::uint32_t worker_count,
                      std::byte* workspace) override;
  absl::Status CheckGenerations(const GenerationCheck* checks, std::size_t check_count,
                                std::uint32_t* changed) override;
  absl::Status Record(DeviceEvent& event) override;
  absl::Status Wait(DeviceEvent& event) override;
  absl::Status Call(std::function<void(absl::Status)> done) override;
  absl::Status Synchronize() override;

  cudaStream_t get() const { return stream_.get(); }

 private:
  // Host memory that is not pinned goes through a buffer that is: the driver would wait for the
  // device, or read it too early.
  enum class Place : std::uint8_t { kPageable, kPinned, kDevice };

  CudaStream(CudaContext* context, CudaHostBuffer staging, CudaEventHandle ended,
             CudaStreamHandle stream)
      : context_(context),
        staging_(std::move(staging)),
        ended_(std::move(ended)),
        stream_(std::move(stream)),
        calls_(context) {
    ++context_->alive();
  }
  absl::StatusOr<Place> PlaceOf(const void* start, std::size_t bytes) const;
  absl::Status CopyDirectly(void* to, const void* from, std::size_t bytes);
  absl::Status CopyToDevice(std::byte* to, const std::byte* from, std::size_t bytes);
  absl::Status CopyFromDevice(std::byte* to, const std::byte* from, std::size_t bytes);
  // Of a kernel's launch.
  absl::Status Launched(const absl::Status& status);

  CudaContext* const context_;
  HostCopies host_copies_;        // Goes after the stream: the driver may still be at one.
  const CudaHostBuffer staging_;  // One chunk; a stream's copies come one after the other.
  const CudaEventHandle ended_;   // For Synchronize: waits for it sleep.
  const CudaStreamHandle stream_;
  CudaCalls calls_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_CUDA_STREAM_H_
