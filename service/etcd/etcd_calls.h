// The calls and watches of a registry: which server is asked, how often, until when, and with which
// token. On the loop only.
#ifndef KVMILL_SERVICE_ETCD_ETCD_CALLS_H_
#define KVMILL_SERVICE_ETCD_ETCD_CALLS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/cluster/loop.h"
#include "service/cluster/registry.h"
#include "service/etcd/etcd_call.h"
#include "service/etcd/etcd_servers.h"
#include "service/etcd/etcd_watch.h"
#include "service/etcd/loop_inbox.h"

namespace kvmill {

class EtcdCalls {
 public:
  EtcdCalls(const EtcdOptions& options, std::unique_ptr<EtcdServers> servers, Loop& loop)
      : loop_(loop),
        servers_(std::move(servers)),
        user_(options.user),
        password_(options.password),
        inbox_(std::make_shared<LoopInbox>(loop)) {}
  ~EtcdCalls();
  EtcdCalls(const EtcdCalls&) = delete;
  EtcdCalls& operator=(const EtcdCalls&) = delete;

  template <typename Answer, typename Request, typename Response, typename Method>
  Registry::CallId Unary(Request request, std::int64_t deadline_nanos, Registry::Done<Answer> done,
                         Method method,
                         typename TypedEtcdCall<Answer, Request, Response>::Answered answered);
  // Takes its deadline from the call.
  Registry::CallId Start(std::shared_ptr<EtcdCall> call);
  // For a call that cannot be made.
  Registry::CallId Refuse(std::shared_ptr<EtcdCall> call, const absl::Status& why);
  template <typename Answer>
  Registry::CallId Refuse(Registry::Done<Answer> done, const absl::Status& why);
  Registry::CallId Watch(EtcdWatch::Options options);
  void Cancel(Registry::CallId id);

 private:
  std::int64_t Now() const { return loop_.clock().MonotonicNanos(); }
  Registry::CallId Enter(std::shared_ptr<EtcdCall> call);
  void Try(Registry::CallId id);
  void Tried(Registry::CallId id, std::uint64_t tries, const grpc::Status& status);
  void Finish(Registry::CallId id, const absl::Status& status);
  // Of a call that gRPC may keep for a while: not its context, which refers to a channel.
  static void GiveUp(EtcdCall& call) {
    if (call.try_context != nullptr) std::exchange(call.try_context, nullptr)->TryCancel();
  }
  std::shared_ptr<EtcdCall> Take(Registry::CallId id);
  std::shared_ptr<grpc::ClientContext> MakeContext(const std::string& token) const;
  bool NeedsToken() const { return !user_.empty() && token_.empty() && !without_token_; }
  // Runs `then` when there is a token, or none is wanted; with the reason when there cannot be one.
  void WithToken(Registry::CallId id, std::int64_t deadline_nanos,
                 std::function<void(const absl::Status&)> then);
  void Authenticate(std::int64_t deadline_nanos);
  void Authenticated(const absl::StatusOr<std::string>& token);
  void OpenWatch(Registry::CallId id);
  void TokenRefused(const std::string& token);

  Loop& loop_;
  const std::unique_ptr<EtcdServers> servers_;
  const std::string user_;
  const std::string password_;
  const std::shared_ptr<LoopInbox> inbox_;

  Registry::CallId next_id_ = 1;
  std::unordered_map<Registry::CallId, std::shared_ptr<EtcdCall>> calls_;
  std::unordered_map<Registry::CallId, std::shared_ptr<EtcdWatch>> watches_;

  std::string token_;
  bool without_token_ = false;  // This etcd asks nobody for a password.
  bool authenticating_ = false;
  std::map<Registry::CallId, std::function<void(const absl::Status&)>> waiting_;  // For the token.
};

template <typename Answer, typename Request, typename Response, typename Method>
Registry::CallId EtcdCalls::Unary(
    Request request, std::int64_t deadline_nanos, Registry::Done<Answer> done, Method method,
    typename TypedEtcdCall<Answer, Request, Response>::Answered answered) {
  auto call = std::make_shared<UnaryEtcdCall<Answer, Request, Response>>();
  call->request = std::move(request);
  call->deadline_nanos = deadline_nanos;
  call->done = std::move(done);
  call->method = std::move(method);
  call->answered = std::move(answered);
  return Start(std::move(call));
}

template <typename Answer>
Registry::CallId EtcdCalls::Refuse(Registry::Done<Answer> done, const absl::Status& why) {
  auto call = std::make_shared<KeepAliveEtcdCall<Answer>>();  // Any: it is never tried.
  call->done = std::move(done);
  return Refuse(std::move(call), why);
}

}  // namespace kvmill

#endif  // KVMILL_SERVICE_ETCD_ETCD_CALLS_H_
