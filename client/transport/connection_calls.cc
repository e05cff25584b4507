// ConnectionCore: calls of both directions, from their start to their end.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport/connection_core.h"
#include "client/transport/connection_core_internal.h"
#include "storage/core/check.h"

namespace kvmill {

namespace {

constexpr std::int64_t kNanosPerMilli = 1'000'000;
constexpr std::int64_t kTimeoutMillisMax = std::int64_t{24} * 3600 * 1000;

}  // namespace

// What the handler gets.
class ServedCallHandle final : public IncomingCall {
 public:
  ServedCallHandle(std::shared_ptr<ConnectionCore> core,
                   std::shared_ptr<ConnectionCore::ServedCall> call)
      : core_(std::move(core)), call_(std::move(call)) {}
  ~ServedCallHandle() override {
    if (!responded_) Respond({.status = absl::InternalError("the call was dropped")});
  }

  absl::Span<const std::byte> header() const override { return call_->header; }
  std::uint64_t payload_bytes() const override { return call_->in.payload_bytes; }
  std::int64_t deadline_nanos() const override { return call_->deadline_nanos; }
  bool cancelled() const override { return call_->cancelled.load(std::memory_order_relaxed); }

  void Receive(DestinationSpans destination, MemoryKind memory,
               absl::AnyInvocable<void(absl::Status)> done) override {
    core_->OnLoop([core = core_.get(), call = call_, destination = std::move(destination), memory,
                   done = std::move(done)]() mutable {
      core->ReceiveOnLoop(call, std::move(destination), memory, std::move(done));
    });
  }

  void Respond(Reply reply) override {
    KVMILL_CHECK(!responded_);
    responded_ = true;
    core_->OnLoop([core = core_.get(), call = call_, reply = std::move(reply)]() mutable {
      core->RespondOnLoop(call, std::move(reply));
    });
  }

