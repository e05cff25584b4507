#include "service/etcd/etcd_servers.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel_args.h"
#include "client/tls/tls_credentials.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// Answers are lists of members: 100,000 of them would fit.
constexpr int kAnswerBytesMax = 64 << 20;

grpc::ChannelArguments ChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kAnswerBytesMax);
  for (const auto& [name, value] : MemberChannelArgs({})) arguments.SetInt(name, value);
  return arguments;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EtcdServers>> EtcdServers::Create(const EtcdOptions& options) {
  if (options.servers.empty()) return absl::InvalidArgumentError("etcd: no server is named");
  KVMILL_RETURN_IF_ERROR(CheckTlsFiles(options.tls));
  const std::shared_ptr<grpc::ChannelCredentials> credentials = ChannelCredentialsOf(options.tls);
  std::unique_ptr<EtcdServers> servers(new EtcdServers);
  for (const HostPort& address : options.servers) {
    EtcdServer server;
    server.name = address.ToString();
    server.tls = options.tls.enabled();
    const std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
        absl::StrCat("dns:///", server.name), credentials, ChannelArguments());
    server.kv = etcdserverpb::KV::NewStub(channel);
    server.lease = etcdserverpb::Lease::NewStub(channel);
    server.watch = etcdserverpb::Watch::NewStub(channel);
    server.auth = etcdserverpb::Auth::NewStub(channel);
    servers->servers_.push_back(std::move(server));
  }
  return servers;
}

void EtcdServers::Answered(std::size_t index) {
  servers_[index].failed_nanos = 0;
  current_ = index;
}

void EtcdServers::Failed(std::size_t index, std::int64_t now_nanos) {
  servers_[index].failed_nanos = now_nanos;
  if (index != current_) return;
  for (std::size_t i = 1; i < servers_.size(); ++i) {
    const std::size_t other = (index + i) % servers_.size();
    if (servers_[other].failed_nanos < servers_[current_].failed_nanos) current_ = other;
  }
}

}  // namespace kvmill
