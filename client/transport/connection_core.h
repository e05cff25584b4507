// One connection: handshake, encryption, calls in both directions, windows and deadlines, above any
// Wire. Internal to client/transport/.
//
// A call is an Exchange: on the caller's side a StartedCall (request out, response in), on the
// other a ServedCall (request in, response out). An exchange ends when its result is known and the
// wire has none of its buffers; the caller keeps its place in the peer's window until the peer is
// through with it as well.
#ifndef KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_H_
#define KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport/handshake.h"
#include "client/transport/message.h"
#include "client/transport/transport.h"
#include "client/transport/wire.h"

namespace kvmill {

class ConnectionCore;

// Counts over all connections of a transport. Any stale value was true a moment ago.
struct TransportCounters {
  std::atomic<std::uint64_t> calls_started{0}, calls_served{0}, operations{0}, held_bytes{0};
  std::atomic<std::uint64_t> bytes_sent{0}, bytes_received{0};
};

// What a connection tells its transport; on the loop, never from within a call into the connection.
class ConnectionOwner {
 public:
  virtual void OnOpen(const std::shared_ptr<ConnectionCore>& core) = 0;
  // Last. `was_open` says whether OnOpen came.
  virtual void OnEnded(const std::shared_ptr<ConnectionCore>& core, bool was_open,
                       const absl::Status& why) = 0;
  virtual void OnCall(const std::shared_ptr<ConnectionCore>& core,
                      std::unique_ptr<IncomingCall> call) = 0;