 private:
  const std::shared_ptr<ConnectionCore> core_;
  const std::shared_ptr<ConnectionCore::ServedCall> call_;
  bool responded_ = false;
};

void ConnectionCore::StartOnLoop(std::shared_ptr<StartedCall> call) {
  by_call_.emplace(call->handle, call);
  call->request_bytes = TotalBytes(call->call.payload);
  if (state_ != State::kOpen) {
    const std::string why = absl::StrCat("the connection has ended: ", why_.message());
    return End(call,
               absl::IsCancelled(why_) ? absl::CancelledError(why) : absl::UnavailableError(why));
  }
  if (call->call.timeout_nanos <= 0) {
    return End(call, absl::InvalidArgumentError("a call needs a positive time-out"));
  }
  if (call->call.header.size() > kCallHeaderBytesMax) {
    return End(call, absl::InvalidArgumentError(
                         absl::StrCat("the header has ", call->call.header.size(), " bytes, up to ",
                                      kCallHeaderBytesMax, " are sent")));
  }
  if (call->request_bytes > agreement_.peer_request_bytes_max) {
    return End(call, absl::InvalidArgumentError(absl::StrCat(
                         "the request has ", call->request_bytes, " bytes, the peer takes ",
                         agreement_.peer_request_bytes_max)));
  }
  if (agreement_.encrypted && (call->call.payload_memory != MemoryKind::kHost ||
                               call->call.place_memory != MemoryKind::kHost)) {
    return End(
        call, absl::FailedPreconditionError("device memory travels only on plaintext connections"));
  }
  call->deadline_nanos =
      loop_->NowNanos() + std::min(call->call.timeout_nanos, kTimeoutMillisMax * kNanosPerMilli);
  if (waiting_.empty() && FitsWindow(*call)) {
    SetTimer(call, TimerKind::kDeadline, call->deadline_nanos);
    Admit(call);
    return Pump();
  }
  if (waiting_.size() >= settings_.limits.waiting_calls_max) {
    return End(call, absl::ResourceExhaustedError(
                         absl::StrCat(waiting_.size(), " calls wait for the peer already")));
  }
  SetTimer(call, TimerKind::kDeadline, call->deadline_nanos);
  waiting_.push_back(std::move(call));
}

bool ConnectionCore::FitsWindow(const StartedCall& call) const {
  return started_.size() < agreement_.peer_calls_max &&
         window_bytes_ + call.request_bytes <= agreement_.peer_request_bytes_max;
}

void ConnectionCore::Admit(const std::shared_ptr<StartedCall>& call) {
  call->admitted = true;
  call->id = next_id_++;
  started_.emplace(call->id, call);
  window_bytes_ += call->request_bytes;
  call->out.Set(SegmentKind::kRequest, call->id, std::move(call->call.header),
                std::move(call->call.payload), call->call.payload_memory);
  call->out.flags = call->call.place_memory == MemoryKind::kHost ? 0 : kSegmentFlagResponseStays;
  const std::int64_t left = call->deadline_nanos - loop_->NowNanos();
  call->out.timeout_ms = static_cast<std::uint32_t>(
      std::max<std::int64_t>(1, (left + kNanosPerMilli - 1) / kNanosPerMilli));
  Queue(call);
}

void ConnectionCore::AdmitWaiting() {
  if (state_ != State::kOpen) return;
  bool any = false;
  while (!waiting_.empty()) {
    const std::shared_ptr<StartedCall> call = waiting_.front();
    if (!call->result.has_value()) {
      if (!FitsWindow(*call)) break;
      Admit(call);
      any = true;
    }
    waiting_.pop_front();
  }
  if (any) Pump();
}

// The call's result is a failure of this side.
void ConnectionCore::End(const std::shared_ptr<StartedCall>& call, const absl::Status& why) {
  if (call->result.has_value()) return;
  call->result = why;
  StopExchange(call);
  if (call->admitted && !call->peer_ended && state_ == State::kOpen) {
    SendControl(SegmentKind::kCancel, call->id);
  }
  if (!call->admitted) {
    const auto found = std::find(waiting_.begin(), waiting_.end(), call);
    if (found != waiting_.end()) waiting_.erase(found);
  }
  if (call->out.in_flight + call->in.in_flight != 0) {
    SetTimer(call, TimerKind::kGrace, loop_->NowNanos() + settings_.grace_nanos);
  } else {
    ClearTimer(call);
  }
  CheckStarted(call);
}

void ConnectionCore::CheckStarted(const std::shared_ptr<StartedCall>& call) {
  if (!call->result.has_value() && call->in.complete() && call->in.in_flight == 0) {
    call->result = call->response_status;
    // The peer answered: what is left of the request interests nobody.
    if (!call->out.all_cut() && state_ == State::kOpen) {
      SendControl(SegmentKind::kCancel, call->id);
    }
    StopExchange(call);
    if (call->out.in_flight != 0) {
      SetTimer(call, TimerKind::kGrace, loop_->NowNanos() + settings_.grace_nanos);
    }
  }
  if (call->result.has_value() && !call->done_ran && call->out.in_flight == 0 &&
      call->in.in_flight == 0) {
    call->done_ran = true;
    ClearTimer(call);
    by_call_.erase(call->handle);
    loop_->Post([call, counters = counters_] {
      absl::StatusOr<Response> result =
          call->result->ok() ? absl::StatusOr<Response>(std::move(call->response)) : *call->result;
      counters->calls_started.fetch_sub(1, std::memory_order_relaxed);
      if (call->call.done) call->call.done(std::move(result));
      call->call.done = nullptr;
      call->call.place = nullptr;
    });
  }
  if (call->done_ran && call->admitted && (call->peer_ended || call->in.consumed()) &&
      started_.erase(call->id) != 0) {
    window_bytes_ -= call->request_bytes;
    AdmitWaiting();
  }
}

// Call ids ascend, but first segments may overtake each other.
bool ConnectionCore::IsNewCall(std::uint64_t id) {
  if (served_missing_.erase(id) != 0) return true;
  if (id <= served_max_) return false;
  if (id - served_max_ + served_missing_.size() > std::uint64_t{2} * settings_.limits.calls_max) {
    Break(absl::ResourceExhaustedError(
        absl::StrCat("the peer's call has id ", id, " after ", served_max_)));
    return false;
  }
  for (std::uint64_t missing = served_max_ + 1; missing < id; ++missing) {
    served_missing_.insert(missing);
  }
  served_max_ = id;
  return true;
}

bool ConnectionCore::OnRequest(const WireMessage& message, const SegmentHeader& header,
                               absl::Span<const std::byte> head) {
  std::shared_ptr<ServedCall> call;
  const auto found = served_.find(header.call_id);
  if (found != served_.end()) {
    call = found->second;
  } else {
    if (!IsNewCall(header.call_id)) return false;  // Of a call that is over.
    if (served_.size() >= settings_.limits.calls_max) {
      Break(absl::ResourceExhaustedError(absl::StrCat("the peer has more calls than the ",
                                                      settings_.limits.calls_max, " it may have")));
      return false;
    }
    call = std::make_shared<ServedCall>();
    call->id = header.call_id;
    served_.emplace(call->id, call);
    counters_->calls_served.fetch_add(1, std::memory_order_relaxed);
    if (header.payload_bytes > settings_.limits.request_bytes_max) {
      Break(absl::ResourceExhaustedError(
          absl::StrCat("the peer's request has ", header.payload_bytes, " bytes")));
      return false;
    }
  }
  if (!NoteSegment(call, header)) return false;
  const bool taken = PlaceSegment(call, header, message.data, message.token);
  if (state_ != State::kOpen) return taken;
  if (header.offset == 0 && !call->delivered) {
    call->delivered = true;
    call->header.assign(head.begin(), head.end());
    call->deadline_nanos = loop_->NowNanos() + std::int64_t{header.timeout_ms} * kNanosPerMilli;
    call->out.stays = (header.flags & kSegmentFlagResponseStays) != 0;
    SetTimer(call, TimerKind::kDeadline, call->deadline_nanos);
    loop_->Post([self = shared_from_this(), call] {
      self->owner_->OnCall(self, std::make_unique<ServedCallHandle>(self, call));
    });
  }
  CheckServed(call);
  return taken;
}

void ConnectionCore::ReceiveOnLoop(const std::shared_ptr<ServedCall>& call,
                                   DestinationSpans destination, MemoryKind memory,
                                   absl::AnyInvocable<void(absl::Status)> done) {
  absl::Status status = call->cancelled.load() ? call->cancel_status : absl::OkStatus();
  if (status.ok() && (call->replied || call->in.placed)) {
    status = absl::FailedPreconditionError("Receive comes once, before Respond");
  }
  if (status.ok() && memory != MemoryKind::kHost && agreement_.encrypted) {
    status = absl::FailedPreconditionError("device memory travels only on plaintext connections");
  }
  if (status.ok()) status = call->in.Place(std::move(destination), memory);
  if (!status.ok()) {
    loop_->Post([done = std::move(done), status]() mutable { done(status); });
    return;
  }
  call->receive_done = std::move(done);
  PlaceHeld(call);
  CheckServed(call);
}

void ConnectionCore::RespondOnLoop(const std::shared_ptr<ServedCall>& call,
                                   IncomingCall::Reply reply) {
  call->replied = true;
  call->reply_done = std::move(reply.done);
  if (call->in.in_flight == 0 && !call->receive_done) {
    call->in.refusing = true;  // A request that was not received is not wanted.
    DropHeld(call);
  }
  if (call->cancelled.load()) {
    call->send_status = call->cancel_status;
    call->out.stopped = true;
    if (state_ == State::kOpen) SendControl(SegmentKind::kEnded, call->id);
    return CheckServed(call);
  }
  if (reply.header.size() > kCallHeaderBytesMax) {
    reply.status = absl::InternalError(
        absl::StrCat("the responder's header has ", reply.header.size(), " bytes"));
  }
  if (agreement_.encrypted && reply.payload_memory != MemoryKind::kHost) {
    reply.status =
        absl::FailedPreconditionError("device memory travels only on plaintext connections");
  }
  if (!reply.status.ok()) {
    const absl::string_view text = reply.status.message().substr(0, kCallHeaderBytesMax);
    const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
    reply.header.assign(bytes, bytes + text.size());
    reply.payload.clear();
  }
  call->out.code = static_cast<std::uint32_t>(reply.status.code());
  call->out.Set(SegmentKind::kResponse, call->id, std::move(reply.header), std::move(reply.payload),
                reply.payload_memory);
  Queue(call);
  Pump();
  CheckServed(call);
}

void ConnectionCore::CancelServed(const std::shared_ptr<ServedCall>& call,
                                  const absl::Status& why) {
  if (call->cancelled.load()) return;
  call->cancel_status = why;
  call->cancelled.store(true, std::memory_order_relaxed);
  const bool cut_short = call->replied && !call->out.all_cut();
  if (cut_short) call->send_status = why;
  StopExchange(call);
  if (cut_short && state_ == State::kOpen) SendControl(SegmentKind::kEnded, call->id);
  if (call->out.in_flight + call->in.in_flight != 0) {
    SetTimer(call, TimerKind::kGrace, loop_->NowNanos() + settings_.grace_nanos);
  } else {
    ClearTimer(call);
  }
  CheckServed(call);
}

void ConnectionCore::CheckServed(const std::shared_ptr<ServedCall>& call) {
  const bool cancelled = call->cancelled.load(std::memory_order_relaxed);
  if (call->receive_done && call->in.in_flight == 0 && (call->in.complete() || cancelled)) {
    loop_->Post([done = std::move(call->receive_done),
                 status = call->in.complete() ? absl::OkStatus() : call->cancel_status]() mutable {
      done(status);
    });
    call->receive_done = nullptr;
  }
  if (!call->delivered && cancelled && call->in.in_flight == 0) {
    call->replied = true;  // Nobody will.
    call->out.stopped = true;
    if (state_ == State::kOpen) SendControl(SegmentKind::kEnded, call->id);
    call->delivered = true;
  }
  if (call->replied && !call->reply_finished && call->out.in_flight == 0 &&
      (call->out.stopped || call->out.all_cut())) {
    call->reply_finished = true;
    if (call->reply_done) {
      loop_->Post([done = std::move(call->reply_done), status = call->send_status]() mutable {
        done(status);
      });
      call->reply_done = nullptr;
    }
  }
  if (call->reply_finished && call->in.in_flight == 0 && !call->receive_done &&
      served_.erase(call->id) != 0) {
    ClearTimer(call);
    DropHeld(call);
    counters_->calls_served.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace kvmill
