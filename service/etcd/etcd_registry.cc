#include "service/etcd/etcd_registry.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/etcd/etcd_call.h"
#include "service/etcd/etcd_errors.h"
#include "service/etcd/etcd_inbox.h"
#include "service/etcd/etcd_watch.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

using etcdserverpb::ResponseHeader;
using etcdserverpb::TxnRequest;
using etcdserverpb::TxnResponse;

constexpr std::int64_t kTryNanosMin = 100'000'000;
constexpr std::int64_t kSilenceNanosMin = 1'000'000'000;
constexpr std::int64_t kTokenNanos = 5'000'000'000;  // For a watch, which has no deadline.

Registry::Header HeaderOf(const ResponseHeader& header) {
  return {header.cluster_id(), header.revision()};
}

Registry::Entry EntryOf(const mvccpb::KeyValue& kv) {
  return {kv.key(), kv.value(), kv.mod_revision(), kv.lease()};
}

absl::Status CheckKey(const std::string& key) {
  if (key.empty() || key.size() > Registry::kKeyBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("key or prefix of ", key.size(),
                                                   " bytes: want 1 to ", Registry::kKeyBytesMax));
  }
  return absl::OkStatus();
}

// A transaction that writes when `key` is as expected, and otherwise reads it.
TxnRequest Compared(const std::string& key, Registry::Revision expected) {
  TxnRequest request;
  etcdserverpb::Compare& compare = *request.add_compare();
  compare.set_result(etcdserverpb::Compare::EQUAL);
  compare.set_target(etcdserverpb::Compare::MOD);
  compare.set_key(key);
  compare.set_mod_revision(expected);
  request.add_failure()->mutable_request_range()->set_key(key);
  return request;
}

Registry::Written WrittenOf(const TxnResponse& response) {
  Registry::Written written;
  written.header = HeaderOf(response.header());
  written.done = response.succeeded();
  if (!written.done && response.responses_size() == 1 &&
      response.responses(0).response_range().kvs_size() == 1) {
    written.current = EntryOf(response.responses(0).response_range().kvs(0));
  }
  return written;
}

}  // namespace

class EtcdRegistry::Impl {
 public:
  Impl(const EtcdOptions& options, std::unique_ptr<EtcdServers> servers, Loop& loop)
      : loop_(loop),
        servers_(std::move(servers)),
        user_(options.user),
        password_(options.password),
        inbox_(std::make_shared<EtcdInbox>(loop)) {}
  ~Impl();

  template <typename Answer, typename Request, typename Response, typename Method>
  CallId Unary(Request request, std::int64_t deadline_nanos, Done<Answer> done, Method method,
               typename TypedEtcdCall<Answer, Request, Response>::Answered answered);
  // Takes its deadline from the call.
  CallId Start(std::shared_ptr<EtcdCall> call);
  // For a call that cannot be made.
  CallId Refuse(std::shared_ptr<EtcdCall> call, const absl::Status& why);
  template <typename Answer>
  CallId Refuse(Done<Answer> done, const absl::Status& why);
  CallId Watch(EtcdWatch::Options options);
  void Cancel(CallId id);

 private:
  std::int64_t Now() const { return loop_.clock().MonotonicNanos(); }
  CallId Enter(std::shared_ptr<EtcdCall> call);
  void Try(CallId id);
  void Tried(CallId id, std::uint64_t tries, const grpc::Status& status);
  void Finish(CallId id, const absl::Status& status);
  // Of a call that gRPC may keep for a while: not its context, which refers to a channel.
  static void GiveUp(EtcdCall& call) {
    if (call.try_context != nullptr) std::exchange(call.try_context, nullptr)->TryCancel();
  }
  std::shared_ptr<EtcdCall> Take(CallId id);
  std::shared_ptr<grpc::ClientContext> MakeContext(const std::string& token) const;
  bool NeedsToken() const { return !user_.empty() && token_.empty() && !without_token_; }
  // Runs `then` when there is a token, or none is wanted; with the reason when there cannot be one.
  void WithToken(CallId id, std::int64_t deadline_nanos,
                 std::function<void(const absl::Status&)> then);
  void Authenticate(std::int64_t deadline_nanos);
  void Authenticated(const absl::StatusOr<std::string>& token);
  void OpenWatch(CallId id);
  void TokenRefused(const std::string& token);

