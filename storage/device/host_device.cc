#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/simd.h"
#include "storage/core/check.h"
#include "storage/core/status_macros.h"
#include "storage/device/device.h"
#include "storage/device/enqueue_checks.h"
#include "storage/device/host_ipc.h"
#include "storage/device/host_memory.h"
#include "storage/device/host_stream.h"

namespace kvmill {
namespace {

std::uint64_t MachineBytes() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

class HostDevice : public Device {
 public:
  explicit HostDevice(std::size_t queue_max)
      : queue_max_(queue_max),
        cores_(std::max(1u, std::thread::hardware_concurrency())),
        state_(cores_ - 1) {
    KVMILL_CHECK(queue_max > 0);
    info_.kind = DeviceKind::kHost;
    info_.name = "host";
    info_.description =
        absl::StrCat(cores_, cores_ == 1 ? " core, " : " cores, ", std::string(CpuSimdName()));
    info_.memory_bytes = MachineBytes();
    info_.host_accessible = true;
    info_.knows_ipc_owner = true;
    info_.attention_workers = cores_;
  }

  ~HostDevice() override {
    KVMILL_CHECK(state_.alive == 0);     // Streams and events.
    KVMILL_CHECK(state_.known.empty());  // Memory, and what is pinned.
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(std::size_t bytes,
                                                         absl::string_view name) override {
    return HostMemory::Allocate(bytes, name, &state_.known);
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Import(int fd, std::size_t bytes) override {
    return HostMemory::Import(fd, bytes, &state_.known);
  }

  absl::StatusOr<IpcMemory> ExportIpc(const void* start, std::size_t bytes) override {
    return ExportHostIpc(state_.known.Look(), start, bytes);
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenIpc(const IpcHandle& handle,
                                                        std::size_t allocation_bytes,
                                                        pid_t owner) override {
    return OpenHostIpc(handle, allocation_bytes, owner, &state_.known);
  }

  // Nothing to do for the machine; but what was not pinned is found, see known_memory.h.
  absl::Status Pin(absl::Span<std::byte> memory) override {
    KVMILL_RETURN_IF_ERROR(CheckMapped(info_.name, memory));
    return state_.known.Add(memory.data(), memory.size(), MemoryUse::kPinned);
  }

  absl::Status PinToRead(absl::Span<const std::byte> memory) override {
    KVMILL_RETURN_IF_ERROR(CheckMapped(info_.name, memory));
    return state_.known.Add(memory.data(), memory.size(), MemoryUse::kPinnedToRead);
  }

  void Unpin(absl::Span<const std::byte> memory) override {
    KVMILL_CHECK(IsMapped(memory));  // Pinned memory went before it was unpinned.
    KVMILL_CHECK(state_.known.RemovePinned(memory.data(), memory.size()));
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    return std::make_unique<HostStream>(&state_, queue_max_);
  }

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return std::make_unique<HostEvent>(&state_);
  }

  std::size_t AttendWorkspaceBytes(const AttentionShape&, std::size_t, std::size_t,
                                   std::uint32_t) const override {
    return kHostAttendWorkspaceBytes;
  }

 private:
  const std::size_t queue_max_;
  const unsigned cores_;
  HostDeviceState state_;
  DeviceInfo info_;
};

}  // namespace

std::unique_ptr<Device> MakeHostDevice(std::size_t queue_max) {
  return std::make_unique<HostDevice>(queue_max);
}

}  // namespace kvmill
