// Memory that passes through the local door: arenas on their way to clients that have leases in
// them, clients' regions on their way to the sessions that registered them.
#ifndef KVMILL_SERVICE_DOOR_MEMORY_H_
#define KVMILL_SERVICE_DOOR_MEMORY_H_

#include <sys/types.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/door_protocol.h"
#include "service/local_door.h"
#include "service/session_table.h"
#include "storage/tiered_store.h"

namespace kvmill {

class DeviceRegions;

// Called on the door's thread.
class DoorMemory {
 public:
  // All outlive it. `device_regions` is null without a GPU; then refusals name `device_name`.
  DoorMemory(TieredStore& store, SessionTable& sessions, DeviceRegions* device_regions,
             std::string device_name, uid_t own_uid)
      : store_(store),
        sessions_(sessions),
        device_regions_(device_regions),
        device_name_(std::move(device_name)),
        own_uid_(own_uid) {}

  // Descriptors of an arena in which the client has the lease that it names. ABORTED: it has no
  // such lease; NOT_FOUND: no page of the lease is in that arena and epoch.
  absl::StatusOr<DoorClient::ArenaMemory> ArenaFor(DoorClientId client,
                                                   const DoorArenaRequest& request);
  // Maps the memory behind `fd` for the registration. Borrows `fd`; -1: none came with the message.
  // INVALID_ARGUMENT for memory that may not be shared so, NOT_FOUND for an unknown registration.
  absl::Status TakeRegion(const DoorPeer& peer, const DoorRegion& region, int fd);
  // The same with memory of a GPU. FAILED_PRECONDITION: there is none here.
  absl::Status TakeDeviceRegion(const DoorPeer& peer, const DoorDeviceRegion& region);

 private:
  TieredStore& store_;
  SessionTable& sessions_;
  DeviceRegions* const device_regions_;
  const std::string device_name_;
  const uid_t own_uid_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DOOR_MEMORY_H_