  Loop& loop_;
  const std::unique_ptr<EtcdServers> servers_;
  const std::string user_;
  const std::string password_;
  const std::shared_ptr<EtcdInbox> inbox_;

  CallId next_id_ = 1;
  std::unordered_map<CallId, std::shared_ptr<EtcdCall>> calls_;
  std::unordered_map<CallId, std::shared_ptr<EtcdWatch>> watches_;

  std::string token_;
  bool without_token_ = false;  // This etcd asks nobody for a password.
  bool authenticating_ = false;
  std::map<CallId, std::function<void(const absl::Status&)>> waiting_;  // For the token.
};

EtcdRegistry::Impl::~Impl() {
  waiting_.clear();
  for (auto& [id, watch] : watches_) watch->Stop();
  for (auto& [id, call] : calls_) {
    call->Drop();
    if (call->timer != 0) loop_.Cancel(call->timer);
    GiveUp(*call);
  }
  watches_.clear();
  calls_.clear();
  inbox_->Close();
}

EtcdRegistry::CallId EtcdRegistry::Impl::Enter(std::shared_ptr<EtcdCall> call) {
  const CallId id = next_id_++;
  calls_[id] = std::move(call);
  return id;
}

EtcdRegistry::CallId EtcdRegistry::Impl::Start(std::shared_ptr<EtcdCall> call) {
  EtcdCall& started = *call;
  const CallId id = Enter(std::move(call));
  started.server_index = servers_->current();
  started.tries_left = servers_->size();
  started.timer = loop_.At(started.deadline_nanos, [this, id] {
    calls_.at(id)->timer = 0;
    Finish(id, absl::DeadlineExceededError(
                   absl::StrCat("etcd ", (*servers_)[calls_.at(id)->server_index].name,
                                ": no answer by the deadline")));
  });
  Try(id);
  return id;
}

EtcdRegistry::CallId EtcdRegistry::Impl::Refuse(std::shared_ptr<EtcdCall> call,
                                                const absl::Status& why) {
  EtcdCall& refused = *call;
  const CallId id = Enter(std::move(call));
  refused.timer = loop_.After(0, [this, id, why] {
    calls_.at(id)->timer = 0;
    Finish(id, why);
  });
  return id;
}

