// Channels to one daemon, and the bookkeeping of calls on them. Internal to client/.
#ifndef KVMILL_CLIENT_CONNECTION_H_
#define KVMILL_CLIENT_CONNECTION_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/door_client.h"
#include "client/server_address.h"
#include "client/stub_pool.h"
#include "client/tls/tls_files.h"
#include "kvmill/v1/admin.grpc.pb.h"
#include "kvmill/v1/cache.grpc.pb.h"
#include "kvmill/v1/engine.grpc.pb.h"
#include "kvmill/v1/peer.grpc.pb.h"
#include "kvmill/v1/ticket.grpc.pb.h"
#include "storage/core/mutex.h"

namespace kvmill {

// One HTTP/2 connection, made when first used and again after it broke; and others for calls that
// last as long as a prefill. Over TCP, as `tls` says.
struct Channel {
  Channel(const ServerAddress& address, const TlsFiles& tls);

  const std::shared_ptr<grpc::Channel> channel;  // gRPC's own type of ownership.
  const std::unique_ptr<v1::Engine::Stub> engine;
  const std::unique_ptr<v1::Cache::Stub> cache;
  const std::unique_ptr<v1::Admin::Stub> admin;
  const std::unique_ptr<v1::Ticket::Stub> ticket;
  StubPool<v1::Ticket::Stub> redeems;          // By those.
  const std::unique_ptr<v1::Peer::Stub> peer;  // Between daemons.
  grpc::GenericStub generic;
};
using ChannelPtr = std::shared_ptr<Channel>;  // Calls keep the channel that they run on.

// What a completion queue delivers: one started operation ended.
class Completion {
 public:
  virtual void OnEvent(bool ok) = 0;  // May delete its object. Runs on a thread of the Connection.

 protected:
  ~Completion() = default;
};

// A Completion that calls a member function.
template <typename T>
class MemberCompletion final : public Completion {
 public:
  MemberCompletion(T* object, void (T::*function)(bool)) : object_(object), function_(function) {}
  void OnEvent(bool ok) override { (object_->*function_)(ok); }

 private:
  T* const object_;
  void (T::*const function_)(bool);
};

// Thread-safe. Has threads of its own that wait for the queue; gRPC's callback interface would
// share threads between all clients of the process and stop them from within.
//
// Calls over a unix socket carry the token that the daemon's local door gave
// (client/door_client.h); whoever has none yet waits for it, up to its deadline, without a thread.
// Those over TLS carry the token of the identity, if it has one.
class Connection {
 public:
  using Deadline = std::chrono::system_clock::time_point;

  // Who the client is to a daemon that it reaches over TCP.
  struct Identity {
    TlsFiles tls;
    std::string token;  // Empty: none. With TLS only.
  };

  // `pass_lost`: of DoorClient.
  Connection(const ServerAddress& address, Identity identity,
             std::function<void(std::uint64_t)> pass_lost);
  // Cancels running calls and waits until every one has ended.
  ~Connection();

  ChannelPtr channel();
  // The next call gets a new channel; the old one closes when its last call ends, and drops what it
  // still wanted to write.
  void Replace(const ChannelPtr& stuck);

  // Whether and as whom a call may start.
  struct Admission {
    absl::Status status;
    std::uint64_t pass = 0;  // Number of the DoorPass whose token it carries; 0: none (TCP).
  };
  // Sets the call's deadline and token and calls `start` once: now, or on a thread of the
  // connection when the local door has to be opened first. When the status is OK the call has begun
  // and must End; between the two its context may be cancelled from any thread.
  void Admit(grpc::ClientContext* call, Deadline deadline,
             std::function<void(const Admission&)> start);
  // The daemon did not take the token of that pass (it was restarted): the next call waits for a
  // new one. False for a call that had none.
  bool PassRefused(std::uint64_t pass);
  // Null over TCP.
  DoorClient* door() { return door_.get(); }
  void End(grpc::ClientContext* call);
  // For a call that outlives its context: End is called with null.
  void ForgetContext(grpc::ClientContext* call);

  // Tags are Completions.
  grpc::CompletionQueue* queue() { return &queue_; }
  // Runs `task` on another thread of the client's own, soon and once.
  void Post(std::function<void()> task);
  // The same, not before `when`; not at all when the client is destroyed before.
  void PostAt(std::chrono::steady_clock::time_point when, std::function<void()> task);

  std::string boot_id() const;
  // What a call that this client did not cancel ended with: a daemon that stops cancels what it
  // cannot finish, which to its callers is UNAVAILABLE.
  absl::Status StatusOf(const grpc::Status& status) const;
  // The same, of a call that has ended; where somebody may want to look into the daemon's log, with
  // the request's id there.
  absl::Status StatusOf(const grpc::Status& status, const grpc::ClientContext& call) const;
  // From a reply's initial metadata.
  void NoteBootId(const grpc::ClientContext& call);
  void NoteBootId(const std::string& boot_id_hex);

 private:
  bool Begin(grpc::ClientContext* call);
  void RunTasks();
  void RunQueue();

  const ServerAddress address_;
  const Identity identity_;
  mutable Mutex mu_;
  CondVar changed_;
  ChannelPtr channel_ ABSL_GUARDED_BY(mu_);
  std::set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mu_);   // That may be cancelled.
  std::size_t calls_ ABSL_GUARDED_BY(mu_) = 0;                     // That have not ended.
  std::vector<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);  // At most one per running call.
  // Few: of one session, and of idle mappings.
  std::multimap<std::chrono::steady_clock::time_point, std::function<void()>> timed_tasks_
      ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;  // No new calls.
  bool stop_thread_ ABSL_GUARDED_BY(mu_) = false;
  std::string boot_id_ ABSL_GUARDED_BY(mu_);
  grpc::CompletionQueue queue_;
  std::vector<std::thread> threads_;  // Constant after construction.
  std::unique_ptr<DoorClient> door_;  // Constant after construction.
};

// gRPC's status as ours: the codes have the same numbers.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CONNECTION_H_
