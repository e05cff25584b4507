#include "service/session_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/convert.h"
#include "service/engine_service.h"
#include "service/request.h"
#include "service/status_grpc.h"
#include "storage/core/log.h"
#include "storage/core/status_macros.h"

namespace kvmill {

SessionCall* SessionCall::Start(ServiceContext& context, const absl::StatusOr<Caller>& caller) {
  auto call = std::make_shared<SessionCall>(context);
  call->self_ = call;
  MutexLock lock(call->mu_);
  if (!caller.ok()) {
    call->Finish(caller.status());
  } else {
    call->caller_ = *caller;
    call->StartRead(&call->request_);
  }
  return call.get();
}

void SessionCall::OnReadDone(bool ok) {
  if (!ok) {  // Half-closed without `close`, or broken: the session may be resumed.
    if (!id_.empty()) {
      LogSession("ends");
      context_.sessions.Detach(id_, this);
    }
    MutexLock lock(mu_);
    Finish(absl::OkStatus());
    return;
  }
  const absl::Status status = Handle();
  MutexLock lock(mu_);
  if (!status.ok()) {
    Finish(status);
  } else if (!finished_) {
    Advance();
  }
}

absl::Status SessionCall::Handle() {
  if (id_.empty()) {
    if (!request_.has_open()) {
      return absl::InvalidArgumentError("the first message of a Session must be `open`");
    }
    KVMILL_RETURN_IF_ERROR(CheckProtocolVersion(request_.open().client().protocol_version()));
    v1::SessionOpened opened;
    const SessionTable::Options& options = context_.sessions.options();
    FillHello(context_, opened.mutable_hello());
    opened.set_heartbeat_ms(static_cast<std::uint32_t>(options.silence_nanos_max / 3'000'000));
    opened.set_resume_grace_ms(
        static_cast<std::uint32_t>(context_.sessions.resume_grace_nanos() / 1'000'000));
    opened.set_lease_ms_max(static_cast<std::uint32_t>(options.lease_nanos_max / 1'000'000));
    KVMILL_ASSIGN_OR_RETURN(
        id_,
        context_.sessions.Open(caller_, request_.open().resume_session_id(), shared_from_this()));
    opened.set_session_id(id_);
    LogSession("begins");
    MutexLock lock(mu_);
    opened_ = std::move(opened);
    if (context_.draining.load(std::memory_order_relaxed)) drain_ = true;
    return absl::OkStatus();
  }
  if (request_.has_close()) {
    context_.sessions.Close(id_, this);  // Calls OnEnd.
    return absl::OkStatus();
  }
  if (request_.has_cancel()) return HandleCancel();
  if (!request_.has_heartbeat()) {
    return absl::InvalidArgumentError(
        "a message of a Session must be a heartbeat, `cancel` or `close`");
  }
  context_.sessions.Heard(id_, this);
  MutexLock lock(mu_);
  heartbeat_ = request_.heartbeat().sequence();
  return absl::OkStatus();
}

void SessionCall::LogSession(const char* does) const {
  // Not the whole id: whoever has it may go on with the session.
  std::vector<LogField> fields = FieldsOf(caller_.request.get());
  fields.push_back({"session", absl::BytesToHexString(id_.substr(0, 4))});
  fields.push_back({"tenant", caller_.tenant});
  LogDebug(absl::StrCat("a stream of a session ", does), fields);
}

absl::Status SessionCall::HandleCancel() {
  const v1::SessionCancel& cancel = request_.cancel();
  if (cancel.stores_size() > kCancelledStoresMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        cancel.stores_size(), " stores in one cancellation: at most ", kCancelledStoresMax));
  }
  context_.sessions.Heard(id_, this);
  {
    MutexLock lock(mu_);
    ++cancels_;
  }
  context_.sessions.page_readers().Cancel(
      caller_.tenant, cancel.session_id().empty() ? id_ : cancel.session_id(),
      absl::MakeConstSpan(cancel.stores().data(), static_cast<std::size_t>(cancel.stores_size())),
      [self = shared_from_this(), number = cancel.number()](std::uint64_t stores) {
        self->Cancelled(number, stores);
      });
  MutexLock lock(mu_);
  if (finished_) return absl::OkStatus();
  // Others may be answered sooner.
  if (cancels_ < kCancelsMax) {
    StartRead(&request_);
  } else {
    read_waits_ = true;
  }
  return absl::OkStatus();
}

void SessionCall::Cancelled(std::uint64_t number, std::uint64_t stores) {
  MutexLock lock(mu_);
  v1::SessionCompletion& completion = completions_.emplace_back();
  completion.set_number(number);
  completion.set_stores(stores);
  Advance();
}

void SessionCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ok && !finished_) Advance();
}

void SessionCall::OnCancel() {
  // OnReadDone comes, too, and detaches.
  MutexLock lock(mu_);
  Finish(absl::CancelledError("the caller gave up"));
}

void SessionCall::OnDone() {
  if (!id_.empty()) {
    LogSession("ends");
    context_.sessions.Detach(id_, this);
  }
  self_.reset();  // Last statement: may destroy this.
}

void SessionCall::OnLeasesExpired(const std::vector<LeaseId>& leases) {
  MutexLock lock(mu_);
  const std::size_t room = kExpiredMax - std::min(kExpiredMax, expired_.size());
  expired_.insert(expired_.end(), leases.begin(),
                  leases.begin() + static_cast<std::ptrdiff_t>(std::min(room, leases.size())));
  Advance();
}

void SessionCall::OnDrain() {
  MutexLock lock(mu_);
  drain_ = true;
  Advance();
}

void SessionCall::OnEnd(const absl::Status& why) {
  MutexLock lock(mu_);
  Finish(why);
}

void SessionCall::Finish(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>::Finish(StatusToGrpc(status));
}

void SessionCall::Advance() {
  if (writing_ || finished_) return;
  reply_.Clear();
  if (opened_.has_value()) {
    *reply_.mutable_opened() = *std::move(opened_);
    opened_.reset();
    opened_written_ = true;
    StartRead(&request_);
  } else if (!opened_written_) {
    return;
  } else if (drain_) {
    drain_ = false;
    reply_.mutable_drain();
  } else if (!expired_.empty()) {
    const std::size_t count = std::min(expired_.size(), kExpiredPerMessage);
    reply_.mutable_leases_expired()->mutable_leases()->Add(
        expired_.begin(), expired_.begin() + static_cast<std::ptrdiff_t>(count));
    expired_.erase(expired_.begin(), expired_.begin() + static_cast<std::ptrdiff_t>(count));
  } else if (!completions_.empty()) {
    *reply_.mutable_completion() = std::move(completions_.front());
    completions_.pop_front();
    --cancels_;
    if (std::exchange(read_waits_, false)) StartRead(&request_);
  } else if (heartbeat_.has_value()) {
    reply_.mutable_heartbeat()->set_sequence(*heartbeat_);
    heartbeat_.reset();
    StartRead(&request_);  // The next one only after the answer to this one is on its way.
  } else {
    return;
  }
  writing_ = true;
  StartWrite(&reply_);
}

}  // namespace kvmill
