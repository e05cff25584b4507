// The other nodes of the cluster over gRPC: Peers for real. Blocks come another way, which whoever
// makes this hands in.
//
// There is one connection to each member, made with the first call and shared by all; it ends when
// the member has left the view. A call that fails is not tried again: whoever asked knows better
// what to do then.
#ifndef KVMILL_SERVICE_GRPC_PEERS_H_
#define KVMILL_SERVICE_GRPC_PEERS_H_

#include <grpcpp/client_context.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/tls/tls_files.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "service/cluster/cluster_view.h"
#include "service/cluster/loop.h"
#include "service/cluster/namespace_learner.h"
#include "service/cluster/peers.h"
#include "service/cluster/ticket.h"
#include "service/etcd/loop_inbox.h"
#include "service/log_limit.h"
#include "storage/core/mutex.h"

namespace kvmill {

// Lives on the loop; stats() is for any thread.
class GrpcPeers final : public Peers {
 public:
  // Pull and its Cancel: `call` is the number by which it is cancelled.
  struct Puller {
    std::function<void(CallId call, const Member&, const Fingerprint&, RunKeys,
                       std::int64_t deadline_nanos, Done<std::vector<absl::Status>>)>
        pull;
    std::function<void(CallId call)> cancel;
  };

  // `self`: who says what Announce, HandOver and Compare say. `tls`: of the connections.
  GrpcPeers(Loop& loop, const Member& self, Puller puller, const TlsFiles& tls = {});
  // Cancels what runs, and waits moments until gRPC has let go of it.
  ~GrpcPeers() override;

  CallId Locate(const Member& member, const Fingerprint& fingerprint, std::vector<RunQuery> queries,
                std::int64_t deadline_nanos, Done<std::vector<RunAnswer>> done) override;
  CallId Pull(const Member& member, const Fingerprint& fingerprint, RunKeys blocks,
              std::int64_t deadline_nanos, Done<std::vector<absl::Status>> done) override;
  CallId Announce(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline_nanos, std::function<void(absl::Status)> done) override;
  CallId ListRuns(const Member& member, std::vector<RunList> lists, std::int64_t deadline_nanos,
                  Done<std::vector<HeldRun>> done) override;
  CallId HandOver(const Member& member, std::vector<Announcement> announcements,
                  std::int64_t deadline_nanos, Done<std::vector<std::uint8_t>> done) override;
  CallId Compare(const Member& member, const Digests& digests, std::int64_t deadline_nanos,
                 Done<std::uint64_t> done) override;
  void Cancel(CallId call) override;

  // For NamespaceLearner.
  CallId DescribeNamespace(const Member& member, const NamespaceQuestion& question,
                           std::int64_t deadline_nanos, Done<NamespaceLearner::Answer> done);

  // Of tickets (TicketPeers, whose Redeem and Acknowledge these are): `self` is the consumer.
  CallId AskTicket(const Member& producer, const TicketName& name, std::uint64_t seen,
                   std::int64_t wait_nanos, std::int64_t deadline_nanos, Done<TicketNews> done);
  CallId AcknowledgeTicket(const Member& producer, const TicketName& name,
                           std::int64_t deadline_nanos, std::function<void(absl::Status)> done);

  // Connections to members that are not in the view, in this incarnation and at this address, end
  // with the calls that run on them.
  void Keep(const ClusterView& view);

  // By node id, since the node came into the view.
  struct PeerStats {
    std::uint64_t requests = 0;
    std::uint64_t failures = 0;  // Of them: errors, and answers that did not come in time.
  };
  std::map<std::string, PeerStats> stats() const;

  // On the loop: has this member say whether it takes this node for one, which it answers with the
  // certificates of both; without TLS everybody does.
  void Greet(const Member& member);
  // What members say that refuse to talk to this node, and what to do, a line each: those whose
  // last answer that was.
  std::vector<std::string> Refusals() const;

  std::size_t open() const { return calls_.size(); }
  std::size_t connections() const { return links_.size(); }

 private:
  struct Link;
  using LinkPtr = std::shared_ptr<Link>;  // Of the table, and of the calls that run.
  struct Call {
    std::string peer;
    std::shared_ptr<grpc::ClientContext> context;
    Loop::TimerId timer = 0;
  };

  using Async = v1::Peer::StubInterface::async_interface;
  template <typename Request, typename Reply>
  using Method = void (Async::*)(grpc::ClientContext*, const Request*, Reply*,
                                 std::function<void(grpc::Status)>);

  // `convert(reply)`, on the loop, makes what `done` is told.
  template <typename Reply, typename Answer, typename Request, typename Convert>
  CallId Start(const Member& member, Request request, Method<Request, Reply> method,
               std::int64_t deadline_nanos, Convert convert, Done<Answer> done, bool waits = false);
  LinkPtr LinkOf(const Member& member);
  // Whether the call is there still; then its timer is no more.
  bool End(CallId id, bool failed);
  void Count(const std::string& peer, bool request, bool failure);
  // Whether the member takes this node for one, as its answer says.
  void NoteAnswer(const Member& member, const grpc::Status& status);

  Loop& loop_;
  const Member self_;
  const Puller puller_;
  const TlsFiles tls_;
  const std::shared_ptr<LoopInbox> inbox_;
  CallId next_ = 1;
  std::map<CallId, Call> calls_;  // But for pulls.
  std::map<std::string, LinkPtr> links_;
  mutable Mutex mu_;
  std::map<std::string, PeerStats> stats_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::string> refusals_ ABSL_GUARDED_BY(mu_);  // By node id.
  LogLimit refusals_logged_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_GRPC_PEERS_H_