template <typename Answer, typename Request, typename Response, typename Method>
EtcdRegistry::CallId EtcdRegistry::Impl::Unary(
    Request request, std::int64_t deadline_nanos, Done<Answer> done, Method method,
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
EtcdRegistry::CallId EtcdRegistry::Impl::Refuse(Done<Answer> done, const absl::Status& why) {
  auto call = std::make_shared<KeepAliveEtcdCall<Answer>>();  // Any: it is never tried.
  call->done = std::move(done);
  return Refuse(std::move(call), why);
}

std::shared_ptr<grpc::ClientContext> EtcdRegistry::Impl::MakeContext(
    const std::string& token) const {
  auto context = std::make_shared<grpc::ClientContext>();
  context->AddMetadata("hasleader", "true");  // Else a server that is cut off would answer.
  if (!token.empty()) context->AddMetadata("token", token);
  return context;
}

void EtcdRegistry::Impl::Try(CallId id) {
  const std::shared_ptr<EtcdCall> call = calls_.at(id);
  if (call->wants_token && NeedsToken()) {
    WithToken(id, call->deadline_nanos, [this, id](const absl::Status& status) {
      if (!calls_.contains(id)) return;
      if (!status.ok()) return Finish(id, status);
      Try(id);
    });
    return;
  }
  const std::int64_t left = call->deadline_nanos - Now();
  const auto share = static_cast<std::int64_t>(std::max<std::size_t>(1, call->tries_left));
  call->token = call->wants_token ? token_ : "";
  call->try_context = MakeContext(call->token);
  // The last try has until the deadline, which the timer guards.
  call->try_context->set_deadline(std::chrono::system_clock::now() +
                                  std::chrono::nanoseconds(std::max(left / share, kTryNanosMin)));
  const std::uint64_t tries = ++call->tries;
  inbox_->Begin();
  call->Try((*servers_)[call->server_index], call->try_context,
            // The call stays until gRPC no longer writes into its response.
            [this, id, tries, call, inbox = inbox_](const grpc::Status& status) {
              inbox->Post([this, id, tries, status] { Tried(id, tries, status); });
            },
            [inbox = inbox_] { inbox->End(); });
}

void EtcdRegistry::Impl::Tried(CallId id, std::uint64_t tries, const grpc::Status& status) {
  const auto found = calls_.find(id);
  if (found == calls_.end() || found->second->tries != tries) return;
  EtcdCall& call = *found->second;
  call.try_context = nullptr;
  if (status.ok()) {
    servers_->Answered(call.server_index);
    return Finish(id, absl::OkStatus());
  }
  const absl::Status error = FromEtcd(status, (*servers_)[call.server_index].name);
  if (error.code() == absl::StatusCode::kUnauthenticated && call.wants_token && !user_.empty() &&
      !std::exchange(call.authenticated_again, true)) {
    TokenRefused(call.token);
    return Try(id);
  }
  if (!IsServersFault(error)) {
    servers_->Answered(call.server_index);
    return Finish(id, error);
  }
  servers_->Failed(call.server_index, Now());
  if (--call.tries_left == 0 || Now() >= call.deadline_nanos) return Finish(id, error);
  call.server_index = (call.server_index + 1) % servers_->size();
  Try(id);
}

std::shared_ptr<EtcdCall> EtcdRegistry::Impl::Take(CallId id) {
  auto node = calls_.extract(id);
  if (node.empty()) return nullptr;
  waiting_.erase(id);
  if (node.mapped()->timer != 0) loop_.Cancel(std::exchange(node.mapped()->timer, 0));
  return std::move(node.mapped());
}

void EtcdRegistry::Impl::Finish(CallId id, const absl::Status& status) {
  const std::shared_ptr<EtcdCall> call = Take(id);
  if (call->try_context != nullptr) {  // Given up while it was tried: that server did not answer.
    servers_->Failed(call->server_index, Now());
    GiveUp(*call);
  }
  if (status.ok()) {
    call->Answer((*servers_)[call->server_index].name);
  } else {
    call->Fail(status);
  }
}

void EtcdRegistry::Impl::Cancel(CallId id) {
  if (const std::shared_ptr<EtcdCall> call = Take(id)) {
    call->Drop();
    GiveUp(*call);
  } else if (auto node = watches_.extract(id); !node.empty()) {
    waiting_.erase(id);
    node.mapped()->Stop();
  }
}

void EtcdRegistry::Impl::TokenRefused(const std::string& token) {
  // Others may have fetched a newer one meanwhile.
  if (token != token_) return;
  token_.clear();
  without_token_ = false;
}

void EtcdRegistry::Impl::WithToken(CallId id, std::int64_t deadline_nanos,
                                   std::function<void(const absl::Status&)> then) {
  waiting_[id] = std::move(then);
  if (!std::exchange(authenticating_, true)) Authenticate(deadline_nanos);
}

void EtcdRegistry::Impl::Authenticate(std::int64_t deadline_nanos) {
  using Request = etcdserverpb::AuthenticateRequest;
  using Response = etcdserverpb::AuthenticateResponse;
  auto call = std::make_shared<UnaryEtcdCall<std::string, Request, Response>>();
  call->request.set_name(user_);
  call->request.set_password(password_);
  call->deadline_nanos = deadline_nanos;
  call->wants_token = false;
  call->method = [](EtcdServer& server, grpc::ClientContext* context, const Request* request,
                    Response* response, std::function<void(grpc::Status)> ended) {
    server.auth->async()->Authenticate(context, request, response, std::move(ended));
  };
  call->answered = [](const Response& response, const std::string&) -> absl::StatusOr<std::string> {
    return response.token();
  };
  call->done = [this](const absl::StatusOr<std::string>& token) { Authenticated(token); };
  Start(std::move(call));
}

void EtcdRegistry::Impl::Authenticated(const absl::StatusOr<std::string>& token) {
  authenticating_ = false;
  absl::Status status = token.status();
  if (token.ok()) {
    token_ = *token;
  } else if (IsAuthNotEnabled(status)) {
    LogWarning(absl::StrCat("etcd asks nobody for a password: user ", user_, " is not used"));
    without_token_ = true;
    status = absl::OkStatus();
  }
  // Those that come while these run wait for the next one.
  std::map<CallId, std::function<void(const absl::Status&)>> waiting;
  waiting.swap(waiting_);
  for (auto& [id, then] : waiting) then(status);
}

EtcdRegistry::CallId EtcdRegistry::Impl::Watch(EtcdWatch::Options options) {
  const CallId id = next_id_++;
  const auto watch = std::make_shared<EtcdWatch>(loop_, inbox_, std::move(options));
  watch->OnEnd([this, id](const absl::Status&) {
    waiting_.erase(id);
    watches_.erase(id);
  });
  watches_[id] = watch;
  watch->Begin();
  OpenWatch(id);
  return id;
}

void EtcdRegistry::Impl::OpenWatch(CallId id) {
  if (!watches_.contains(id)) return;
  if (NeedsToken()) {
    WithToken(id, Now() + kTokenNanos, [this, id](const absl::Status& status) {
      const auto found = watches_.find(id);
      if (found == watches_.end()) return;
      if (status.ok()) return OpenWatch(id);
      const std::shared_ptr<EtcdWatch> watch = found->second;
      watch->Break(status);
    });
    return;
  }
  const std::size_t server = servers_->current();
  const std::shared_ptr<EtcdWatch> watch = watches_.at(id);
  watch->OnEnd([this, id, server, token = token_](const absl::Status& why) {
    waiting_.erase(id);
    watches_.erase(id);
    if (IsServersFault(why)) servers_->Failed(server, Now());
    // A watch with an old token is told that it has no permission.
    if (!user_.empty() && (why.code() == absl::StatusCode::kPermissionDenied ||
                           why.code() == absl::StatusCode::kUnauthenticated)) {
      TokenRefused(token);
    }
  });
  watch->Open((*servers_)[server], MakeContext(token_));
}

EtcdRegistry::EtcdRegistry(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EtcdRegistry::~EtcdRegistry() = default;

absl::StatusOr<std::unique_ptr<EtcdRegistry>> EtcdRegistry::Create(const EtcdOptions& options,
                                                                   Loop& loop) {
  absl::StatusOr<std::unique_ptr<EtcdServers>> servers = EtcdServers::Create(options);
  if (!servers.ok()) return servers.status();
  return std::unique_ptr<EtcdRegistry>(
      new EtcdRegistry(std::make_unique<Impl>(options, *std::move(servers), loop)));
}

Registry::CallId EtcdRegistry::Grant(std::int64_t seconds, std::int64_t deadline_nanos,
                                     Done<Lease> done) {
  using Request = etcdserverpb::LeaseGrantRequest;
  using Response = etcdserverpb::LeaseGrantResponse;
  if (seconds < kLeaseSecondsMin || seconds > kLeaseSecondsMax) {
    return impl_->Refuse(std::move(done), absl::InvalidArgumentError(absl::StrCat(
                                              "lease of ", seconds, " s: want ", kLeaseSecondsMin,
                                              " to ", kLeaseSecondsMax)));
  }
  Request request;
  request.set_ttl(seconds);
  return impl_->Unary<Lease, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.lease->async()->LeaseGrant(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string& server) -> absl::StatusOr<Lease> {
        if (!response.error().empty() || response.id() == 0) {
          return absl::UnavailableError(
              absl::StrCat("etcd ", server, ": no lease: ", response.error()));
        }
        return Lease{HeaderOf(response.header()), response.id(), response.ttl()};
      });
}

Registry::CallId EtcdRegistry::KeepAlive(LeaseId lease, std::int64_t deadline_nanos,
                                         Done<Lease> done) {
  auto call = std::make_shared<KeepAliveEtcdCall<Lease>>();
  call->request.set_id(lease);
  call->deadline_nanos = deadline_nanos;
  call->done = std::move(done);
  call->answered = [lease](const etcdserverpb::LeaseKeepAliveResponse& response,
                           const std::string& server) -> absl::StatusOr<Lease> {
    if (response.ttl() <= 0) {
      return absl::NotFoundError(
          absl::StrCat("etcd ", server, ": lease ", absl::Hex(lease), " ended"));
    }
    return Lease{HeaderOf(response.header()), lease, response.ttl()};
  };
  return impl_->Start(std::move(call));
}

Registry::CallId EtcdRegistry::Revoke(LeaseId lease, std::int64_t deadline_nanos,
                                      Done<Header> done) {
  using Request = etcdserverpb::LeaseRevokeRequest;
  using Response = etcdserverpb::LeaseRevokeResponse;
  Request request;
  request.set_id(lease);
  return impl_->Unary<Header, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.lease->async()->LeaseRevoke(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string&) -> absl::StatusOr<Header> {
        return HeaderOf(response.header());
      });
}

