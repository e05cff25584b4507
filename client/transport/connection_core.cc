#include "client/transport/connection_core.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/transport/connection_core_internal.h"
#include "storage/core/check.h"
#include "storage/core/log.h"

namespace kvmill {

ConnectionCore::ConnectionCore(const ConnectionSettings& settings, TransportLoop* loop,
                               ConnectionOwner* owner, TransportCounters* counters, OfferBook* book)
    : settings_(settings), loop_(loop), owner_(owner), counters_(counters), book_(book) {}

ConnectionCore::~ConnectionCore() {
  KVMILL_CHECK(state_ == State::kClosed || wire_ == nullptr);
  EraseSecret(absl::MakeSpan(agreement_.sending_key));
  EraseSecret(absl::MakeSpan(agreement_.receiving_key));
}

void ConnectionCore::Dial(std::unique_ptr<Wire> wire, const Offer& offer) {
  wire_ = std::move(wire);
  info_.dialed = true;
  dialer_ = std::make_unique<DialerHandshake>(settings_.side, offer);
  timers_.emplace(loop_->NowNanos() + settings_.handshake_nanos, Timer{TimerKind::kHandshake, {}});
  SendHandshake(dialer_->hello());
}

void ConnectionCore::Accept(std::unique_ptr<Wire> wire) {
  wire_ = std::move(wire);
  acceptor_ = std::make_unique<AcceptorHandshake>(settings_.side, book_);
  timers_.emplace(loop_->NowNanos() + settings_.handshake_nanos, Timer{TimerKind::kHandshake, {}});
}

void ConnectionCore::SendHandshake(absl::Span<const std::byte> message) {
  auto* const out = new HandshakeOut;
  out->bytes.assign(message.begin(), message.end());
  out->counters = counters_;
  counters_->operations.fetch_add(1, std::memory_order_relaxed);
  wire_->Send({.channel = WireChannel::kHandshake, .header = out->bytes}, out);
}

void ConnectionCore::OnHandshake(absl::Span<const std::byte> message) {
  std::vector<std::byte> reply;
  if (dialer_ != nullptr) {
    absl::StatusOr<Agreement> agreement = dialer_->OnMessage(message, &reply);
    if (!agreement.ok()) return Break(agreement.status());
    SendHandshake(reply);
    return BecomeOpen(*agreement);
  }
  absl::StatusOr<std::optional<Agreement>> agreement =
      acceptor_->OnMessage(message, loop_->NowNanos(), &reply);
  if (!agreement.ok()) return Refuse(reply, agreement.status());
  if (!agreement->has_value()) return SendHandshake(reply);
  BecomeOpen(**agreement);
}

void ConnectionCore::Refuse(absl::Span<const std::byte> refusal, const absl::Status& why) {
  SendHandshake(refusal);
  why_ = why;
  state_ = State::kLeaving;  // The dialer hangs up when it has read it.
  timers_.emplace(loop_->NowNanos() + settings_.grace_nanos, Timer{TimerKind::kLeave, {}});
}

void ConnectionCore::BecomeOpen(const Agreement& agreement) {
  agreement_ = agreement;
  info_.peer = agreement.peer;
  info_.address = wire_->peer_address();
  info_.transport = wire_->transport_name();
  info_.encrypted = agreement.encrypted;
  info_.version = agreement.version;
  info_.owner_tag = agreement.owner_tag;
  bool only_tcp = true;
  for (const absl::string_view name : absl::StrSplit(info_.transport, ',')) {
    only_tcp = only_tcp && absl::StartsWith(name, "tcp/");
  }
  info_.slower_than_expected = only_tcp && (settings_.rdma_expected || settings_.rdma_required);
  if (info_.slower_than_expected && settings_.rdma_required) {
    return Break(absl::FailedPreconditionError(
        absl::StrCat("RDMA is required, ", info_.address, " negotiated ", info_.transport)));
  }
  if (info_.slower_than_expected) {
    LogWarning(absl::StrCat("transport: RDMA was expected, the connection to ", info_.address,
                            " uses ", info_.transport));
  }
  segment_bytes_max_ =
      std::min(settings_.limits.segment_bytes_max, agreement.peer_segment_bytes_max);
  if (agreement.encrypted) {
    sealing_ =
        std::make_unique<SegmentCipher>(agreement.sending_key, SegmentCipher::Direction::kSeal);
    opening_ =
        std::make_unique<SegmentCipher>(agreement.receiving_key, SegmentCipher::Direction::kOpen);
  }
  dialer_.reset();
  acceptor_.reset();
  timers_.clear();  // Only the handshake's.
  state_ = State::kOpen;
  was_open_ = true;
  loop_->Post([self = shared_from_this()] { self->owner_->OnOpen(self); });
}

CallId ConnectionCore::Start(Call call) {
  const CallId handle = next_call_.fetch_add(1, std::memory_order_relaxed);
  auto started = std::make_shared<StartedCall>(std::move(call));
  started->handle = handle;
  counters_->calls_started.fetch_add(1, std::memory_order_relaxed);
  OnLoop([this, started = std::move(started)]() mutable { StartOnLoop(std::move(started)); });
  return handle;
}

void ConnectionCore::Cancel(CallId id) {
  loop_->Post([self = shared_from_this(), id] {
    const auto found = self->by_call_.find(id);
    if (found == self->by_call_.end()) return;
    self->End(std::shared_ptr<StartedCall>(found->second), absl::CancelledError("cancelled"));
  });
}

void ConnectionCore::Close() {
  loop_->Post([self = shared_from_this()] {
    if (self->state_ == State::kHandshake) {
      self->Break(absl::CancelledError("closed before it was open"));
    } else if (self->state_ == State::kOpen) {
      self->SendControl(SegmentKind::kGoodbye, 0);
      self->Leave(absl::UnavailableError("the connection was closed on this side"));
    }
  });
}

// Nothing new in either direction; the peer was told and hangs up, or else the timer does.
void ConnectionCore::Leave(const absl::Status& why) {
  state_ = State::kLeaving;
  why_ = why;
  timers_.emplace(loop_->NowNanos() + settings_.grace_nanos, Timer{TimerKind::kLeave, {}});
  std::vector<std::shared_ptr<StartedCall>> started;
  for (const auto& [handle, call] : by_call_) started.push_back(call);
  for (const auto& call : started) End(call, why);
  std::vector<std::shared_ptr<ServedCall>> served;
  for (const auto& [id, call] : served_) served.push_back(call);
  for (const auto& call : served) CancelServed(call, why);
}

void ConnectionCore::OnBroken(const absl::Status& why) {
  // Whoever is leaving waits for this.
  Break(state_ == State::kLeaving ? why_ : why);
}

void ConnectionCore::Break(const absl::Status& why) {
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  // The wire may complete operations at once, so that results must be known before.
  Leave(why);
  state_ = State::kClosing;
  timers_.clear();
  for (auto& [id, call] : started_) call->timer.reset();
  for (auto& [id, call] : served_) call->timer.reset();
  wire_->Close();
}

void ConnectionCore::OnClosed() {
  state_ = State::kClosed;
  KVMILL_CHECK(segments_in_flight_ == 0);
  // The wire has no buffer any more: what waited for the peer's last word is over.
  std::vector<std::shared_ptr<StartedCall>> started;
  for (const auto& [id, call] : started_) started.push_back(call);
  for (const auto& call : started) {
    call->peer_ended = true;
    CheckStarted(call);
  }
  KVMILL_CHECK(by_call_.empty() && started_.empty());
  std::vector<std::shared_ptr<ServedCall>> served;
  for (const auto& [id, call] : served_) served.push_back(call);
  for (const auto& call : served) CheckServed(call);
  loop_->Post([self = shared_from_this()] {
    self->owner_->OnEnded(self, self->was_open_, self->why_);
    self->wire_.reset();
  });
}

void ConnectionCore::SetTimer(const ExchangePtr& exchange, TimerKind kind, std::int64_t nanos) {
  ClearTimer(exchange);
  if (state_ != State::kOpen && state_ != State::kLeaving) return;
  exchange->timer = timers_.emplace(nanos, Timer{kind, exchange});
}

void ConnectionCore::ClearTimer(const ExchangePtr& exchange) {
  if (!exchange->timer.has_value()) return;
  timers_.erase(*exchange->timer);
  exchange->timer.reset();
}

void ConnectionCore::OnTime(std::int64_t now_nanos) {
  while (!timers_.empty() && timers_.begin()->first <= now_nanos) {
    const Timer timer = std::move(timers_.begin()->second);
    const ExchangePtr exchange = timer.exchange.lock();
    timers_.erase(timers_.begin());
    if (exchange != nullptr) exchange->timer.reset();
    switch (timer.kind) {
      case TimerKind::kHandshake:
        Break(absl::DeadlineExceededError("no handshake in time"));
        break;
      case TimerKind::kLeave:
        Break(why_);
        break;
      case TimerKind::kDeadline:
        if (exchange == nullptr) break;
        if (exchange->served) {
          CancelServed(std::static_pointer_cast<ServedCall>(exchange),
                       absl::CancelledError("its caller's deadline has passed"));
        } else {
          End(std::static_pointer_cast<StartedCall>(exchange),
              absl::DeadlineExceededError("no response in time"));
        }
        break;
      case TimerKind::kGrace:
        if (exchange == nullptr || exchange->out.in_flight + exchange->in.in_flight == 0) break;
        // Buffers that the network does not give back: only the end of the connection frees them.
        Break(absl::UnavailableError(
            "the peer takes no bytes: the connection was given up to free their buffers"));
        break;
    }
  }
}

}  // namespace kvmill