 protected:
  ~ConnectionOwner() = default;
};

struct ConnectionSettings {
  HandshakeSide side;
  TransportLimits limits;
  std::int64_t handshake_nanos = 0;
  std::int64_t grace_nanos = 0;
  bool rdma_expected = false;
  bool rdma_required = false;
};

// The public methods of Connection: any thread. Everything else: the loop.
class ConnectionCore final : public PeerConnection,
                             public WireEvents,
                             public std::enable_shared_from_this<ConnectionCore> {
 public:
  // All outlive it.
  ConnectionCore(const ConnectionSettings& settings, TransportLoop* loop, ConnectionOwner* owner,
                 TransportCounters* counters, OfferBook* book);
  ~ConnectionCore() override;

  // One of them, once, before anything else.
  void Dial(std::unique_ptr<Wire> wire, const Offer& offer);
  void Accept(std::unique_ptr<Wire> wire);

  const ConnectionInfo& info() const override { return info_; }
  CallId Start(Call call) override;
  void Cancel(CallId id) override;
  void Close() override;
  bool RunUntil(absl::FunctionRef<bool()> done) override { return loop_->RunUntil(done); }

  bool OnMessage(const WireMessage& message) override;
  void OnBroken(const absl::Status& why) override;
  void OnClosed() override;

  // What is due by now; and when something is due next (INT64_MAX: nothing).
  void OnTime(std::int64_t now_nanos);
  std::int64_t next_nanos() const { return timers_.empty() ? INT64_MAX : timers_.begin()->first; }
  // Ends at once, without a word to the peer.
  void Break(const absl::Status& why);
  bool dialed() const { return dialer_ != nullptr || info_.dialed; }
  bool open() const { return was_open_; }
  bool heard() const { return heard_; }  // Anything from the peer.

 private:
  friend class ServedCallHandle;
  enum class State { kHandshake, kOpen, kLeaving, kClosing, kClosed };
  enum class TimerKind { kHandshake, kLeave, kDeadline, kGrace };

  struct Exchange;
  struct Timer {
    TimerKind kind;
    std::weak_ptr<Exchange> exchange;
  };
  using Timers = std::multimap<std::int64_t, Timer>;

  struct Exchange {
    explicit Exchange(bool is_served) : served(is_served) {}
    virtual ~Exchange() = default;
    const bool served;
    std::uint64_t id = 0;
    OutgoingMessage out;
    IncomingMessage in;
    std::optional<Timers::iterator> timer;
  };
  struct StartedCall;
  struct ServedCall;
  struct SegmentOut;
  struct SegmentIn;
  struct HandshakeOut;
  using ExchangePtr = std::shared_ptr<Exchange>;  // Also of the segments in the network.

  // Runs `task`, which calls nobody back, here or on the loop.
  template <typename Task>
  void OnLoop(Task task) {
    if (loop_->InLoop()) {
      task();
    } else if (loop_->TryEnter()) {
      task();
      loop_->Leave(next_nanos());
    } else {
      loop_->Post([self = shared_from_this(), task = std::move(task)]() mutable { task(); });
    }
  }
  void OnHandshake(absl::Span<const std::byte> message);
  void BecomeOpen(const Agreement& agreement);
  void SendHandshake(absl::Span<const std::byte> message);
  void Refuse(absl::Span<const std::byte> refusal, const absl::Status& why);
  void Leave(const absl::Status& why);

  // Started calls.
  void StartOnLoop(std::shared_ptr<StartedCall> call);
  bool FitsWindow(const StartedCall& call) const;
  void Admit(const std::shared_ptr<StartedCall>& call);
  void AdmitWaiting();
  void End(const std::shared_ptr<StartedCall>& call, const absl::Status& why);
  void CheckStarted(const std::shared_ptr<StartedCall>& call);

  // Served calls.
  bool IsNewCall(std::uint64_t id);
  void ReceiveOnLoop(const std::shared_ptr<ServedCall>& call, DestinationSpans destination,
                     MemoryKind memory, absl::AnyInvocable<void(absl::Status)> done);
  void RespondOnLoop(const std::shared_ptr<ServedCall>& call, IncomingCall::Reply reply);
  void CancelServed(const std::shared_ptr<ServedCall>& call, const absl::Status& why);
  void CheckServed(const std::shared_ptr<ServedCall>& call);

  // Segments.
  void Check(const ExchangePtr& exchange);
  void Queue(const ExchangePtr& exchange);
  void Unqueue(const ExchangePtr& exchange);
  void Pump();
  void SendSegment(const ExchangePtr& exchange, SegmentHeader header,
                   absl::Span<const std::byte> head, std::vector<WirePiece>* pieces);
  void SendControl(SegmentKind kind, std::uint64_t call_id);
  void SegmentSent(SegmentOut* segment, const absl::Status& status);
  bool OpenHeader(const WireMessage& message, SegmentHeader* header,
                  absl::Span<const std::byte>* head);
  bool OnRequest(const WireMessage& message, const SegmentHeader& header,
                 absl::Span<const std::byte> head);
  bool OnResponse(const WireMessage& message, const SegmentHeader& header,
                  absl::Span<const std::byte> head);
  bool NoteSegment(const ExchangePtr& exchange, const SegmentHeader& header);
  bool PlaceSegment(const ExchangePtr& exchange, const SegmentHeader& header,
                    absl::Span<const std::byte> data, void* token);
  void PlaceHeld(const ExchangePtr& exchange);
  void DropHeld(const ExchangePtr& exchange);
  void SegmentReceived(SegmentIn* segment, const absl::Status& status);
  void StopExchange(const ExchangePtr& exchange);
  void SetTimer(const ExchangePtr& exchange, TimerKind kind, std::int64_t nanos);
  void ClearTimer(const ExchangePtr& exchange);
  void Hold(std::int64_t bytes);

  const ConnectionSettings settings_;
  TransportLoop* const loop_;
  ConnectionOwner* const owner_;
  TransportCounters* const counters_;
  OfferBook* const book_;
  std::atomic<CallId> next_call_{1};

  ConnectionInfo info_;  // Constant once open.
  State state_ = State::kHandshake;
  bool was_open_ = false;
  bool heard_ = false;
  absl::Status why_;
  std::unique_ptr<DialerHandshake> dialer_;
  std::unique_ptr<AcceptorHandshake> acceptor_;
  Agreement agreement_;
  std::size_t segment_bytes_max_ = 0;
  std::unique_ptr<SegmentCipher> sealing_;  // Null in plaintext.
  std::unique_ptr<SegmentCipher> opening_;
  std::uint64_t counter_ = 0;  // Of segments sent.
  CounterWindow counters_seen_;
  std::uint64_t held_bytes_ = 0;
  std::vector<std::byte> open_header_;  // Scratch of OpenHeader.

  Timers timers_;
  std::unordered_map<CallId, std::shared_ptr<StartedCall>> by_call_;  // Not complete.
  std::deque<std::shared_ptr<StartedCall>> waiting_;
  std::unordered_map<std::uint64_t, std::shared_ptr<StartedCall>>
      started_;  // In the peer's window.
  std::uint64_t next_id_ = 1;
  std::uint64_t window_bytes_ = 0;  // Of their requests.
  std::unordered_map<std::uint64_t, std::shared_ptr<ServedCall>> served_;
  std::uint64_t served_max_ = 0;            // Highest id that was seen,
  std::set<std::uint64_t> served_missing_;  // and lower ones that were not yet.

  std::deque<ExchangePtr> queue_;  // With segments to cut.
  std::size_t segments_in_flight_ = 0;
  bool pumping_ = false;
  std::vector<std::unique_ptr<SegmentOut>> free_out_;  // For reuse.
  std::vector<std::unique_ptr<SegmentIn>> free_in_;
  std::vector<WirePiece> pieces_;   // Scratch of Pump,
  std::vector<WirePiece> placing_;  // and of PlaceSegment.
  std::unique_ptr<Wire> wire_;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_H_
