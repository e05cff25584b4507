// Node "a", which asks by GrpcPeers, and node "b", which answers by PeerService, over real
// connections on this host.
//
// For grpc_peers_test, whose files are by subject: what is said arrives, and what goes wrong costs
// a call. A server that lies or listens is a PeerServer of the test's own.
#ifndef KVMILL_TESTS_SERVICE_GRPC_PEERS_FIXTURE_H_
#define KVMILL_TESTS_SERVICE_GRPC_PEERS_FIXTURE_H_

#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/callers.h"
#include "service/grpc_peers.h"
#include "service/local_door.h"
#include "service/local_peers.h"
#include "service/peer_answers.h"
#include "service/peer_codec.h"
#include "service/peer_service.h"
#include "service/service_context.h"
#include "service/session_table.h"
#include "service/thread_loop.h"
#include "storage/core/worker_pool.h"
#include "tests/integration/daemon_process.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {

inline constexpr std::int64_t kMs = 1'000'000;

inline Member MemberOf(const std::string& id, char incarnation, const std::string& address) {
  return {.id = id,
          .incarnation = std::string(kIncarnationBytes, incarnation),
          .address = address,
          .capacity_bytes = 1};
}

inline std::shared_ptr<const ClusterView> ViewOf(std::vector<Member> members) {
  return *ClusterView::Make(std::move(members), 1, 4, nullptr);
}

// A server of the Peer service at a port of its own.
class PeerServer {
 public:
  explicit PeerServer(grpc::Service* service) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~PeerServer() { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// Node "b": a store with blocks, and its answers. The fixture's own store is its.
class GrpcPeersTest : public TieredStoreTest {
 protected:
  void SetUp() override {
    Open(false);
    LocalDoor::Options door;
    door.path = directory_ / "b.door";
    door_ = *LocalDoor::Create(door, SystemClock());
    callers_ = std::make_unique<Callers>(local_peers_, *door_, geteuid());
    sessions_ = std::make_unique<SessionTable>(SessionTable::Options(), SystemClock());
    context_.reset(new ServiceContext{*store_, pool_, pool_, SystemClock(), *callers_, *sessions_});
    context_->boot_id = std::string(kIncarnationBytes, 'b');
    answers_ = std::make_unique<PeerAnswers>(b_loop_, *store_, PointerTable::Options());
    context_->peer_answers = answers_.get();
    service_ = std::make_unique<PeerService>(*context_);
    server_ = std::make_unique<PeerServer>(service_.get());
    b_ = MemberOf("b", 'b', server_->address());
    b_loop_.Run([this] { answers_->SetView(ViewOf({a_, b_})); });
    StartPeers();
  }
  void TearDown() override {
    StopPeers();
    server_ = nullptr;
    b_loop_.Stop();
    answers_ = nullptr;
    context_ = nullptr;
  }

  void StartPeers() {
    loop_.Run([this] {
      peers_ = std::make_unique<GrpcPeers>(
          loop_, a_,
          GrpcPeers::Puller{
              [this](Peers::CallId call, const Member& member, const Fingerprint&, RunKeys blocks,
                     std::int64_t, Peers::Done<std::vector<absl::Status>> done) {
                pulled_ = absl::StrCat(member.id, " ", blocks.keys.size());
                pulls_[call] = std::move(done);
              },
              [this](Peers::CallId call) { pulls_.erase(call); }});
    });
  }
  void StopPeers() {
    loop_.Run([this] { peers_ = nullptr; });
  }

  // What `start(deadline, done)` on the loop is told, and after how long.
  template <typename Answer>
  absl::StatusOr<Answer> Wait(std::int64_t timeout_nanos,
                              const std::function<void(std::int64_t, Peers::Done<Answer>)>& start) {
    std::promise<absl::StatusOr<Answer>> told;
    const auto begin = std::chrono::steady_clock::now();
    loop_.Post([&] {
      start(loop_.clock().MonotonicNanos() + timeout_nanos,
            [&told](absl::StatusOr<Answer> answer) { told.set_value(std::move(answer)); });
    });
    absl::StatusOr<Answer> answer = told.get_future().get();
    took_ = std::chrono::steady_clock::now() - begin;
    return answer;
  }
  absl::StatusOr<std::vector<RunAnswer>> Locate(const Member& member,
                                                const std::vector<RunQuery>& queries,
                                                std::int64_t timeout_nanos = 30'000 * kMs) {
    return Wait<std::vector<RunAnswer>>(timeout_nanos, [&](std::int64_t deadline, auto done) {
      peers_->Locate(member, fingerprint_, queries, deadline, done);
    });
  }
  absl::Status Announce(const Member& member, const std::vector<Announcement>& announcements) {
    return Wait<bool>(30'000 * kMs,
                      [&](std::int64_t deadline, auto done) {
                        peers_->Announce(member, announcements, deadline,
                                         [done](const absl::Status& status) {
                                           status.ok() ? done(true) : done(status);
                                         });
                      })
        .status();
  }
  RunQuery Query(const std::vector<std::uint64_t>& numbers) {
    RunQuery query;
    query.anchor = Id(1).key;
    for (const std::uint64_t number : numbers) query.keys.push_back(Id(number).key);
    return query;
  }
  std::uint64_t HashOfKey(std::uint64_t number) { return KeyHash(fingerprint_, Id(number).key); }
  std::uint64_t HashOfAnchor() { return AnchorHash(fingerprint_, Id(1).key); }

  // The server's side of one call, without GrpcPeers in between.
  template <typename Request, typename Reply>
  grpc::Status Ask(grpc::Status (v1::Peer::Stub::*method)(grpc::ClientContext*, const Request&,
                                                          Reply*),
                   Request request) {
    if (request.incarnation().empty()) request.set_incarnation(b_.incarnation);
    const auto stub = v1::Peer::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    Reply reply;
    return (stub.get()->*method)(&context, request, &reply);
  }

  Fingerprint fingerprint_ = FingerprintOf(Spec());
  testing::TemporaryDirectory directory_;
  const Member a_ = MemberOf("a", 'a', "127.0.0.1:1");
  Member b_;
  LocalPeers local_peers_;
  std::unique_ptr<LocalDoor> door_;
  std::unique_ptr<Callers> callers_;
  std::unique_ptr<SessionTable> sessions_;
  WorkerPool pool_{1, "test"};
  std::unique_ptr<ServiceContext> context_;
  ThreadLoop b_loop_{SystemClock()};
  std::unique_ptr<PeerAnswers> answers_;
  std::unique_ptr<PeerService> service_;
  std::unique_ptr<PeerServer> server_;

  ThreadLoop loop_{SystemClock()};
  std::unique_ptr<GrpcPeers> peers_;  // Of node "a", on loop_.
  std::string pulled_;
  std::map<Peers::CallId, Peers::Done<std::vector<absl::Status>>> pulls_;
  std::chrono::steady_clock::duration took_{};
};

}  // namespace kvmill

#endif  // KVMILL_TESTS_SERVICE_GRPC_PEERS_FIXTURE_H_
