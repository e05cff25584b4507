// What a daemon does about those who come through the local door: it joins the door to sessions,
// memory and the data plane.
//
// For node.cc. The handlers run on the door's thread and must not wait (local_door.h).
#ifndef KVMILL_SERVICE_DOOR_HANDLERS_H_
#define KVMILL_SERVICE_DOOR_HANDLERS_H_

#include "service/data_plane.h"
#include "service/door_memory.h"
#include "service/local_door.h"
#include "service/session_table.h"

namespace kvmill {

// All outlive the door's Stop. `data_plane` is null without --ucx.
LocalDoor::Handlers MakeDoorHandlers(SessionTable& sessions, DoorMemory& memory,
                                     DataPlane* data_plane);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_DOOR_HANDLERS_H_
