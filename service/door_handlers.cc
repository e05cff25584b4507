#include "service/door_handlers.h"

namespace kvmill {

LocalDoor::Handlers MakeDoorHandlers(SessionTable& sessions, DoorMemory& memory,
                                     DataPlane* data_plane) {
  LocalDoor::Handlers handlers;
  handlers.entered = [&sessions](DoorClientId client) { sessions.ClientEntered(client); };
  handlers.left = [&sessions, data_plane](DoorClientId client) {
    sessions.ClientLeft(client);
    if (data_plane != nullptr) data_plane->CallerLeft(client);
  };
  handlers.arena = [&memory](DoorClientId client, const DoorArenaRequest& request) {
    return memory.ArenaFor(client, request);
  };
  handlers.region = [&memory](const DoorPeer& peer, const DoorRegion& region, int fd) {
    return memory.TakeRegion(peer, region, fd);
  };
  handlers.device_region = [&memory](const DoorPeer& peer, const DoorDeviceRegion& region) {
    return memory.TakeDeviceRegion(peer, region);
  };
  return handlers;
}

}  // namespace kvmill
