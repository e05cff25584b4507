// What a Client is made of. Internal to client/.
#ifndef KVMILL_CLIENT_CLIENT_IMPL_H_
#define KVMILL_CLIENT_CLIENT_IMPL_H_

#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/away.h"
#include "client/client.h"
#include "client/client_session.h"
#include "client/connection.h"
#include "client/convert.h"
#include "client/data_link.h"
#include "client/map_calls.h"
#include "client/page_stores.h"
#include "client/request_context.h"
#include "client/standing_memory.h"
#include "client/unary_call.h"
#include "client/waiting_caller.h"
#include "storage/core/log.h"
#include "storage/core/mutex.h"
#include "storage/core/status_macros.h"
#include "storage/core/worker_pool.h"

namespace kvmill {

using Deadline = Connection::Deadline;

class Redeeming;  // client/redeem_stream.h

// From k2v2 to raw blocks there are three; a daemon that names more is wrong.
inline constexpr int kFallbacksMax = 4;

absl::StatusOr<ClientNamespace> NamespaceFromProto(const v1::NamespaceInfo& info);

class Client::Impl {
 public:
  Impl(const ServerAddress& address, const Options& options);
  ~Impl();

  Connection& connection() { return *connection_; }
  ClientSession& session() { return *session_; }
  MapCalls& maps() { return *maps_; }
  PageStores& pages() { return *pages_; }
  // Null with WhenAway::kFail.
  Away* away() { return away_.get(); }
  StandingMemory* standing() { return standing_.get(); }

  // With WhenAway::kMiss `done` gets `miss(why)` of a call that found no daemon. False: it is not
  // to be made at all, and `done` will be called all the same. `reads`: of Away::Note.
  template <typename T, typename Miss>
  bool MissIfAway(bool reads, Miss miss, Done<T>* done) {
    if (away_ == nullptr) return true;
    const Away::Look look = away_->Ask();
    if (!look.why.ok()) {
      connection_->Post([miss, why = look.why, done = std::move(*done)] { done(miss(why)); });
      return false;
    }
    *done = [this, reads, miss, look, done = std::move(*done)](absl::StatusOr<T> result) {
      if (away_->Note(result.status(), look, reads)) standing_->Restore();
      if (away_->IsAway(result.status())) {
        const absl::Status why = result.status();
        result = miss(why);
      }
      done(std::move(result));
    };
    return true;
  }
  // Null when bytes travel inline whatever happens.
  DataLink* link() { return link_.get(); }
  // Null: values travel as they are.
  WorkerPool* encoder() { return encodes() ? workers_.get() : nullptr; }
  bool encodes() const {
    return options_.encode_in == EncodeIn::kClient ||
           (options_.encode_in == EncodeIn::kAuto && !local_);
  }

  // Calls one of the three, once: `ucx`, after a Begin of the link, with its connection; `in_line`;
  // `fail` with why there is no way. In the scope of the caller's request, on whatever thread.
  void ChoosePath(Deadline deadline, std::function<void(const ConnectionPtr&)> ucx,
                  std::function<void()> in_line, std::function<void(const absl::Status&)> fail) {
    if (link_ == nullptr) return in_line();
    if (!link_->Begin()) return fail(absl::CancelledError("the client is being destroyed"));
    link_->Connect(deadline, [this, request = CurrentRequest(), ucx = std::move(ucx),
                              in_line = std::move(in_line), fail = std::move(fail)](
                                 const absl::StatusOr<ConnectionPtr>& connection) {
      const RequestScope scope(request);
      if (connection.ok()) {
        fell_back_.store(false, std::memory_order_relaxed);
        return ucx(*connection);  // Calls End when it has ended.
      }
      if (options_.path == DataPath::kAuto && !link_->stopping()) {
        NoteFallback(connection.status());
        in_line();
      } else {
        fail(connection.status());
      }
      link_->End();
    });
  }

  // `caller`: who waits for `done`, and works meanwhile; may be null.
  void Fetch(const ClientNamespace& ns, absl::Span<const BlockKey> keys, FetchSink& sink,
             CallOptions call, WaitingCaller* caller, Done<FetchResult> done);

