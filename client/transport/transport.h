// Bulk bytes between two processes: calls (a request and its response), each a small header and a
// payload that is gathered from the sender's spans and arrives in spans that the receiver names.
//
// A process has one Transport. It listens, dials and runs everything on one thread of its own that
// sleeps when there is nothing to do. What is above this header knows neither UCX nor sockets:
// UcxTransport (ucx_transport.h) moves bytes between hosts, FakeTransport (fake_transport.h) within
// a process, in simulated time and with faults.
//
// Connecting takes two steps. The side that will be dialed makes an Offer: its addresses, who it is
// and a key that is good for one connection. The offer travels over a channel that is already
// authenticated (gRPC); whoever has it may connect once. Both sides prove the key before anything
// else is parsed, and unless both chose plaintext every byte after the handshake is encrypted and
// authenticated with keys derived from it. A connection is symmetric: both sides may start calls.
//
// What always holds:
// - Every operation completes exactly once, also when the peer dies, on cancel, at its deadline and
//   when the transport is destroyed. A failure arrives where success would have.
// - A buffer belongs to its operation until the operation completes. An operation whose time is up
//   therefore completes when the network has let go of its buffers: at once if it has none of them,
//   else within Options::grace_nanos, after which the connection is given up.
// - Windows bound what is in flight: calls and request bytes by what the peer announced, bytes
// handed
//   to the network by Options. What does not fit waits in a queue that is bounded too.
//
// Threads: all methods may be called from any thread. All callbacks run on the transport's thread,
// or on one that stands in for it (PeerConnection::RunUntil), one at a time: they must not block,
// and may call back into the transport except where it says otherwise. What is started elsewhere
// while that thread sleeps is sent by its caller, without a switch of threads. Times are
// Clock::MonotonicNanos of the transport's clock; sizes are bytes.
#ifndef KVMILL_CLIENT_TRANSPORT_TRANSPORT_H_
#define KVMILL_CLIENT_TRANSPORT_TRANSPORT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

// Who a process is: the node, and which of its lives. A restarted daemon has a new incarnation, so
// that a reused address cannot be mistaken for the process that was there before.
struct NodeIdentity {
  using Id = std::array<std::byte, 16>;
  Id id{};
  std::uint64_t incarnation = 0;

  // The first 16 bytes of the name's SHA-256.
  static Id IdOf(absl::string_view name);
  // Hex digits of the id, a slash and the incarnation; for messages.
  std::string ToString() const;
  friend bool operator==(const NodeIdentity&, const NodeIdentity&) = default;
};

// Permission to connect once. Carries a secret: it travels encrypted, is never logged, and is
// dropped when used.
struct Offer {
  std::vector<std::string> addresses;  // "a.b.c.d:port" or "[v6]:port"; tried in this order.
  NodeIdentity node;                   // Who must answer.
  std::array<std::byte, 16> key_id{};  // Names the key; not secret.
  std::array<std::byte, 32> key{};     // The secret.
};

// Where a payload lies. All spans of one message are of one kind.
enum class MemoryKind : std::uint8_t {
  kHost = 0,
  kCuda = 1,  // Only where Transport::Supports says so, and only in plaintext.
};

inline constexpr std::size_t kCallHeaderBytesMax = 4096;
inline constexpr std::uint64_t kPayloadBytesMax = std::uint64_t{1} << 40;

inline constexpr std::size_t kAdmittedHostsMax = 128;

using SourceSpans = std::vector<absl::Span<const std::byte>>;
using DestinationSpans = std::vector<absl::Span<std::byte>>;

// The beginning of a response, before its payload.
struct ResponseHead {
  absl::Span<const std::byte> header;  // Valid during the callback.
  std::uint64_t payload_bytes = 0;
};

struct Response {
  std::vector<std::byte> header;
  std::uint64_t payload_bytes = 0;  // All of them are in the destination.
};

struct Call {
  std::vector<std::byte> header;  // Up to kCallHeaderBytesMax; longer lists go into the payload.
  SourceSpans payload;            // The bytes are the call's until `done`.
  MemoryKind payload_memory = MemoryKind::kHost;
  std::int64_t timeout_nanos = 0;  // From Start; positive. There are no calls without a deadline.

  // Names where the response's payload goes: spans whose sizes add up to payload_bytes, the call's
  // until `done`. An error ends the call with that error. Called at most once, and only when the
  // response has a payload; without it such a response ends the call with FAILED_PRECONDITION. Must
  // not call the transport.
  std::function<absl::Status(const ResponseHead&, DestinationSpans*)> place;
  MemoryKind place_memory = MemoryKind::kHost;

