// Where tiles are kept and worked on: this machine's own memory and cores, or a GPU.
//
// One interface, so that everything above is written once and tested without a GPU. HostDevice
// executes a stream on a thread of its own: work really runs later than it was enqueued, and
// whoever forgets to wait sees it in a test. CudaDevice is a GPU through the CUDA runtime; a build
// with CUDA starts on a machine without a driver and has no such device then.
//
// Order. Work on one stream runs in the order in which it was enqueued, each piece after the one
// before has ended. Work on two streams has no order, except through events. Nothing here waits
// for the device but Synchronize and, on HostDevice, enqueuing on a stream whose queue is full.
//
// Memory. "Device memory" is what DeviceMemory holds; with `host_accessible` the CPU may read and
// write it through the same address. Everything that a kernel is given - lists of arguments,
// tiles, pages, results - lies in device memory, or in host memory that was pinned, and stays
// until the stream has passed. Host memory that is not pinned may be an end of a Copy only.
// HostDevice checks all of this, down to the last page and row of every argument: what would be an
// illegal address on a GPU is an error of the stream on every machine.
//
// Errors. Enqueuing answers INVALID_ARGUMENT for what could never run, and what the device says
// otherwise. An error that shows when the work runs stays with the stream: every later call on it
// answers it, nothing that was enqueued behind it runs but calls, and a stream that waits for an
// event behind it has it too. On a GPU it is the whole device's.
//
// Thread-safe: Device. A stream belongs to one thread at a time. Everything made by a device must
// be gone before the device.
#ifndef KVMILL_STORAGE_DEVICE_DEVICE_H_
#define KVMILL_STORAGE_DEVICE_DEVICE_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "kernels/decode.h"
#include "kernels/encode.h"
#include "kernels/generation_check.h"
#include "kernels/tile_format.h"

namespace kvmill {

enum class DeviceKind : std::uint8_t { kHost = 0, kCuda = 1 };

struct DeviceInfo {
  DeviceKind kind = DeviceKind::kHost;
  std::string name;                // As --device takes it: "host", "cuda:0".
  std::string description;         // For people: "2 cores, AVX3_SPR", "NVIDIA H200, sm_90".
  std::uint64_t memory_bytes = 0;  // Of the whole device.
  bool host_accessible = false;
  // Whether OpenIpc can tell whose memory a handle is of.
  bool knows_ipc_owner = false;
  std::array<std::byte, 16> uuid{};     // Zeros where there is none.
  std::uint32_t attention_workers = 1;  // A good worker_count for Attend.
};

// A fixed piece of the device's memory, zeroed, aligned to 2 MiB.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::byte* address() const = 0;
  virtual std::size_t bytes() const = 0;
  // What another process needs to map the memory: passed over a unix socket, it goes to
  // Device::Import there. Borrowed. -1 for memory that was itself imported.
  virtual int fd() const = 0;
};

// Names memory that a library of an engine allocated (cudaMalloc), for OpenIpc in another process.
// Means something to devices of one kind on one machine, as long as the memory is there. Whoever
// has it can map the memory: it is told to those who may see all of the allocation.
using IpcHandle = std::array<std::byte, 64>;

struct IpcMemory {
  IpcHandle handle{};
  std::uint64_t allocation_bytes = 0;  // Of the whole allocation, which is what OpenIpc opens.
  std::uint64_t offset_bytes = 0;      // Of the memory that was asked about.
};

// A point in a stream's work.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Whether the work before the last Record has ended; true before the first.
  virtual bool Done() = 0;
  // Waits for it.
  virtual absl::Status Synchronize() = 0;
};

class DeviceStream {
 public:
  // Waits for what was enqueued.
  virtual ~DeviceStream() = default;

  // Between any two places, host or device. The ranges must not overlap.
  virtual absl::Status Copy(void* to, const void* from, std::size_t bytes) = 0;