namespace {

void Txn(EtcdServer& server, grpc::ClientContext* context, const TxnRequest* from, TxnResponse* to,
         std::function<void(grpc::Status)> ended) {
  server.kv->async()->Txn(context, from, to, std::move(ended));
}

}  // namespace

Registry::CallId EtcdRegistry::Put(PutRequest request, std::int64_t deadline_nanos,
                                   Done<Written> done) {
  absl::Status checked = CheckKey(request.key);
  if (checked.ok() && request.value.size() > kValueBytesMax) {
    checked = absl::InvalidArgumentError(
        absl::StrCat("value of ", request.value.size(), " bytes: want at most ", kValueBytesMax));
  }
  if (checked.ok() && (request.lease == 0 || request.expected < 0)) {
    checked = absl::InvalidArgumentError(absl::StrCat(
        "put of ", request.key, ": want a lease, and an expected revision of at least 0"));
  }
  if (!checked.ok()) return impl_->Refuse(std::move(done), checked);
  TxnRequest txn = Compared(request.key, request.expected);
  etcdserverpb::PutRequest& put = *txn.add_success()->mutable_request_put();
  put.set_key(request.key);
  put.set_value(request.value);
  put.set_lease(request.lease);
  return impl_->Unary<Written, TxnRequest, TxnResponse>(
      std::move(txn), deadline_nanos, std::move(done), Txn,
      [put = std::move(request)](const TxnResponse& response,
                                 const std::string&) -> absl::StatusOr<Written> {
        Written written = WrittenOf(response);
        if (written.done) {
          written.current = Entry{put.key, put.value, written.header.revision, put.lease};
        }
        return written;
      });
}