  // Exactly once. The status is the responder's own, or:
  //   DEADLINE_EXCEEDED   no response in time; what the peer did is unknown
  //   CANCELLED           Cancel, or the transport is being destroyed
  //   UNAVAILABLE         the connection broke or was closed
  //   RESOURCE_EXHAUSTED  too many calls wait already
  //   DATA_LOSS           bytes failed their authentication; the connection is gone
  absl::AnyInvocable<void(absl::StatusOr<Response>)> done;
};

using CallId = std::uint64_t;  // Of one connection, never reused.

// A call that a peer started. Answered by Respond, once; destroying it unanswered answers INTERNAL.
// May be kept and used on any thread, also after its connection is gone, but not after the
// transport is.
class IncomingCall {
 public:
  virtual ~IncomingCall() = default;

  virtual absl::Span<const std::byte> header() const = 0;  // Valid as long as this object.
  virtual std::uint64_t payload_bytes() const = 0;
  virtual std::int64_t deadline_nanos() const = 0;  // When the caller gives up.
  // The caller gave up, or is gone: an answer would reach nobody. Never true and then false.
  virtual bool cancelled() const = 0;

  // Names where the request's payload goes (sizes add up to payload_bytes()) and calls `done` when
  // it is there, or will not come: CANCELLED, UNAVAILABLE, DATA_LOSS, INVALID_ARGUMENT for sizes
  // that do not add up. The spans are the call's until then. At most once, before Respond.
  virtual void Receive(DestinationSpans destination, MemoryKind memory,
                       absl::AnyInvocable<void(absl::Status)> done) = 0;

  struct Reply {
    absl::Status status;            // Not OK: the caller gets this status, nothing else.
    std::vector<std::byte> header;  // Up to kCallHeaderBytesMax.
    SourceSpans payload;            // The call's until `done`.
    MemoryKind payload_memory = MemoryKind::kHost;
    // Exactly once; OK when the bytes are on their way and the buffers are free. May be null.
    absl::AnyInvocable<void(absl::Status)> done;
  };
  virtual void Respond(Reply reply) = 0;
};

struct ConnectionInfo {
  NodeIdentity peer;
  std::string address;    // Of the peer, "a.b.c.d:port" or "[v6]:port".
  std::string transport;  // What was negotiated, as "tcp/eth0"; several joined by commas.
  bool encrypted = true;
  bool dialed = false;                // By this side.
  bool slower_than_expected = false;  // TCP although RDMA was expected; it was logged too.
  std::uint16_t version = 0;          // Of the protocol.
  std::uint64_t owner_tag = 0;        // Of the offer that was used (the side that made it).
};

// Lives until Close, until it breaks, or until the transport's end; letting go of the pointer does
// not close it.
class PeerConnection {
 public:
  virtual ~PeerConnection() = default;

  virtual const ConnectionInfo& info() const = 0;
  // Starts a call; `call.done` will run, whatever is wrong with it.
  virtual CallId Start(Call call) = 0;
  // The call completes soon, with CANCELLED unless it had an answer already.
  virtual void Cancel(CallId id) = 0;
  // Every call ends, UNAVAILABLE; the peer is told. Idempotent.
  virtual void Close() = 0;
  // For a thread that waits for the only call of its transport: does the work of the transport's
  // thread, if that sleeps, until `done` holds, which it asks after each callback. It looks for
  // what comes for some 50 us before it sleeps, and lets others have the processor meanwhile.
  // False: at once, when there are more calls, or the transport's thread is awake. The transport
  // outlives it.
  virtual bool RunUntil(absl::FunctionRef<bool()> done) = 0;
};
// Shared by its owner, by threads that start calls, and by the transport until it is closed.
using ConnectionPtr = std::shared_ptr<PeerConnection>;

// What a process does with what its peers want. Called on the transport's thread.
class TransportHandler {
 public:
  virtual ~TransportHandler() = default;
  // A peer connected with an offer of ours.
  virtual void OnConnection(const ConnectionPtr& /*connection*/) {}
  // On any connection, dialed ones too.
  virtual void OnCall(const ConnectionPtr& connection, std::unique_ptr<IncomingCall> call) = 0;
  // A connection that OnConnection announced ended. Its calls have completed.
  virtual void OnClosed(const ConnectionPtr& /*connection*/, const absl::Status& /*why*/) {}
};

