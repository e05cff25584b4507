#include "storage/device_arenas.h"

#include "absl/strings/str_cat.h"
#include "storage/page_pool.h"

namespace kvmill {

absl::StatusOr<std::unique_ptr<DeviceArenas>> DeviceArenas::Create(Device& device,
                                                                   std::uint32_t arena_count,
                                                                   std::size_t arena_bytes) {
  std::unique_ptr<DeviceArenas> arenas(
      new DeviceArenas(device, arena_count, arena_bytes - kExtentBytes));
  for (std::uint32_t arena = 0; arena < arena_count; ++arena) {
    const absl::Status status = arenas->Renew(arena);
    if (status.ok()) continue;
    return absl::Status(status.code(),
                        absl::StrCat("page pool of ", arena_count * std::uint64_t{arena_bytes},
                                     " bytes on device ", device.info().name, ", arena ", arena + 1,
                                     " of ", arena_count, ": ", status.message()));
  }
  return arenas;
}

absl::Status DeviceArenas::Renew(std::uint32_t arena) {
  memories_[arena] = nullptr;  // First: at no time may the pool hold more than its budget.
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      device_.Allocate(memory_bytes_, "kvmill-arena");
  if (memory.ok()) memories_[arena] = *std::move(memory);
  return memory.status();
}

}  // namespace kvmill
