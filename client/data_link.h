// A client's way to the data plane of its daemon: one transport, one connection, made when it is
// first wanted and again after it broke. Internal to client/.
//
// Connecting takes an offer, which comes over gRPC, and a handshake. Whoever wants the connection
// meanwhile waits for it, up to its deadline. After a failure the next attempt is made when a
// back-off is over; until then everybody is told what went wrong. A connection that was open and
// broke is made again at once.
//
// Thread-safe.
#ifndef KVMILL_CLIENT_DATA_LINK_H_
#define KVMILL_CLIENT_DATA_LINK_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/transport/transport.h"
#include "kvmill/v1/data.pb.h"
#include "storage/core/mutex.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

class DataLink {
 public:
  using Deadline = std::chrono::system_clock::time_point;
  using OfferDone = std::function<void(absl::StatusOr<v1::ConnectReply>)>;
  // Asks the daemon for an offer. Calls back once, on any thread.
  using AskForOffer =
      std::function<void(const v1::ConnectRequest& request, Deadline deadline, OfferDone done)>;
  using Use = std::function<void(const absl::StatusOr<ConnectionPtr>&)>;

  struct Options {
    bool plaintext = false;
    RdmaUse rdma = RdmaUse::kAuto;
  };

  // The first two outlive it.
  DataLink(Connection& connection, WorkerPool& workers, const Options& options, AskForOffer ask);
  // After Stop.
  ~DataLink();

  // Calls that run are cancelled; returns when they have ended. Those that come later are
  // CANCELLED.
  void Stop();
  bool stopping() const;

  // Calls `use` once, here or on a thread of the library. FAILED_PRECONDITION: the daemon has no
  // data plane, or one that this client cannot use. DEADLINE_EXCEEDED, UNAVAILABLE.
  void Connect(Deadline deadline, Use use);
  // Whether the daemon's last answer was that it has none: then nothing is wrong.
  bool daemon_has_none() const { return daemon_has_none_.load(std::memory_order_relaxed); }

  // Brackets an operation that uses the connection; false when it must not start.
  bool Begin();
  void End();

  // Threads for what takes long: verifying, encoding, the engine's own code.
  WorkerPool& workers() { return workers_; }

  // Of the open connection, as "tcp/eth0"; empty: there is none.
  std::string transport() const;

 private:
  class Waiter;

  void Attempt();  // `connecting_` was set.
  void OnOffer(const absl::StatusOr<v1::ConnectReply>& reply);
  void Dial(const v1::ConnectReply& reply);
  // The daemon does not expect us from where we would come; `sources_` says it in the next request.
  bool ComesFromElsewhere(const v1::ConnectReply& reply, const Offer& offer);
  void OnConnected(const absl::StatusOr<ConnectionPtr>& connection);
  // The attempt is over.
  void Finish(const absl::StatusOr<ConnectionPtr>& result);

  std::atomic<bool> daemon_has_none_{false};  // What was true a moment ago will do.
  Connection& grpc_;
  WorkerPool& workers_;
  const Options options_;
  const AskForOffer ask_;
  const NodeIdentity self_;

  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::uint64_t operations_ ABSL_GUARDED_BY(mu_) = 0;  // Waiters, too.
  bool connecting_ ABSL_GUARDED_BY(mu_) = false;
  bool dialing_ ABSL_GUARDED_BY(mu_) = false;      // Somebody uses transport_.
  bool second_try_ ABSL_GUARDED_BY(mu_) = false;   // Of an attempt.
  ConnectionPtr connection_ ABSL_GUARDED_BY(mu_);  // Null, or open as far as we know.
  std::set<Waiter*> waiters_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> sources_ ABSL_GUARDED_BY(mu_);  // Of connections; empty: as gRPC's.
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point retry_at_ ABSL_GUARDED_BY(mu_){};
  std::chrono::milliseconds backoff_ ABSL_GUARDED_BY(mu_){0};
  // Used by the one attempt to connect, and by Stop when there is none.
  std::unique_ptr<Transport> transport_;
  bool transport_ipv6_ = false;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_DATA_LINK_H_