// Counts of now, for metrics and for tests that nothing leaks.
struct TransportStats {
  std::uint64_t connections = 0;    // Open, or in their handshake.
  std::uint64_t offers = 0;         // That can still be used.
  std::uint64_t calls_started = 0;  // By this side and not complete, those that wait included.
  std::uint64_t calls_served = 0;   // By peers and not finished.
  std::uint64_t operations = 0;     // That hold buffers in the network.
  std::uint64_t held_bytes = 0;     // Arrived before they had a place.
  // Since the start:
  std::uint64_t handshakes_refused = 0;
  std::uint64_t connections_broken = 0;
  std::uint64_t bytes_sent = 0;  // Of payloads.
  std::uint64_t bytes_received = 0;
};

struct TransportLimits {
  std::uint32_t calls_max = 256;               // That a peer may have running here, per connection.
  std::uint64_t request_bytes_max = 64 << 20;  // Of the payloads of those calls.
  std::uint32_t waiting_calls_max = 1024;      // Started here, waiting for the peer's window.
  std::uint32_t segments_in_flight_max = 8;    // Handed to the network, per connection.
  std::uint32_t segment_bytes_max = 512 << 10;  // A payload is cut into these. 64 KiB to 8 MiB.
  std::uint32_t connections_max = 4096;
  std::uint32_t handshakes_max = 64;  // Unfinished ones that peers began.
  std::uint32_t offers_max = 4096;
};

struct TransportOptions {
  NodeIdentity self;
  bool plaintext = false;  // The network is trusted. Both sides must say so.
  TransportLimits limits;
  std::int64_t handshake_nanos = 5'000'000'000;  // From dialing to an open connection.
  std::int64_t offer_nanos = 30'000'000'000;     // How long an offer can be used.
  std::int64_t grace_nanos = 1'000'000'000;      // For the network to let go of buffers.
  // The protocol's version and the oldest that is understood. Tests of skew set them.
  std::uint16_t version = 1;
  std::uint16_t version_min = 1;
  TransportHandler* handler = nullptr;  // Outlives the transport. Null: calls of peers are refused.
};

class Transport {
 public:
  // Every operation completes, then this returns. Not on the transport's thread.
  virtual ~Transport() = default;

  // Where peers reach this process; empty when it does not listen.
  virtual std::vector<std::string> addresses() const = 0;

  // `owner_tag` comes back in ConnectionInfo: who was given the offer. `only_for`: the offer is
  // good for this node alone. RESOURCE_EXHAUSTED when too many offers are out, FAILED_PRECONDITION
  // when this process does not listen.
  virtual absl::StatusOr<Offer> MakeOffer(std::uint64_t owner_tag,
                                          std::optional<NodeIdentity::Id> only_for = {}) = 0;

  struct Connecting {
    // Exactly once. Errors:
    //   UNAVAILABLE          nobody answers, or the connection broke in the handshake
    //   DEADLINE_EXCEEDED    no answer within handshake_nanos
    //   UNAUTHENTICATED      the key is unknown, was used before, or the peer could not prove it
    //   ABORTED              another incarnation answers there: ask for a new offer
    //   FAILED_PRECONDITION  versions too far apart, one side encrypts, or only TCP where RDMA is
    //                        required
    //   INVALID_ARGUMENT     an address that cannot be parsed
    absl::AnyInvocable<void(absl::StatusOr<ConnectionPtr>)> done;
    // Once, after a successful `done`, when the connection has ended. May be null.
    absl::AnyInvocable<void(absl::Status)> closed;
  };
  virtual void Connect(Offer offer, Connecting connecting) = 0;

  // Hosts are numeric addresses without port. From now on only these reach the ports of this
  // process where the transport keeps strangers out (UcxOptions::only_admitted); connections that
  // are there stay. Nothing changes on an error: INVALID_ARGUMENT naming a host, RESOURCE_EXHAUSTED
  // when there are more than kAdmittedHostsMax or the kernel has no room.
  virtual absl::Status Admit(const std::vector<std::string>& /*hosts*/) { return absl::OkStatus(); }
  // The hosts that its own connections come from, for peers to admit; empty where none has to.
  virtual std::vector<std::string> sources() const { return {}; }

  virtual bool Supports(MemoryKind memory) const = 0;
  virtual TransportStats stats() const = 0;

  // The transport's time, and a task for its thread: as soon as possible after `nanos`. Tasks whose
  // time has not come when the transport is destroyed are dropped.
  virtual std::int64_t NowNanos() const = 0;
  virtual void RunAt(std::int64_t nanos, absl::AnyInvocable<void()> task) = 0;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_TRANSPORT_H_