  // The same of a store.
  bool DropIfAway(std::size_t block_count, Done<StoreResult>* done) {
    if (away_ == nullptr) return true;
    *done = [away = away_.get(), done = std::move(*done)](absl::StatusOr<StoreResult> result) {
      if (result.ok()) DropLostBlocks(*away, &*result);
      done(std::move(result));
    };
    const auto dropped = [block_count](const absl::Status& why) {
      return DroppedStore(block_count, why);
    };
    return MissIfAway<StoreResult>(false, dropped, done);
  }

  absl::Status CheckProcess() const {
    if (getpid() == pid_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "this client was made before fork(): start processes by exec (Python: spawn)");
  }

  Deadline DeadlineOf(const CallOptions& call) const {
    const absl::Duration timeout =
        call.timeout > absl::ZeroDuration() ? call.timeout : options_.timeout;
    return std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout);
  }

  // `prepare(channel, context, queue)` makes the reader of a stub; `convert(reply)` the result.
  template <typename Reply, typename T, typename Prepare, typename Convert>
  void Call(Deadline deadline, Prepare prepare, Convert convert, Done<T> done) {
    StartUnaryCall<Reply, T>(*connection_, deadline, std::move(prepare), std::move(convert),
                             std::move(done));
  }

  void Register(const std::string& name, const NamespaceSpec& spec, Deadline deadline,
                Done<ClientNamespace> done) {
    v1::RegisterRequest request;
    request.mutable_client()->set_protocol_version(kProtocolVersion);
    request.mutable_client()->set_software_version(kSoftwareVersion);
    request.set_name(name);
    ToProto(spec, request.mutable_spec());
    Call<v1::RegisterReply, ClientNamespace>(
        deadline,
        [request = std::move(request)](Channel& channel, auto* context, auto* queue) {
          return channel.engine->PrepareAsyncRegister(context, request, queue);
        },
        [this, spec](const v1::RegisterReply& reply) -> absl::StatusOr<ClientNamespace> {
          KVMILL_RETURN_IF_ERROR(CheckProtocolVersion(reply.hello().server().protocol_version()));
          KVMILL_ASSIGN_OR_RETURN(ClientNamespace ns, NamespaceFromProto(reply.namespace_()));
          NamespaceSpec wanted = spec;
          wanted.tenant.clear();
          if (!(ns.spec == wanted)) {
            return absl::InternalError(
                absl::StrCat("malformed reply to Register: another namespace, ",
                             DescribeDifference(ns.spec, wanted)));
          }
          MutexLock lock(mu_);
          registered_[ns.fingerprint] = ns;
          return ns;
        },
        std::move(done));
  }

  void RegisterOrFallback(const std::string& name, const NamespaceSpec& spec, Deadline deadline,
                          int fallbacks_left, Done<ClientNamespace> done) {
    Register(name, spec, deadline,
             [this, spec, deadline, fallbacks_left,
              done = std::move(done)](absl::StatusOr<ClientNamespace> ns) {
               if (!ns.ok() || !ns->trip.has_value() || !ns->trip->refuses_stores ||
                   ns->trip->fallback_name.empty()) {
                 return done(std::move(ns));
               }
               const NamespaceTrip& trip = *ns->trip;
               if (fallbacks_left == 0) {
                 return done(absl::InternalError(absl::StrCat(
                     "malformed reply to Register: one more fall-back, ", trip.fallback_name)));
               }
               NamespaceSpec fallback = spec;
               fallback.key_bits = trip.fallback_key_bits;
               fallback.value_bits = trip.fallback_value_bits;
               fallback.sink_blocks = trip.fallback_sink_blocks;
               RegisterOrFallback(trip.fallback_name, fallback, deadline, fallbacks_left - 1, done);
             });
  }

