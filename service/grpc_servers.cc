#include "service/grpc_servers.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "client/channel_args.h"
#include "client/server_address.h"
#include "service/service_context.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr int kGrpcThreadsMax = 32;  // For calls that block (Lookup, Flush, UnregisterMemory, ...).
constexpr int kStreamsPerConnection = 128;
constexpr int kHandshakeMs = 10'000;

void SetCommonArguments(grpc::ServerBuilder& builder) {
  for (const auto& [name, value] : BulkChannelArgs()) builder.AddChannelArgument(name, value);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  // Clients ping every kKeepaliveMs while a call waits.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kKeepaliveMs / 2);
  // Whoever connects and then says nothing, or stops, is hung up on: it holds a descriptor. Before
  // the handshakes of TLS and HTTP/2 are over as well, for which gRPC would give two minutes.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A taken port is an error, not a port shared with a stranger.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMessageBytesMax));
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  grpc::ResourceQuota quota("kvmilld");
  quota.SetMaxThreads(kGrpcThreadsMax);
  builder.SetResourceQuota(quota);
}

}  // namespace

void GrpcServer::SetNotServing() const {
  if (server != nullptr && server->GetHealthCheckService() != nullptr) {
    server->GetHealthCheckService()->SetServingStatus(false);
  }
}

void EnableHealthAndReflection() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
}

absl::StatusOr<GrpcServer> StartGrpcServer(
    absl::string_view option, const std::string& listen,
    const std::shared_ptr<grpc::ServerCredentials>& credentials,
    absl::Span<grpc::Service* const> services) {
  grpc::ServerBuilder builder;
  SetCommonArguments(builder);
  for (grpc::Service* const service : services) builder.RegisterService(service);
  int port = 0;
  HostPort address;
  if (!listen.empty()) {
    KVMILL_ASSIGN_OR_RETURN(address, ParseHostPort(listen));
    builder.AddListeningPort(listen, credentials, &port);
  }
  GrpcServer started;
  started.server = builder.BuildAndStart();
  if (started.server == nullptr || (!listen.empty() && port <= 0)) {
    return absl::UnavailableError(absl::StrCat(option, " ", listen, ": cannot listen there"));
  }
  if (!listen.empty()) {
    address.port = static_cast<std::uint16_t>(port);
    started.address = address.ToString();
  }
  return started;
}

}  // namespace kvmill
