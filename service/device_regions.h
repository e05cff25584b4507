// Engines' memory on the daemon's GPU: opened by the handle that an engine sent through the door,
// and encoded from there on streams of the GPU.
//
// Whose memory it is. A handle is a capability: who has it can open the memory, and what the daemon
// opens for a client that client can have stored, and then read. So the daemon opens for a process
// its own memory only. Where the device knows the owner (host memory that stands in for a GPU) it
// is compared with the process that the kernel says is behind the door. CUDA does not tell:
// therefore only the daemon's own user and root come in there, who may read everybody's blocks
// anyway. They also must be trusted to keep the memory while it is open: CUDA does not define what
// happens otherwise.
//
// Thread-safe. What is opened keeps no reference: this outlives all of it.
#ifndef KVMILL_SERVICE_DEVICE_REGIONS_H_
#define KVMILL_SERVICE_DEVICE_REGIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/door_protocol.h"
#include "service/engine_memory.h"
#include "service/local_door.h"
#include "storage/core/mutex.h"
#include "storage/device/device.h"
#include "storage/device_encoder.h"

namespace kvmill {

class DeviceRegions {
 public:
  // `gpu` outlives it; as many chunks as there are lanes are encoded at once. `own_uid`: the
  // daemon's. Takes nothing of the GPU before the first region comes.
  DeviceRegions(Device& gpu, std::size_t lane_count, uid_t own_uid)
      : gpu_(gpu), lane_count_(lane_count), own_uid_(own_uid) {}

  // The region of `memory`, which is the registration's. An allocation is opened once for all
  // regions of a registration. PERMISSION_DENIED: the memory is not, or not known to be, the
  // peer's; FAILED_PRECONDITION: it is on another GPU; INVALID_ARGUMENT: the handle names no memory
  // that is there, or less than was said.
  absl::StatusOr<std::unique_ptr<const SharedRegion>> Open(const DoorPeer& peer,
                                                           const DoorDeviceRegion& region,
                                                           const EngineMemory& memory);

 private:
  absl::Status CheckPeer(const DoorPeer& peer) const;
  absl::StatusOr<DeviceEncoder*> Encoder();

  Device& gpu_;
  const std::size_t lane_count_;
  const uid_t own_uid_;
  Mutex mu_;
  std::unique_ptr<DeviceEncoder> encoder_ ABSL_GUARDED_BY(mu_);  // Null before the first region.
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DEVICE_REGIONS_H_
