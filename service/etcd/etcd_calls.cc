#include "service/etcd/etcd_calls.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/etcd/etcd_errors.h"
#include "storage/core/log.h"

namespace kvmill {
namespace {

constexpr std::int64_t kTryNanosMin = 100'000'000;
// At least, for a token: it is of use to later calls, too, and where checking a password takes
// longer than a call may, none would ever come through.
constexpr std::int64_t kTokenNanos = 5'000'000'000;

}  // namespace

EtcdCalls::~EtcdCalls() {
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

Registry::CallId EtcdCalls::Enter(std::shared_ptr<EtcdCall> call) {
  const Registry::CallId id = next_id_++;
  calls_[id] = std::move(call);
  return id;
}

Registry::CallId EtcdCalls::Start(std::shared_ptr<EtcdCall> call) {
  EtcdCall& started = *call;
  const Registry::CallId id = Enter(std::move(call));
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

Registry::CallId EtcdCalls::Refuse(std::shared_ptr<EtcdCall> call, const absl::Status& why) {
  EtcdCall& refused = *call;
  const Registry::CallId id = Enter(std::move(call));
  refused.timer = loop_.After(0, [this, id, why] {
    calls_.at(id)->timer = 0;
    Finish(id, why);
  });
  return id;
}

std::shared_ptr<grpc::ClientContext> EtcdCalls::MakeContext(const std::string& token) const {
  auto context = std::make_shared<grpc::ClientContext>();
  context->AddMetadata("hasleader", "true");  // Else a server that is cut off would answer.
  if (!token.empty()) context->AddMetadata("token", token);
  return context;
}

void EtcdCalls::Try(Registry::CallId id) {
  const std::shared_ptr<EtcdCall> call = calls_.at(id);
  if (call->wants_token && NeedsToken()) {
    const std::int64_t deadline_nanos = std::max(call->deadline_nanos, Now() + kTokenNanos);
    WithToken(id, deadline_nanos, [this, id](const absl::Status& status) {
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

void EtcdCalls::Tried(Registry::CallId id, std::uint64_t tries, const grpc::Status& status) {
  const auto found = calls_.find(id);
  if (found == calls_.end() || found->second->tries != tries) return;
  EtcdCall& call = *found->second;
  call.try_context = nullptr;
  if (status.ok()) {
    servers_->Answered(call.server_index);
    return Finish(id, absl::OkStatus());
  }
  const EtcdServer& server = (*servers_)[call.server_index];
  const absl::Status error = FromEtcd(status, server.name, server.tls, user_);
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

std::shared_ptr<EtcdCall> EtcdCalls::Take(Registry::CallId id) {
  auto node = calls_.extract(id);
  if (node.empty()) return nullptr;
  waiting_.erase(id);
  if (node.mapped()->timer != 0) loop_.Cancel(std::exchange(node.mapped()->timer, 0));
  return std::move(node.mapped());
}

void EtcdCalls::Finish(Registry::CallId id, const absl::Status& status) {
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

void EtcdCalls::Cancel(Registry::CallId id) {
  if (const std::shared_ptr<EtcdCall> call = Take(id)) {
    call->Drop();
    GiveUp(*call);
  } else if (auto node = watches_.extract(id); !node.empty()) {
    waiting_.erase(id);
    node.mapped()->Stop();
  }
}

void EtcdCalls::TokenRefused(const std::string& token) {
  // Others may have fetched a newer one meanwhile.
  if (token != token_) return;
  token_.clear();
  without_token_ = false;
}

void EtcdCalls::WithToken(Registry::CallId id, std::int64_t deadline_nanos,
                          std::function<void(const absl::Status&)> then) {
  waiting_[id] = std::move(then);
  if (!std::exchange(authenticating_, true)) Authenticate(deadline_nanos);
}

void EtcdCalls::Authenticate(std::int64_t deadline_nanos) {
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

void EtcdCalls::Authenticated(const absl::StatusOr<std::string>& token) {
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
  std::map<Registry::CallId, std::function<void(const absl::Status&)>> waiting;
  waiting.swap(waiting_);
  for (auto& [id, then] : waiting) then(status);
}

Registry::CallId EtcdCalls::Watch(EtcdWatch::Options options) {
  const Registry::CallId id = next_id_++;
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

void EtcdCalls::OpenWatch(Registry::CallId id) {
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

}  // namespace kvmill
