// A stream of HostDevice: a queue with a limit, and one thread that works it off.
//
// Internal to storage/device.
#ifndef KVMILL_STORAGE_DEVICE_HOST_STREAM_H_
#define KVMILL_STORAGE_DEVICE_HOST_STREAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"
#include "storage/device/host_workers.h"
#include "storage/device/known_memory.h"

namespace kvmill {

// What streams, events and memory of one device share; outlives them all.
struct HostDeviceState {
  explicit HostDeviceState(unsigned helper_threads) : workers(helper_threads) {}
  KnownMemory known;
  HostWorkers workers;
  // Of streams and events. Read when the device goes, by when whoever made them has let go.
  std::atomic<int> alive{0};
};

// A place in a stream's work, passed once: with OK, or with the error that the stream has by then.
class HostPoint {
 public:
  void Pass(const absl::Status& status);
  bool passed() const;
  absl::Status Wait() const;

 private:
  mutable Mutex mu_;
  mutable CondVar passes_;
  bool passed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

class HostEvent : public DeviceEvent {
 public:
  explicit HostEvent(HostDeviceState* device) : device_(device) { ++device_->alive; }
  ~HostEvent() override { --device_->alive; }
  bool Done() override;
  absl::Status Synchronize() override;

  // Null before the first Record.
  std::shared_ptr<HostPoint> point() const;
  void set_point(std::shared_ptr<HostPoint> point);
  const HostDeviceState* device() const { return device_; }

 private:
  HostDeviceState* const device_;
  mutable Mutex mu_;
  // Shared with the streams that have yet to pass or to wait for it, which may outlive the event.
  std::shared_ptr<HostPoint> point_ ABSL_GUARDED_BY(mu_);
};

class HostStream : public DeviceStream {
 public:
  HostStream(HostDeviceState* device, std::size_t queue_max)
      : device_(device), queue_max_(queue_max) {
    ++device_->alive;
  }
  ~HostStream() override;

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

 private:
  struct CopyWork {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  struct EncodeWork {
    TileFormat format;
    Frame frame;
    absl::Span<const EncodeArgs> tiles;
    EncodeResult* results;
  };
  struct DecodeWork {
    TileFormat format;
    Frame frame;
    absl::Span<const DecodeArgs> tiles;
  };
  struct AttendWork {
    AttentionArgs args;
    std::uint32_t worker_count;
    std::byte* workspace;
  };
  struct CheckWork {
    absl::Span<const GenerationCheck> checks;
    std::uint32_t* changed;
  };
  struct RecordWork {
    std::shared_ptr<HostPoint> point;
  };
  struct WaitWork {
    std::shared_ptr<HostPoint> point;
  };
  struct CallWork {
    std::function<void(absl::Status)> done;
  };
  using Work = std::variant<CopyWork, EncodeWork, DecodeWork, AttendWork, CheckWork, RecordWork,
                            WaitWork, CallWork>;

  // Memory aligned to 64 bytes that grows.
  class Scratch {
   public:
    // RESOURCE_EXHAUSTED.
    absl::StatusOr<absl::Span<std::byte>> Get(std::size_t bytes);

   private:
    struct Delete {
      void operator()(std::byte* p) const { operator delete (p, std::align_val_t{64}); }
    };
    std::unique_ptr<std::byte, Delete> data_;
    std::size_t bytes_ = 0;
  };

  absl::Status Enqueue(Work work);
  void Main();
  // The new error of the stream. What must run even after an error is told of it.
  absl::Status Run(Work& work, const absl::Status& error);
  absl::Status RunWork(const CopyWork& work);
  absl::Status RunWork(const EncodeWork& work);
  absl::Status RunWork(const DecodeWork& work);
  absl::Status RunWork(const AttendWork& work);
  absl::Status RunWork(const CheckWork& work);

  HostDeviceState* const device_;
  const std::size_t queue_max_;
  std::thread thread_;  // Started by the first work.
  Scratch scratch_;     // Of the thread.

  Mutex mu_;
  CondVar work_there_, room_there_, idle_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_HOST_STREAM_H_
