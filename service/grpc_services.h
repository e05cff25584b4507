// The gRPC services of a daemon, and which of its servers has which.
//
// For node.cc, which starts the servers (grpc_servers.h). A new service is added here, and to the
// table of who may call what in docs/architecture.md: every service of main() can be reached over
// TCP, and asks itself who calls.
#ifndef KVMILL_SERVICE_GRPC_SERVICES_H_
#define KVMILL_SERVICE_GRPC_SERVICES_H_

#include <grpcpp/server.h>
#include <sys/types.h>

#include <functional>
#include <vector>

#include "service/admin_service.h"
#include "service/cache_service.h"
#include "service/data_service.h"
#include "service/engine_service.h"
#include "service/events_service.h"
#include "service/local_peers.h"
#include "service/node_drains.h"
#include "service/peer_service.h"
#include "service/service_context.h"
#include "service/ticket_service.h"

namespace kvmill {

class DataPlane;
class EventJournal;

// Outlives the servers that have its services.
class GrpcServices {
 public:
  // What it is given outlives it. `data_plane` is null without --ucx; `own_uid` is the daemon's,
  // whose processes among `peers` may call Admin on the socket; `start_drain` as AdminService has
  // it.
  GrpcServices(ServiceContext& context, EventJournal& journal, DataPlane* data_plane,
               NodeDrains& drains, const LocalPeers& peers, uid_t own_uid,
               const std::function<void()>& start_drain);

  // Of the socket and --listen; Admin only for who comes by the socket.
  std::vector<grpc::Service*> main();
  // Of --admin.
  std::vector<grpc::Service*> admin();

 private:
  CacheService cache_;
  EventsService events_;
  EngineService engine_;
  DataService data_;
  PeerService peer_;
  TicketService ticket_;
  AdminService local_admin_;
  AdminService remote_admin_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_GRPC_SERVICES_H_