  // As the kernels of the same name. `results[i]` is written when tiles[i] is done.
  virtual absl::Status Encode(const TileFormat& format, Frame frame, const EncodeArgs* tiles,
                              std::size_t tile_count, EncodeResult* results) = 0;
  virtual absl::Status Decode(const TileFormat& format, Frame frame, const DecodeArgs* tiles,
                              std::size_t tile_count) = 0;
  // The lists of `args` lie in device memory; their lengths, and args.shape, are read now.
  // `workspace` has Device::AttendWorkspaceBytes bytes of device memory, zeroed before its first
  // use, and serves one Attend at a time.
  virtual absl::Status Attend(const AttentionArgs& args, std::uint32_t worker_count,
                              std::byte* workspace) = 0;
  virtual absl::Status CheckGenerations(const GenerationCheck* checks, std::size_t check_count,
                                        std::uint32_t* changed) = 0;

  // The event is this point of this stream, from now on.
  virtual absl::Status Record(DeviceEvent& event) = 0;
  // What is enqueued after this runs after what was recorded into `event` before this call. The
  // event may be of another stream of the same device.
  virtual absl::Status Wait(DeviceEvent& event) = 0;

  // Calls `done` exactly once, on a thread of the device's, when everything before it has ended:
  // with OK, or with the error that the stream has by then. `done` must be quick and must not call
  // the device. Not called when this returns an error. What is enqueued afterwards need not wait
  // for it.
  virtual absl::Status Call(std::function<void(absl::Status)> done) = 0;

  // Waits until everything has ended.
  virtual absl::Status Synchronize() = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;

  // Memory that can be handed to another process. Rounded up to 2 MiB. RESOURCE_EXHAUSTED naming
  // bytes and what is free. `name` is for people who look at the process's maps.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(std::size_t bytes,
                                                                 absl::string_view name) = 0;
  // Maps memory that another process allocated on the same device, to read only. `fd` stays the
  // caller's. INVALID_ARGUMENT when it is none, or not of that size.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(int fd, std::size_t bytes) = 0;

  // Engines' own memory, which was not made by Allocate but by what this kind of device has for
  // everybody: on a GPU cudaMalloc. (Where the host stands in for a GPU, Allocate is that.)
  //
  // Exports all of the allocation that holds these bytes. The engine keeps it until every opening
  // of it was closed. INVALID_ARGUMENT when they lie in no such allocation, or reach beyond it.
  virtual absl::StatusOr<IpcMemory> ExportIpc(const void* start, std::size_t bytes) = 0;
  // Opens an allocation of another process on the same device, to read only; bytes() is its size.
  // Closed with the object; the same one may be open several times. INVALID_ARGUMENT: the handle
  // names no memory of this device, or an allocation that has not `allocation_bytes`;
  // FAILED_PRECONDITION: one of this process, which needs no opening. The message says what the
  // device said. With an `owner` that is not 0: PERMISSION_DENIED when the memory is another
  // process's, where info().knows_ipc_owner; the caller sees to it that this process has not ended,
  // and its number come to another one.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenIpc(const IpcHandle& handle,
                                                                std::size_t allocation_bytes,
                                                                pid_t owner) = 0;

  // Makes host memory known to the device, so that copies do not go through a staging buffer and
  // kernels may read it. RESOURCE_EXHAUSTED naming bytes and the limit. Must be undone before the
  // memory goes.
  virtual absl::Status Pin(absl::Span<std::byte> memory) = 0;
  // The same for memory that the device shall only read, such as what this process has mapped to
  // read only. FAILED_PRECONDITION where the device cannot reach memory in that way.
  virtual absl::Status PinToRead(absl::Span<const std::byte> memory) = 0;
  virtual void Unpin(absl::Span<const std::byte> memory) = 0;  // Of either.

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() = 0;

  // For calls of this shape with up to this many sequences and rows (queries of all sequences).
  virtual std::size_t AttendWorkspaceBytes(const AttentionShape& shape, std::size_t sequence_count,
                                           std::size_t row_count,
                                           std::uint32_t worker_count) const = 0;
};

// `name` is "auto" (the first GPU that answers, else the host), "host", or "cuda:N".
// UNAVAILABLE saying what is missing (the driver, the device, CUDA in this build) for "cuda:N";
// INVALID_ARGUMENT for anything else.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view name);

// A host device for its own sake: what OpenDevice("host") makes, and a second one that stands in
// for a GPU in tests. A stream's queue holds `queue_max` pieces of work.
std::unique_ptr<Device> MakeHostDevice(std::size_t queue_max = 1024);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_DEVICE_H_
