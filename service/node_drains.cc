#include "service/node_drains.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/channel_args.h"
#include "client/request_metadata.h"
#include "client/server_address.h"
#include "client/tls/tls_credentials.h"
#include "kvmill/v1/admin.grpc.pb.h"
#include "service/cluster/registration.h"
#include "service/cluster_node.h"
#include "storage/core/quoted.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

constexpr std::chrono::milliseconds kTellEvery{500};
constexpr std::chrono::milliseconds kLookEvery{50};
constexpr std::size_t kNamesMax = 16;
constexpr std::size_t kMessageBytesOfNode = 512;  // Of its errors, in ours.

// The nodes that there are, for who named another one.
std::string NamesOf(const MembershipSnapshot& snapshot) {
  std::vector<std::string> names;
  for (const Member& member : snapshot.members) {
    if (names.size() == kNamesMax) break;
    names.push_back(Quoted(member.id));
  }
  if (names.empty()) return "none that this one knows of yet";
  const std::size_t more = snapshot.members.size() - names.size();
  return absl::StrCat(absl::StrJoin(names, ", "),
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"));
}

std::unique_ptr<v1::Admin::Stub> AdminOf(const Member& member, const TlsFiles& tls) {
  constexpr ReconnectMs kReconnect{.first = 100, .last = 1000, .connect = 3000};
  grpc::ChannelArguments arguments;
  for (const auto& [name, value] : MemberChannelArgs(kReconnect)) arguments.SetInt(name, value);
  TlsFiles of_member = tls;
  // The node's certificate is the same at both of its addresses, and names the one it advertises.
  if (of_member.server_name.empty()) {
    if (const auto address = ParseHostPort(member.address); address.ok()) {
      of_member.server_name = address->host;
    }
  }
  if (tls.enabled()) SetTlsArguments(of_member, &arguments);
  return v1::Admin::NewStub(grpc::CreateCustomChannel(absl::StrCat("dns:///", member.admin_address),
                                                      ChannelCredentialsOf(tls), arguments));
}

absl::Status StatusOfNode(const Member& member, bool answered, const grpc::Status& status) {
  const std::string what = status.error_message().substr(0, kMessageBytesOfNode);
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    // Not UNAVAILABLE, which would be this daemon.
    return absl::AbortedError(absl::StrCat(
        "node \"", member.id, "\"", answered ? " was lost while it drained" : " cannot be reached",
        " at its --admin ", member.admin_address, ": ", what));
  }
  if (status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
      status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
      status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {  // Of this node, not of who called.
    return absl::FailedPreconditionError(absl::StrCat("node \"", member.id, "\" at its --admin ",
                                                      member.admin_address,
                                                      " refused this node: ", what));
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), what);
}

}  // namespace

std::string NodeDrains::own_id() const {
  const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
  return cluster == nullptr ? own_id_ : cluster->node_id();
}

absl::Status NodeDrains::Drain(grpc::ServerContext& call, const v1::DrainNodeRequest& request,
                               Writer& progress) {
  const std::string self = own_id();
  if (!request.incarnation().empty()) {
    if (request.node() == self && request.incarnation() == context_.boot_id) {
      return DrainSelf(call, progress);
    }
    return absl::AbortedError(absl::StrCat(
        "node ", Quoted(request.node()),
        " is not, or no longer, the process that answers at its --admin: this is node \"", self,
        "\""));
  }
  const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
  if (request.node() == self) {
    if (cluster != nullptr && cluster->snapshot()->registration == Registrar::State::kRefused) {
      return absl::FailedPreconditionError(
          absl::StrCat("node \"", self,
                       "\" is another process than this one, which was refused: "
                       "end this one by SIGTERM, and ask another node to drain that one"));
    }
    return DrainSelf(call, progress);
  }
  KVMILL_ASSIGN_OR_RETURN(const Member member, Find(request.node()));
  struct Count {
    std::atomic<std::uint32_t>& count;
    ~Count() { count.fetch_sub(1, std::memory_order_relaxed); }
  };
  const std::uint32_t running = passed_on_.fetch_add(1, std::memory_order_relaxed);
  const Count counted{passed_on_};
  if (running >= kPassedOnMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(running, " drains of other nodes are watched here, at most ", kPassedOnMax,
                     ": ask another node, or later"));
  }
  return PassOn(call, member, progress);
}