  void Describe(const v1::DescribeRequest& request, Deadline deadline, Done<ClientNamespace> done) {
    Call<v1::NamespaceInfo, ClientNamespace>(
        deadline,
        [request](Channel& channel, auto* context, auto* queue) {
          return channel.engine->PrepareAsyncDescribe(context, request, queue);
        },
        &NamespaceFromProto, std::move(done));
  }

  // Redeems that run, by ticket, so that they can be cancelled.
  void RedeemBegins(const std::string& ticket, const std::shared_ptr<Redeeming>& redeeming) {
    MutexLock lock(mu_);
    redeems_.emplace(ticket, redeeming);
  }
  void RedeemEnds(const std::string& ticket, const std::shared_ptr<Redeeming>& redeeming);
  void CancelRedeems(const std::string& ticket);

  // Fills in session and registration of `memory`, and shares it.
  void RegisterMemory(const ClientNamespace& ns, const std::shared_ptr<RegisteredMemory>& memory,
                      Deadline deadline, Done<std::uint64_t> done);
  void Unregister(const SessionPtr& session, std::uint64_t registration, Deadline deadline,
                  std::function<void(absl::Status)> done);
  // Of StandingMemory.
  void StoreStanding(const ClientNamespace& ns, std::uint64_t number,
                     absl::Span<const PageBlock> blocks, const PageStoreOptions& options,
                     Deadline deadline, Done<StoreResult> done);
  void RemoveStanding(std::uint64_t number, Deadline deadline,
                      std::function<void(absl::Status)> done);
  // The daemon knows the memory; now it gets what can be shared of it.
  void Share(const std::shared_ptr<RegisteredMemory>& memory, Deadline deadline,
             Done<std::uint64_t> done);

  // Runs `attempt(done)`; tries once more when the daemon was restarted meanwhile: it does not know
  // the token, or the namespace though that was opened here, which is registered first.
  template <typename T>
  void WithNamespace(const ClientNamespace& ns, Deadline deadline,
                     std::function<void(Done<T>)> attempt, Done<T> done) {
    attempt([this, fingerprint = ns.fingerprint, deadline, attempt,
             done = std::move(done)](absl::StatusOr<T> result) {
      if (absl::IsUnauthenticated(result.status())) {
        attempt(done);
        return;
      }
      std::optional<ClientNamespace> known;
      if (absl::IsNotFound(result.status())) {
        MutexLock lock(mu_);
        const auto it = registered_.find(fingerprint);
        if (it != registered_.end()) known = it->second;
      }
      if (!known.has_value()) {
        done(std::move(result));
        return;
      }
      Register(known->name, known->spec, deadline,
               [attempt, done](absl::StatusOr<ClientNamespace> registered) {
                 if (registered.ok()) {
                   attempt(done);
                 } else {
                   done(registered.status());
                 }
               });
    });
  }

 private:
  // Once in a row of failures.
  void NoteFallback(const absl::Status& why) {
    if (fell_back_.exchange(true, std::memory_order_relaxed)) return;
    const std::string text =
        absl::StrCat("data plane: ", why.message(), "; blocks travel with the gRPC messages");
    // Without a data plane that is how it is meant to be; else it is slower, and not encrypted.
    link_->daemon_has_none() ? LogDebug(text) : LogWarning(text);
  }

  const Options options_;
  const bool local_;
  const pid_t pid_;
  std::atomic<bool> fell_back_{false};
  Mutex mu_;
  std::map<Fingerprint, ClientNamespace> registered_ ABSL_GUARDED_BY(mu_);
  std::multimap<std::string, std::shared_ptr<Redeeming>> redeems_ ABSL_GUARDED_BY(mu_);
  // Null with WhenAway::kFail; constant after construction.
  std::unique_ptr<Away> away_;
  std::unique_ptr<StandingMemory> standing_;
  // May be null; constant after construction. Workers are used by both others.
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<DataLink> link_;
  std::unique_ptr<ClientSession> session_;
  std::unique_ptr<MapCalls> maps_;
  std::unique_ptr<PageStores> pages_;
  // Last: its destructor ends the calls that use the rest.
  std::unique_ptr<Connection> connection_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CLIENT_IMPL_H_
