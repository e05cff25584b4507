#include "service/grpc_peers.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel_args.h"
#include "client/convert.h"
#include "client/request_metadata.h"
#include "client/stub_pool.h"
#include "client/tls/tls_credentials.h"
#include "service/peer_codec.h"
#include "service/request.h"
#include "service/ticket_codec.h"
#include "storage/core/check.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

// 64 runs of 128 keys are 560 KiB; the first answer about a ticket has up to 4096 blocks of 330
// bytes.
constexpr int kAnswerBytesMax = 2 << 20;
// PeerHealth waits as well, and longer.
constexpr ReconnectMs kReconnect{.first = 50, .last = 1000, .connect = 1000};
constexpr std::size_t kMessageBytesOfPeer = 256;  // Of its errors, for ours.
constexpr std::int64_t kGreetNanos = 10'000'000'000;

grpc::ChannelArguments ChannelArguments(const TlsFiles& tls) {
  grpc::ChannelArguments arguments;
  SetTlsArguments(tls, &arguments);
  arguments.SetMaxReceiveMessageSize(kAnswerBytesMax);
  for (const auto& [name, value] : MemberChannelArgs(kReconnect)) arguments.SetInt(name, value);
  return arguments;
}

absl::Status ErrorOf(const grpc::Status& status, const std::string& peer) {
  const std::string message =
      absl::StrCat("node \"", peer, "\": ", status.error_message().substr(0, kMessageBytesOfPeer));
  // CheckMeantFor: nothing else that peers are asked is ABORTED.
  if (status.error_code() == grpc::StatusCode::ABORTED) return ReplacedError(message);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), message);
}

// Whether a peer failed, or lied; that a ticket has ended is an answer as any other.
bool IsFault(const grpc::Status& status, const absl::Status& answer) {
  if (answer.ok()) return false;
  if (!status.ok()) return status.error_code() != grpc::StatusCode::NOT_FOUND;
  return absl::IsInvalidArgument(answer) || absl::IsDataLoss(answer) || absl::IsUnknown(answer);
}

}  // namespace

struct GrpcPeers::Link {
  Link(const Member& member, const TlsFiles& tls)
      : incarnation(member.incarnation),
        address(member.address),
        stub(Connect(address, tls)),
        waiting([of = address, tls] { return Connect(of, tls); }) {}
  static std::unique_ptr<v1::Peer::Stub> Connect(const std::string& address, const TlsFiles& tls) {
    return v1::Peer::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("dns:///", address), ChannelCredentialsOf(tls), ChannelArguments(tls)));
  }
  bool IsFor(const Member& member) const {
    return incarnation == member.incarnation && address == member.address;
  }

  const std::string incarnation, address;
  const std::unique_ptr<v1::Peer::Stub> stub;
  // Other connections, for questions that the peer answers when there is something to say: lookups
  // must not wait for a stream.
  StubPool<v1::Peer::Stub> waiting;
};

GrpcPeers::GrpcPeers(Loop& loop, const Member& self, Puller puller, const TlsFiles& tls)
    : loop_(loop),
      self_(self),
      puller_(std::move(puller)),
      tls_(tls),
      inbox_(std::make_shared<LoopInbox>(loop)) {}

GrpcPeers::~GrpcPeers() {
  for (auto& [id, call] : calls_) {
    loop_.Cancel(call.timer);
    call.context->TryCancel();
  }
  calls_.clear();
  inbox_->Close();
}

GrpcPeers::LinkPtr GrpcPeers::LinkOf(const Member& member) {
  LinkPtr& link = links_[member.id];
  if (link == nullptr || !link->IsFor(member)) link = std::make_shared<Link>(member, tls_);
  return link;
}

void GrpcPeers::Keep(const ClusterView& view) {
  const auto gone = [&view](const std::string& id) { return !view.IndexOf(id).has_value(); };
  std::erase_if(links_, [&](const auto& entry) {
    const auto index = view.IndexOf(entry.first);
    return !index.has_value() || !entry.second->IsFor(view.members()[*index]);
  });
  MutexLock lock(mu_);
  std::erase_if(stats_, [&](const auto& entry) { return gone(entry.first); });
  std::erase_if(refusals_, [&](const auto& entry) { return gone(entry.first); });
  for (const Member& member : view.members()) {
    if (member.id != self_.id) stats_.try_emplace(member.id);
  }
}

