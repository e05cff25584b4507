// Client: calls about a daemon's configuration and the cluster that it is in.
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/client_impl.h"
#include "client/server_stream.h"

namespace kvmill {
namespace {

ClusterMember MemberFromProto(const v1::ClusterMember& member) {
  return {member.id(),
          absl::BytesToHexString(member.incarnation()),
          member.address(),
          member.zone(),
          member.capacity_bytes(),
          member.draining(),
          member.admin_address()};
}

BlockPlaces PlacesFromProto(const v1::WhereReply& reply) {
  BlockPlaces places;
  for (const v1::ClusterMember& home : reply.homes()) {
    places.homes.push_back(MemberFromProto(home));
  }
  for (const v1::BlockHolder& holder : reply.holders()) {
    places.holders.push_back({MemberFromProto(holder.member()), holder.told()});
  }
  return places;
}

ClusterStatus ClusterFromProto(const v1::ClusterReply& reply) {
  ClusterStatus status;
  status.node_id = reply.node_id();
  switch (reply.registration()) {
    case v1::REGISTRATION_NONE:
      status.registration = "none";
      break;
    case v1::REGISTRATION_JOINING:
      status.registration = "joining";
      break;
    case v1::REGISTRATION_REGISTERED:
      status.registration = "registered";
      break;
    case v1::REGISTRATION_REFUSED:
      status.registration = "refused";
      break;
    case v1::REGISTRATION_LEFT:
      status.registration = "left";
      break;
    default:
      status.registration = "unknown";  // Of a newer daemon.
      break;
  }
  for (const v1::ClusterMember& member : reply.members()) {
    status.members.push_back(MemberFromProto(member));
  }
  status.version = reply.version();
  status.stale = reply.stale();
  status.keeping = reply.keeping();
  status.problem = reply.problem();
  return status;
}

DaemonConfig ConfigFromProto(const v1::ConfigReply& reply) {
  DaemonConfig config;
  config.file = reply.file();
  for (const v1::ConfigOption& option : reply.options()) {
    DaemonConfig::Option& to = config.options.emplace_back();
    to.name = option.name();
    to.value = option.value();
    to.source = option.source() == v1::CONFIG_SOURCE_DEFAULT ? "default"
                : option.source() == v1::CONFIG_SOURCE_FILE  ? "file"
                : option.source() == v1::CONFIG_SOURCE_FLAG  ? "flag"
                                                             : "unknown";  // Of a newer daemon.
    to.default_value = option.default_value();
    to.reloadable = option.reloadable();
    if (option.has_pending()) to.pending = option.pending();
  }
  config.loaded = absl::FromUnixMillis(reply.loaded_unix_ms());
  config.reloads_applied = reply.reloads_applied();
  config.reloads_refused = reply.reloads_refused();
  config.problem = reply.problem();
  return config;
}

// Watches a node that drains.
class DrainStream final : public ServerStream<v1::DrainProgress> {
 public:
  DrainStream(Connection& connection, absl::string_view node,
              std::function<void(const NodeDrain&)> progress, Client::Done<NodeDrain> done)
      : ServerStream(connection), progress_(std::move(progress)), done_(std::move(done)) {
    request_.set_node(std::string(node));
  }

 private:
  Reader Prepare(Channel& channel, grpc::ClientContext* context,
                 grpc::CompletionQueue* queue) override {
    return channel.admin->PrepareAsyncDrainNode(context, request_, queue);
  }
  absl::StatusOr<bool> Take(const v1::DrainProgress& is) override {
    switch (is.phase()) {
      case v1::DRAIN_PHASE_ENDING:
        drain_.phase = NodeDrain::Phase::kEnding;
        break;
      case v1::DRAIN_PHASE_LEFT:
        drain_.phase = NodeDrain::Phase::kLeft;
        break;
      default:  // Of later versions: it is on its way.
        drain_.phase = NodeDrain::Phase::kHandingOver;
    }
    drain_.blocks = is.blocks();
    drain_.blocks_left = is.blocks_left();
    drain_.blocks_left_out = is.blocks_left_out();
    drain_.alone = is.alone();
    if (progress_ != nullptr) progress_(drain_);
    return true;
  }
  void Ended(const absl::Status& status) override {
    if (status.ok()) {
      done_(drain_);
    } else {
      done_(status);
    }
  }

  v1::DrainNodeRequest request_;
  NodeDrain drain_;
  const std::function<void(const NodeDrain&)> progress_;
  const Client::Done<NodeDrain> done_;
};

}  // namespace

void Client::ClusterAsync(CallOptions call, Done<ClusterStatus> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::ClusterReply, ClusterStatus>(
      impl_->DeadlineOf(call),
      [request = v1::ClusterRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncCluster(context, request, queue);
      },
      &ClusterFromProto, std::move(done));
}

void Client::ConfigurationAsync(CallOptions call, Done<DaemonConfig> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  impl_->Call<v1::ConfigReply, DaemonConfig>(
      impl_->DeadlineOf(call),
      [request = v1::ConfigRequest()](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncConfig(context, request, queue);
      },
      &ConfigFromProto, std::move(done));
}

void Client::WhereAsync(absl::string_view ns_name, const BlockKey& key, const BlockKey& anchor,
                        std::uint32_t place, CallOptions call, Done<BlockPlaces> done,
                        absl::string_view tenant) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  v1::WhereRequest request;
  request.mutable_namespace_()->set_name(std::string(ns_name));
  request.set_key(std::string(key.view()));
  request.set_anchor(std::string(anchor.view()));
  request.set_place(place);
  request.set_tenant(std::string(tenant));
  impl_->Call<v1::WhereReply, BlockPlaces>(
      impl_->DeadlineOf(call),
      [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
        return channel.admin->PrepareAsyncWhere(context, request, queue);
      },
      &PlacesFromProto, std::move(done));
}

void Client::DrainNodeAsync(absl::string_view node, std::function<void(const NodeDrain&)> progress,
                            CallOptions call, Done<NodeDrain> done) {
  if (absl::Status s = impl_->CheckProcess(); !s.ok()) return done(s);
  // Deletes itself after `done`.
  (new DrainStream(impl_->connection(), node, std::move(progress), std::move(done)))
      ->Start(impl_->DeadlineOf(call));
}

}  // namespace kvmill
