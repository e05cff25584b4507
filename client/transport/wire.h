// What a connection stands on: messages of a header and data to one peer, over UCX or within a
// process. Internal to client/transport/. Everything happens on the transport's thread.
#ifndef KVMILL_CLIENT_TRANSPORT_WIRE_H_
#define KVMILL_CLIENT_TRANSPORT_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/transport/transport.h"

namespace kvmill {

// One piece of a gather or scatter list.
struct WirePiece {
  std::byte* data = nullptr;  // Only read when sending.
  std::size_t bytes = 0;
};

enum class WireChannel : unsigned { kHandshake = 1, kSegments = 2 };

// Completion of a Send or Receive: exactly once, possibly before the call returns. Until then the
// operation's header, list and bytes are the wire's.
class WireOperation {
 public:
  virtual void OnDone(const absl::Status& status) = 0;

 protected:
  ~WireOperation() = default;
};

struct WireMessage {
  WireChannel channel = WireChannel::kSegments;
  absl::Span<const std::byte> header;  // Valid during the callback, like `data`.
  // Data that came along, or, when `token` is set, bytes that lie at the sender still and are moved
  // by Receive.
  absl::Span<const std::byte> data;
  void* token = nullptr;
  std::size_t data_bytes = 0;
};

class WireEvents {
 public:
  // True: the token was given to Receive, or will be, or to Drop. False: it is dropped.
  virtual bool OnMessage(const WireMessage& message) = 0;
  // The peer is gone. Close the wire; nothing more arrives.
  virtual void OnBroken(const absl::Status& why) = 0;
  // After Close: every operation has completed. The wire may be destroyed.
  virtual void OnClosed() = 0;

 protected:
  ~WireEvents() = default;
};

class Wire {
 public:
  virtual ~Wire() = default;

  struct Outgoing {
    WireChannel channel = WireChannel::kSegments;
    absl::Span<const std::byte> header;
    absl::Span<const WirePiece> pieces;
    MemoryKind memory = MemoryKind::kHost;
    // Bytes stay here until the receiver has a place for them; else they are pushed.
    bool rendezvous = false;
  };
  virtual void Send(const Outgoing& message, WireOperation* operation) = 0;
  virtual void Receive(void* token, absl::Span<const WirePiece> pieces, MemoryKind memory,
                       WireOperation* operation) = 0;
  virtual void Drop(void* token) = 0;
  // Ends everything without asking the peer: operations complete with an error, held tokens are
  // gone, then OnClosed. Idempotent. Returns before that.
  virtual void Close() = 0;

  virtual std::string transport_name() const = 0;  // "tcp/eth0"
  virtual std::string peer_address() const = 0;
};

// The transport's thread as connections see it.
class TransportLoop {
 public:
  // From any thread.
  virtual void Post(absl::AnyInvocable<void()> task) = 0;
  virtual bool InLoop() const = 0;
  virtual std::int64_t NowNanos() const = 0;
  // Makes this thread the loop until Leave, provided that the loop sleeps: what needs no answer
  // then costs no wake-up. Never waits. False: it is awake, or busy elsewhere; use Post. In between
  // no callback runs; what is posted waits for the loop, which Leave wakes for it. From any thread.
  virtual bool TryEnter() { return false; }
  // `due_nanos`: when the connection that was used wants its OnTime.
  virtual void Leave(std::int64_t /*due_nanos*/) {}
  // As PeerConnection::RunUntil.
  virtual bool RunUntil(absl::FunctionRef<bool()> /*done*/) { return false; }

 protected:
  ~TransportLoop() = default;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_WIRE_H_