std::map<std::string, GrpcPeers::PeerStats> GrpcPeers::stats() const {
  MutexLock lock(mu_);
  return stats_;
}

void GrpcPeers::Count(const std::string& peer, bool request, bool failure) {
  if (peer == self_.id) return;  // A ticket of its own: it is no peer.
  MutexLock lock(mu_);
  PeerStats& stats = stats_[peer];
  stats.requests += request;
  stats.failures += failure;
}

void GrpcPeers::NoteAnswer(const Member& member, const grpc::Status& status) {
  const bool refused = status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                       status.error_code() == grpc::StatusCode::UNAUTHENTICATED;
  if (!refused && !status.ok()) return;  // Says nothing of it.
  std::string line;
  if (refused) {
    line = absl::StrCat("node \"", member.id, "\" at ", member.address, " refuses this node: ",
                        status.error_message().substr(0, 2 * kMessageBytesOfPeer),
                        "; name this node's certificate in its --tls-peers");
  }
  bool was_refused = false;
  {
    MutexLock lock(mu_);
    was_refused = refusals_.erase(member.id) > 0;
    if (refused) refusals_[member.id] = line;
  }
  if (refused && refusals_logged_.Allows(member.id, loop_.clock().MonotonicNanos())) {
    LogWarning(absl::StrCat("cluster: ", line));
  }
  if (refused || !was_refused) return;
  refusals_logged_.Forget(member.id);
  LogInfo(absl::StrCat("cluster: node \"", member.id, "\" does not refuse this node any more"));
}

std::vector<std::string> GrpcPeers::Refusals() const {
  MutexLock lock(mu_);
  std::vector<std::string> lines;
  for (const auto& [id, line] : refusals_) lines.push_back(line);
  return lines;
}

void GrpcPeers::Greet(const Member& member) {
  if (member.id == self_.id) return;
  ListRuns(member, {}, loop_.clock().MonotonicNanos() + kGreetNanos,
           [](const absl::StatusOr<std::vector<HeldRun>>&) {});
}

bool GrpcPeers::End(CallId id, bool failed) {
  const auto node = calls_.extract(id);
  if (node.empty()) return false;
  loop_.Cancel(node.mapped().timer);
  if (failed) Count(node.mapped().peer, false, true);
  return true;
}

template <typename Reply, typename Answer, typename Request, typename Convert>
Peers::CallId GrpcPeers::Start(const Member& member, Request request, Method<Request, Reply> method,
                               std::int64_t deadline_nanos, Convert convert, Done<Answer> done,
                               bool waits) {
  // What gRPC uses while the call runs, longer than this knows of it when it came too late.
  struct State {
    LinkPtr link;
    std::shared_ptr<v1::Peer::Stub> waiting;  // Its connection's place is this call's.
    std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
    Request request;
    Reply reply;
  };
  const CallId id = next_++;
  auto state = std::make_shared<State>();
  state->link = LinkOf(member);
  state->request = std::move(request);
  state->request.set_incarnation(member.incarnation);
  const std::int64_t left = deadline_nanos - loop_.clock().MonotonicNanos();
  // The timer decides; gRPC's deadline tells the peer, and comes later.
  state->context->set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::nanoseconds(std::max<std::int64_t>(left, 0) + 10'000'000));
  // What is asked next, when the answer has come, is for the same request.
  const RequestPtr for_request = CurrentRequest();
  AddRequest(for_request, state->context.get());
  Call& call = calls_[id];
  call.peer = member.id;
  call.context = state->context;
  call.timer = loop_.At(deadline_nanos, [this, id, done, for_request, peer = member.id] {
    const ServedRequest served(for_request);
    const std::shared_ptr<grpc::ClientContext> context = calls_.at(id).context;
    End(id, true);
    context->TryCancel();
    done(absl::DeadlineExceededError(
        absl::StrCat("node \"", peer, "\": no answer by the deadline")));
  });
  Count(member.id, true, false);
  inbox_->Begin();
  if (waits) state->waiting = state->link->waiting.Get();
  v1::Peer::Stub& stub = waits ? *state->waiting : *state->link->stub;
  ((*stub.async()).*method)(
      state->context.get(), &state->request, &state->reply,
      [this, id, state, inbox = inbox_, convert = std::move(convert), done = std::move(done),
       for_request, member](const grpc::Status& status) mutable {
        // All that refers to the connection goes to the loop: it may be the last of it.
        inbox->Post([this, id, state = std::move(state), convert = std::move(convert),
                     done = std::move(done), for_request = std::move(for_request),
                     member = std::move(member), status] {
          const ServedRequest served(for_request);
          // That the ticket is another consumer's is not about nodes.
          if constexpr (!std::is_same_v<Request, v1::AcknowledgeTicketRequest>) {
            NoteAnswer(member, status);
          }
          absl::StatusOr<Answer> answer = absl::UnknownError("");
          if (status.ok()) {
            answer = convert(state->reply);
          } else {
            answer = ErrorOf(status, member.id);
          }
          if (End(id, IsFault(status, answer.status()))) done(std::move(answer));
        });
        inbox->End();
      });
  return id;
}