Registry::CallId EtcdRegistry::Delete(std::string key, Revision expected,
                                      std::int64_t deadline_nanos, Done<Written> done) {
  absl::Status checked = CheckKey(key);
  if (checked.ok() && expected <= 0) {
    checked = absl::InvalidArgumentError(
        absl::StrCat("deletion of ", key, ": want an expected revision above 0"));
  }
  if (!checked.ok()) return impl_->Refuse(std::move(done), checked);
  TxnRequest txn = Compared(key, expected);
  txn.add_success()->mutable_request_delete_range()->set_key(key);
  return impl_->Unary<Written, TxnRequest, TxnResponse>(
      std::move(txn), deadline_nanos, std::move(done), Txn,
      [](const TxnResponse& response, const std::string&) -> absl::StatusOr<Written> {
        return WrittenOf(response);
      });
}

Registry::CallId EtcdRegistry::List(std::string prefix, std::int64_t deadline_nanos,
                                    Done<Listing> done) {
  using Request = etcdserverpb::RangeRequest;
  using Response = etcdserverpb::RangeResponse;
  if (const absl::Status checked = CheckKey(prefix); !checked.ok()) {
    return impl_->Refuse(std::move(done), checked);
  }
  Request request;
  request.set_key(prefix);
  request.set_range_end(EndOfPrefix(prefix));
  return impl_->Unary<Listing, Request, Response>(
      std::move(request), deadline_nanos, std::move(done),
      [](EtcdServer& server, grpc::ClientContext* context, const Request* from, Response* to,
         std::function<void(grpc::Status)> ended) {
        server.kv->async()->Range(context, from, to, std::move(ended));
      },
      [](const Response& response, const std::string&) -> absl::StatusOr<Listing> {
        Listing listing;
        listing.header = HeaderOf(response.header());
        for (const mvccpb::KeyValue& kv : response.kvs()) listing.entries.push_back(EntryOf(kv));
        return listing;
      });
}

Registry::CallId EtcdRegistry::Watch(std::string prefix, Revision from_revision,
                                     std::int64_t silence_nanos, WatchCalls calls) {
  EtcdWatch::Options options;
  options.prefix = std::move(prefix);
  options.from_revision = from_revision;
  options.silence_nanos = std::max(silence_nanos, kSilenceNanosMin);
  options.calls = std::move(calls);
  return impl_->Watch(std::move(options));
}

void EtcdRegistry::Cancel(CallId call) { impl_->Cancel(call); }

}  // namespace kvmill
