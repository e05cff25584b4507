// What HostDevice has for CUDA's inter-process handles: the handle names a process and a descriptor
// of its, which whoever may look into that process can open.
//
// Internal to storage/device. Thread-safe.
#ifndef KVMILL_STORAGE_DEVICE_HOST_IPC_H_
#define KVMILL_STORAGE_DEVICE_HOST_IPC_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "storage/device/device.h"
#include "storage/device/known_memory.h"

namespace kvmill {

absl::StatusOr<IpcMemory> ExportHostIpc(const KnownMemory::View& known, const void* start,
                                        std::size_t bytes);
absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenHostIpc(const IpcHandle& handle,
                                                          std::size_t allocation_bytes, pid_t owner,
                                                          KnownMemory* known);

}  // namespace kvmill

#endif  // KVMILL_STORAGE_DEVICE_HOST_IPC_H_