Peers::CallId GrpcPeers::Locate(const Member& member, const Fingerprint& fingerprint,
                                std::vector<RunQuery> queries, std::int64_t deadline_nanos,
                                Done<std::vector<RunAnswer>> done) {
  KVMILL_CHECK(!queries.empty() && queries.size() <= kQueryRunsMax);
  v1::LocateRequest request;
  request.set_fingerprint(std::string(AsBytes(fingerprint)));
  request.set_asker(self_.id);
  request.set_sketches(true);
  ToProto(queries, &request);
  return Start<v1::LocateReply>(
      member, std::move(request), &Async::Locate, deadline_nanos,
      [](const v1::LocateReply& reply) -> absl::StatusOr<std::vector<RunAnswer>> {
        return FromProto(reply);
      },
      std::move(done));
}

Peers::CallId GrpcPeers::Pull(const Member& member, const Fingerprint& fingerprint, RunKeys blocks,
                              std::int64_t deadline_nanos, Done<std::vector<absl::Status>> done) {
  KVMILL_CHECK(!blocks.keys.empty() && blocks.keys.size() <= kRunBlocks);
  const CallId id = next_++;
  puller_.pull(id, member, fingerprint, std::move(blocks), deadline_nanos, std::move(done));
  return id;
}

Peers::CallId GrpcPeers::Announce(const Member& member, std::vector<Announcement> announcements,
                                  std::int64_t deadline_nanos,
                                  std::function<void(absl::Status)> done) {
  KVMILL_CHECK(announcements.size() <= kAnnouncementsMax);
  v1::AnnounceRequest request;
  ToProto(announcements, self_, &request);
  struct Taken {};
  return Start<v1::AnnounceReply>(
      member, std::move(request), &Async::Announce, deadline_nanos,
      [](const v1::AnnounceReply&) -> absl::StatusOr<Taken> { return Taken(); },
      Done<Taken>(
          [done = std::move(done)](const absl::StatusOr<Taken>& taken) { done(taken.status()); }));
}

Peers::CallId GrpcPeers::ListRuns(const Member& member, std::vector<RunList> lists,
                                  std::int64_t deadline_nanos, Done<std::vector<HeldRun>> done) {
  KVMILL_CHECK(lists.size() <= kListRunsMax);
  v1::ListRunsRequest request;
  for (const RunList& list : lists) {
    request.add_anchor_hashes(list.anchor_hash);
    request.add_after_places(list.after_place);
    request.add_after_hashes(list.after_hash);
  }
  return Start<v1::ListRunsReply>(
      member, std::move(request), &Async::ListRuns, deadline_nanos,
      [](const v1::ListRunsReply& reply) { return FromProto(reply); }, std::move(done));
}