absl::Status NodeDrains::DrainSelf(grpc::ServerContext& call, Writer& progress) {
  const auto now = [this] {
    const Leaving::State state = leaving_.state();
    v1::DrainProgress to;
    to.set_phase(state.phase == Leaving::Phase::kEnding ? v1::DRAIN_PHASE_ENDING
                                                        : v1::DRAIN_PHASE_HANDING_OVER);
    to.set_blocks(state.blocks);
    to.set_blocks_left(state.blocks_left);
    to.set_blocks_left_out(state.blocks_left_out);
    to.set_alone(state.alone);
    const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
    if (state.phase != Leaving::Phase::kEnding && cluster != nullptr) {
      const ClusterBlocks::CopyStats stats = cluster->blocks().copy_stats();
      to.set_blocks(stats.handed_over_blocks);
      to.set_blocks_left(stats.handing_over_blocks);
    }
    return to;
  };
  if (!leaving_.Ask()) {
    const v1::DrainProgress is = now();
    return absl::FailedPreconditionError(
        absl::StrCat("node \"", own_id(), "\" drains already: ", is.blocks(),
                     " of its blocks are on other nodes, ", is.blocks_left(), " are not yet"));
  }
  for (;;) {
    const v1::DrainProgress is = now();
    // Whoever asked may have gone; the drain goes on.
    if (!progress.Write(is) || call.IsCancelled() || is.phase() == v1::DRAIN_PHASE_ENDING) {
      return absl::OkStatus();
    }
    leaving_.WaitWhile(Leaving::Phase::kHandingOver, kTellEvery);
  }
}

absl::StatusOr<Member> NodeDrains::Find(const std::string& id) const {
  const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
  if (cluster == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        "no node ", Quoted(id), " here: this daemon is alone (--cluster none), and is called \"",
        own_id_, "\""));
  }
  const std::shared_ptr<const MembershipSnapshot> snapshot = cluster->snapshot();
  const auto& members = snapshot->members;
  const auto found = std::find_if(members.begin(), members.end(),
                                  [&id](const Member& member) { return member.id == id; });
  if (found == members.end()) {
    return absl::NotFoundError(
        absl::StrCat("no node ", Quoted(id), " in the cluster: it has ", NamesOf(*snapshot)));
  }
  if (found->admin_address.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "node \"", id,
        "\" has no --admin that other nodes reach: on its host run kvmill cluster drain ", id,
        " with --server unix:SOCKET, or send SIGTERM to its kvmilld"));
  }
  return *found;
}

absl::Status NodeDrains::LeavesItself(const Member& member) const {
  return absl::AbortedError(absl::StrCat("node \"", own_id(),
                                         "\", which was asked, drains, too; node \"", member.id,
                                         "\" goes on without it"));
}

absl::Status NodeDrains::PassOn(grpc::ServerContext& call, const Member& member,
                                Writer& progress) const {
  const std::unique_ptr<v1::Admin::Stub> admin = AdminOf(member, tls_);
  // With the caller's deadline, and cancelled with its call.
  const std::unique_ptr<grpc::ClientContext> context = grpc::ClientContext::FromServerContext(call);
  AddRequest(CurrentRequest(), context.get());
  v1::DrainNodeRequest request;
  request.set_node(member.id);
  request.set_incarnation(member.incarnation);
  const auto reader = admin->DrainNode(context.get(), request);
  v1::DrainProgress last;
  bool answered = false;
  bool leaving = false;
  while (reader->Read(&last)) {
    answered = true;
    leaving = leaving_.state().phase == Leaving::Phase::kEnding;  // It speaks often enough.
    if (leaving || !progress.Write(last)) context->TryCancel();
  }
  const grpc::Status status = reader->Finish();
  if (leaving) return LeavesItself(member);
  if (!status.ok()) return StatusOfNode(member, answered, status);
  return Watch(call, member, last, progress);
}

absl::Status NodeDrains::Watch(grpc::ServerContext& call, const Member& member,
                               v1::DrainProgress last, Writer& progress) const {
  const ClusterNode* const cluster = context_.cluster.load(std::memory_order_acquire);
  auto tell = std::chrono::steady_clock::now() + kTellEvery;
  for (;;) {
    const std::shared_ptr<const MembershipSnapshot> snapshot = cluster->snapshot();
    const bool there = std::any_of(
        snapshot->members.begin(), snapshot->members.end(), [&member](const Member& other) {
          return other.id == member.id && other.incarnation == member.incarnation;
        });
    if (!there) last.set_phase(v1::DRAIN_PHASE_LEFT);
    if (!there || std::chrono::steady_clock::now() >= tell) {
      tell = std::chrono::steady_clock::now() + kTellEvery;
      if (!progress.Write(last) || !there) return absl::OkStatus();
    }
    if (call.IsCancelled()) return absl::CancelledError("nobody waits any more; the node drains");
    if (leaving_.state().phase == Leaving::Phase::kEnding) {
      return LeavesItself(member);
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

}  // namespace kvmill
