// How this daemon serves gRPC: the settings of every server it has, whoever it is for.
//
// For node.cc, which says what is served where and owns the result. Limits of connections, streams,
// threads and messages are in grpc_servers.cc: a number there may change, and holds for the socket,
// --listen and --admin alike. What clients set to match is in client/channel_args.h.
#ifndef KVMILL_SERVICE_GRPC_SERVERS_H_
#define KVMILL_SERVICE_GRPC_SERVERS_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

struct GrpcServer {
  std::unique_ptr<grpc::Server> server;  // Null: there is none.
  std::string address;                   // With its real port; empty: it has no port.

  // Whoever asks for its health is told to go elsewhere.
  void SetNotServing() const;
};

// Of all servers of this process: that they answer for their health, and say what they serve.
// Before the first of them.
void EnableHealthAndReflection();

// Serves from now on, also what is given to it as a file descriptor. `listen` is the value of
// `option`, HOST:PORT, and may be empty: then there is no port, and no use of `credentials`. The
// services outlive the server. UNAVAILABLE names option and value.
absl::StatusOr<GrpcServer> StartGrpcServer(
    absl::string_view option, const std::string& listen,
    const std::shared_ptr<grpc::ServerCredentials>& credentials,
    absl::Span<grpc::Service* const> services);

}  // namespace kvmill

#endif  // KVMILL_SERVICE_GRPC_SERVERS_H_