Peers::CallId GrpcPeers::HandOver(const Member& member, std::vector<Announcement> announcements,
                                  std::int64_t deadline_nanos,
                                  Done<std::vector<std::uint8_t>> done) {
  KVMILL_CHECK(announcements.size() <= kAnnouncementsMax);
  v1::AnnounceRequest request;
  ToProto(announcements, self_, &request);
  return Start<v1::HandOverReply>(
      member, std::move(request), &Async::HandOver, deadline_nanos,
      [](const v1::HandOverReply& reply) { return FromProto(reply); }, std::move(done));
}

Peers::CallId GrpcPeers::Compare(const Member& member, const Digests& digests,
                                 std::int64_t deadline_nanos, Done<std::uint64_t> done) {
  v1::CompareRequest request;
  request.set_holder(self_.id);
  request.set_holder_incarnation(self_.incarnation);
  for (const std::uint64_t digest : digests) request.add_digests(digest);
  request.set_sketches(true);
  return Start<v1::CompareReply>(
      member, std::move(request), &Async::Compare, deadline_nanos,
      [](const v1::CompareReply& reply) -> absl::StatusOr<std::uint64_t> {
        return reply.different();
      },
      std::move(done));
}

Peers::CallId GrpcPeers::DescribeNamespace(const Member& member, const NamespaceQuestion& question,
                                           std::int64_t deadline_nanos,
                                           Done<NamespaceLearner::Answer> done) {
  v1::DescribeNamespaceRequest request;
  if (question.name.empty()) {
    request.mutable_namespace_()->set_fingerprint(std::string(AsBytes(question.fingerprint)));
  } else {
    request.mutable_namespace_()->set_name(question.name);
  }
  request.set_tenant(question.tenant);
  return Start<v1::DescribeNamespaceReply>(
      member, std::move(request), &Async::DescribeNamespace, deadline_nanos,
      [tenant = question.tenant](
          const v1::DescribeNamespaceReply& reply) -> absl::StatusOr<NamespaceLearner::Answer> {
        // A node of an earlier version speaks of the daemons' own tenant, whatever it is asked.
        if (!reply.has_spec() || reply.tenant() != tenant) return NamespaceLearner::Answer();
        DescribedNamespace said{.spec = {}, .name = reply.name(), .heard = reply.heard()};
        KVMILL_ASSIGN_OR_RETURN(said.spec, FromProto(reply.spec()));
        return NamespaceLearner::Answer(std::move(said));
      },
      std::move(done));
}

Peers::CallId GrpcPeers::AskTicket(const Member& producer, const TicketName& name,
                                   std::uint64_t seen, std::int64_t wait_nanos,
                                   std::int64_t deadline_nanos, Done<TicketNews> done) {
  v1::AskTicketRequest request;
  ToProto(name, self_, request.mutable_holder());
  request.set_seen(seen);
  request.set_wait_ms(static_cast<std::uint32_t>(wait_nanos / 1'000'000));
  return Start<v1::AskTicketReply>(
      producer, std::move(request), &Async::AskTicket, deadline_nanos,
      [](const v1::AskTicketReply& reply) { return FromProto(reply); }, std::move(done),
      /*waits=*/true);
}

Peers::CallId GrpcPeers::AcknowledgeTicket(const Member& producer, const TicketName& name,
                                           std::int64_t deadline_nanos,
                                           std::function<void(absl::Status)> done) {
  v1::AcknowledgeTicketRequest request;
  ToProto(name, self_, request.mutable_holder());
  struct Taken {};
  return Start<v1::AcknowledgeTicketReply>(
      producer, std::move(request), &Async::AcknowledgeTicket, deadline_nanos,
      [](const v1::AcknowledgeTicketReply&) -> absl::StatusOr<Taken> { return Taken(); },
      Done<Taken>(
          [done = std::move(done)](const absl::StatusOr<Taken>& taken) { done(taken.status()); }));
}

void GrpcPeers::Cancel(CallId id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return puller_.cancel(id);
  const std::shared_ptr<grpc::ClientContext> context = found->second.context;
  End(id, false);
  context->TryCancel();
}

}  // namespace kvmill
