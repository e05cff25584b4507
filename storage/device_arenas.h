// The memory under a page pool that lies in a device's memory: one piece of it an arena.
//
// What slots hold lies there; their generations do not, since the CPU writes them: those are in
// host memory (storage/arena_memory.h), the first extent of every arena. So an arena's memory here
// begins with its second extent.
//
// Internal to storage/. Thread-safe as ArenaMemory: Renew() of an arena while nobody uses it.
#ifndef KVMILL_STORAGE_DEVICE_ARENAS_H_
#define KVMILL_STORAGE_DEVICE_ARENAS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/device/device.h"

namespace kvmill {

class DeviceArenas {
 public:
  // `device` outlives it. `arena_bytes` as the pool counts them, generations included.
  // RESOURCE_EXHAUSTED naming sizes when the device has not so much.
  static absl::StatusOr<std::unique_ptr<DeviceArenas>> Create(Device& device,
                                                              std::uint32_t arena_count,
                                                              std::size_t arena_bytes);

  // Of the arena's second extent; as the device and its streams know it. Changes with Renew.
  std::byte* address(std::uint32_t arena) const { return memories_[arena]->address(); }
  // For Device::Import in another process. Borrowed, valid until Renew(arena).
  int fd(std::uint32_t arena) const { return memories_[arena]->fd(); }

  // Gives the arena's memory back to the device and takes fresh, zeroed memory. Whoever mapped the
  // old memory keeps it and sees nothing of the new. RESOURCE_EXHAUSTED when there is none: then
  // the arena has no memory and must not be used until a later Renew succeeds.
  absl::Status Renew(std::uint32_t arena);

 private:
  DeviceArenas(Device& device, std::uint32_t arena_count, std::size_t arena_bytes)
      : device_(device), memory_bytes_(arena_bytes), memories_(arena_count) {}

  Device& device_;
  const std::size_t memory_bytes_;  // Of one arena.
  std::vector<std::unique_ptr<DeviceMemory>> memories_;
};

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_ARENAS_H_
