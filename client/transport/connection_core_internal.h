// The parts of ConnectionCore that its source files share.
#ifndef KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_INTERNAL_H_
#define KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_INTERNAL_H_

#include <memory>
#include <utility>
#include <vector>

#include "client/transport/connection_core.h"

namespace kvmill {

struct ConnectionCore::StartedCall final : Exchange {
  explicit StartedCall(Call c) : Exchange(false), call(std::move(c)) {}

  Call call;
  CallId handle = 0;
  std::int64_t deadline_nanos = 0;
  bool admitted = false;
  bool peer_ended = false;             // Sends nothing more for this call.
  std::optional<absl::Status> result;  // Known; `done` runs when the buffers are free.
  bool done_ran = false;
  Response response;
  absl::Status response_status;  // As the peer said.
  std::uint64_t request_bytes = 0;
};

struct ConnectionCore::ServedCall final : Exchange {
  ServedCall() : Exchange(true) {}

  std::vector<std::byte> header;       // Constant once the handler has it,
  std::int64_t deadline_nanos = 0;     // like this and in.payload_bytes.
  std::atomic<bool> cancelled{false};  // Read by any thread; set on the loop.
  absl::Status cancel_status;
  bool delivered = false;  // The handler has it.
  absl::AnyInvocable<void(absl::Status)> receive_done;
  bool replied = false;
  bool reply_finished = false;
  absl::AnyInvocable<void(absl::Status)> reply_done;
  absl::Status send_status;
};

// A segment that the network has, on its way out. Reused.
struct ConnectionCore::SegmentOut final : WireOperation {
  ConnectionCore* core = nullptr;
  ExchangePtr exchange;  // Null: a control segment.
  std::vector<std::byte> header;
  std::vector<WirePiece> pieces;
  std::unique_ptr<std::byte[]> sealed;  // Encrypted data.
  std::size_t sealed_bytes = 0;         // Of the buffer.
  std::uint32_t data_bytes = 0;
  void OnDone(const absl::Status& status) override { core->SegmentSent(this, status); }
};

// A segment whose bytes the network moves to their place. Reused.
struct ConnectionCore::SegmentIn final : WireOperation {
  ConnectionCore* core = nullptr;
  ExchangePtr exchange;
  SegmentHeader header;
  std::vector<WirePiece> pieces;
  void OnDone(const absl::Status& status) override { core->SegmentReceived(this, status); }
};

struct ConnectionCore::HandshakeOut final : WireOperation {
  std::vector<std::byte> bytes;
  TransportCounters* counters = nullptr;
  void OnDone(const absl::Status& /*status*/) override {  // A wire that fails says so by itself.
    counters->operations.fetch_sub(1, std::memory_order_relaxed);
    delete this;
  }
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_CONNECTION_CORE_INTERNAL_H_
