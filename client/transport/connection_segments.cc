// ConnectionCore: segments, out and in.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transport/connection_core.h"
#include "client/transport/connection_core_internal.h"
#include "storage/core/check.h"

namespace kvmill {
namespace {

constexpr std::size_t kHeadTagOffset = offsetof(SegmentHeader, head_tag);
// Encrypted segments are staged: this many bytes stay in the second-level cache from the cipher to
// the socket.
constexpr std::size_t kSealedSegmentBytesMax = 256 << 10;
// Clocks of two hosts run apart by less than one part in so many.
constexpr std::int64_t kClocksDiffer = 1000;

}  // namespace

void ConnectionCore::Check(const ExchangePtr& exchange) {
  if (exchange->served) {
    CheckServed(std::static_pointer_cast<ServedCall>(exchange));
  } else {
    CheckStarted(std::static_pointer_cast<StartedCall>(exchange));
  }
}

void ConnectionCore::Queue(const ExchangePtr& exchange) {
  if (exchange->out.queued) return;
  exchange->out.queued = true;
  queue_.push_back(exchange);
}

// Of the one in front.
void ConnectionCore::Unqueue(const ExchangePtr& exchange) {
  exchange->out.queued = false;
  queue_.pop_front();
}

// Hands segments to the network as far as the window goes; messages take turns.
void ConnectionCore::Pump() {
  if (pumping_) return;  // A segment completed at once, below.
  pumping_ = true;
  while (state_ == State::kOpen && !queue_.empty() &&
         segments_in_flight_ < settings_.limits.segments_in_flight_max) {
    const ExchangePtr exchange = queue_.front();
    OutgoingMessage& out = exchange->out;
    if (out.stopped) {
      Unqueue(exchange);
    } else {
      pieces_.clear();
      const SegmentHeader header =
          out.Cut(sealing_ == nullptr ? segment_bytes_max_
                                      : std::min(segment_bytes_max_, kSealedSegmentBytesMax),
                  &pieces_);
      const bool first = header.offset == 0;
      if (out.all_cut()) {
        Unqueue(exchange);
      } else if (queue_.size() > 1) {  // A queue that turns allocates: not for one alone.
        Unqueue(exchange);
        Queue(exchange);
      }
      SendSegment(exchange, header,
                  first ? absl::MakeConstSpan(out.head()) : absl::Span<const std::byte>(),
                  &pieces_);
    }
    Check(exchange);
  }
  pumping_ = false;
}

void ConnectionCore::SendControl(SegmentKind kind, std::uint64_t call_id) {
  SegmentHeader header;
  header.kind = kind;
  header.call_id = call_id;
  std::vector<WirePiece> none;
  SendSegment(nullptr, header, {}, &none);
}

void ConnectionCore::SendSegment(const ExchangePtr& exchange, SegmentHeader header,
                                 absl::Span<const std::byte> head, std::vector<WirePiece>* pieces) {
  std::unique_ptr<SegmentOut> owned;
  if (free_out_.empty()) {
    owned = std::make_unique<SegmentOut>();
    owned->core = this;
  } else {
    owned = std::move(free_out_.back());
    free_out_.pop_back();
  }
  SegmentOut& segment = *owned;
  segment.exchange = exchange;
  segment.data_bytes = header.segment_bytes;
  segment.pieces.swap(*pieces);
  segment.header.resize(sizeof(header) + head.size());
  std::byte* const bytes = segment.header.data();
  header.counter = counter_++;
  if (sealing_ == nullptr) {
    std::memcpy(bytes, &header, sizeof(header));
    if (!head.empty()) std::memcpy(bytes + sizeof(header), head.data(), head.size());
    header.checksum = SegmentChecksum(segment.header);
    std::memcpy(bytes, &header, sizeof(header));
  } else {
    if (header.segment_bytes != 0) {
      if (segment.sealed_bytes < header.segment_bytes) {
        segment.sealed = std::make_unique_for_overwrite<std::byte[]>(header.segment_bytes);
        segment.sealed_bytes = header.segment_bytes;
      }
      sealing_->Begin(SegmentCipher::Part::kData, header.counter, {});
      std::byte* out = segment.sealed.get();
      for (const WirePiece& piece : segment.pieces) {
        sealing_->Update({piece.data, piece.bytes}, out);
        out += piece.bytes;
      }
      header.data_tag = sealing_->Finish();
      segment.pieces.assign(1, {segment.sealed.get(), header.segment_bytes});
    }
    std::memcpy(bytes, &header, sizeof(header));
    sealing_->Begin(SegmentCipher::Part::kHead, header.counter, {bytes, kHeadTagOffset});
    sealing_->Update(head, bytes + sizeof(header));
    header.head_tag = sealing_->Finish();
    std::memcpy(bytes + kHeadTagOffset, &header.head_tag, sizeof(header.head_tag));
  }
  const MemoryKind memory = exchange == nullptr ? MemoryKind::kHost : exchange->out.memory();
  const bool stays = exchange != nullptr && exchange->out.stays;
  const bool rendezvous = header.segment_bytes > PushBytesMax(header.kind) ||
                          (header.segment_bytes != 0 && (stays || memory != MemoryKind::kHost));
  ++segments_in_flight_;
  if (exchange != nullptr) ++exchange->out.in_flight;
  counters_->operations.fetch_add(1, std::memory_order_relaxed);
  counters_->bytes_sent.fetch_add(header.segment_bytes, std::memory_order_relaxed);
  SegmentOut* const operation = owned.release();
  wire_->Send({.channel = WireChannel::kSegments,
               .header = operation->header,
               .pieces = operation->pieces,
               .memory = memory,
               .rendezvous = rendezvous},
              operation);
}

void ConnectionCore::SegmentSent(SegmentOut* segment, const absl::Status& status) {
  std::unique_ptr<SegmentOut> owned(segment);
  const ExchangePtr exchange = std::move(owned->exchange);
  owned->exchange = nullptr;
  --segments_in_flight_;
  counters_->operations.fetch_sub(1, std::memory_order_relaxed);
  if (free_out_.size() < settings_.limits.segments_in_flight_max) {
    free_out_.push_back(std::move(owned));
  }
  if (exchange != nullptr) {
    --exchange->out.in_flight;
    // The wire reports its own end; what it could not deliver otherwise ends the connection too,
    // since the message will never be whole.
    if (!status.ok() && state_ == State::kOpen && !exchange->out.stopped) Break(status);
    Check(exchange);
  }
  Pump();
}

// Authenticates or checks header and head. False: the connection was broken.
bool ConnectionCore::OpenHeader(const WireMessage& message, SegmentHeader* header,
                                absl::Span<const std::byte>* head) {
  absl::StatusOr<SegmentHeader> parsed = ParseSegment(message.header);
  if (!parsed.ok()) {
    Break(parsed.status());
    return false;
  }
  *header = *parsed;
  *head = message.header.subspan(sizeof(SegmentHeader));
  if (opening_ == nullptr) {
    const absl::Status status = CheckSegmentChecksum(message.header);
    if (!status.ok()) {
      Break(status);
      return false;
    }
  } else {
    open_header_.resize(head->size());
    opening_->Begin(SegmentCipher::Part::kHead, header->counter,
                    message.header.first(kHeadTagOffset));
    opening_->Update(*head, open_header_.data());
    if (!opening_->Verify(header->head_tag)) {
      Break(absl::DataLossError(
          absl::StrCat("segment ", header->counter, ": its header is not the peer's")));
      return false;
    }
    *head = open_header_;
  }
  if (!counters_seen_.Take(header->counter)) {
    Break(absl::DataLossError(absl::StrCat("segment ", header->counter, " came before")));
    return false;
  }
  if (header->segment_bytes != message.data_bytes ||
      header->segment_bytes > settings_.limits.segment_bytes_max) {
    Break(absl::DataLossError(absl::StrCat("segment ", header->counter, " has ", message.data_bytes,
                                           " bytes, its header says ", header->segment_bytes)));
    return false;
  }
  return true;
}

bool ConnectionCore::OnMessage(const WireMessage& message) {
  heard_ = true;
  if (state_ == State::kHandshake) {
    if (message.channel == WireChannel::kHandshake && message.data_bytes == 0) {
      OnHandshake(message.header);
    } else {
      Break(absl::DataLossError("the peer spoke before the handshake was over"));
    }
    return false;
  }
  if (state_ != State::kOpen) return false;
  if (message.channel != WireChannel::kSegments) {
    Break(absl::DataLossError("the peer repeats the handshake"));
    return false;
  }
  SegmentHeader header;
  absl::Span<const std::byte> head;
  if (!OpenHeader(message, &header, &head)) return false;
  switch (header.kind) {
    case SegmentKind::kRequest:
      return OnRequest(message, header, head);
    case SegmentKind::kResponse:
      return OnResponse(message, header, head);
    case SegmentKind::kCancel: {
      const auto found = served_.find(header.call_id);
      if (found != served_.end()) {
        CancelServed(std::shared_ptr<ServedCall>(found->second),
                     absl::CancelledError("its caller gave up"));
      } else if (IsNewCall(header.call_id)) {
        SendControl(SegmentKind::kEnded, header.call_id);  // It overtook its request.
      }
      return false;
    }
    case SegmentKind::kEnded: {
      const auto found = started_.find(header.call_id);
      if (found == started_.end()) return false;
      const std::shared_ptr<StartedCall> call = found->second;
      call->peer_ended = true;
      // Both sides have a timer for it; this side's may be the later one to be looked at.
      const std::int64_t left = call->deadline_nanos - loop_->NowNanos();
      End(call, left <= call->call.timeout_nanos / kClocksDiffer
                    ? absl::DeadlineExceededError("no response in time")
                    : absl::UnavailableError("the peer gave the call up"));
      CheckStarted(call);
      return false;
    }
    case SegmentKind::kGoodbye:
      Break(absl::UnavailableError("the peer closed the connection"));
      return false;
  }
  return false;
}

bool ConnectionCore::OnResponse(const WireMessage& message, const SegmentHeader& header,
                                absl::Span<const std::byte> head) {
  const auto found = started_.find(header.call_id);
  if (found == started_.end()) {
    if (header.call_id >= next_id_) {
      Break(absl::DataLossError(
          absl::StrCat("the peer answers call ", header.call_id, ", which was never started")));
    }
    return false;  // Of a call that is over.
  }
  const std::shared_ptr<StartedCall> call = found->second;
  if (!NoteSegment(call, header)) return false;
  if (header.offset == 0) {
    call->in.head_arrived = true;
    if (header.code != 0) {
      call->response_status =
          absl::Status(static_cast<absl::StatusCode>(header.code),
                       absl::string_view(reinterpret_cast<const char*>(head.data()), head.size()));
    } else if (!call->result.has_value()) {
      call->response.header.assign(head.begin(), head.end());
      call->response.payload_bytes = header.payload_bytes;
      if (header.payload_bytes != 0) {
        absl::Status status =
            absl::FailedPreconditionError("the response has a payload, the call no place for one");
        DestinationSpans destination;
        if (call->call.place) {
          status = call->call.place(
              {.header = call->response.header, .payload_bytes = header.payload_bytes},
              &destination);
          if (status.ok()) {
            status = call->in.Place(std::move(destination), call->call.place_memory);
          }
        }
        if (status.ok()) {
          PlaceHeld(call);
        } else {
          End(call, status);
        }
      }
    }
  }
  const bool taken =
      state_ == State::kOpen && PlaceSegment(call, header, message.data, message.token);
  CheckStarted(call);
  return taken;
}

// What all segments of a message must agree on. False: the connection was broken.
bool ConnectionCore::NoteSegment(const ExchangePtr& exchange, const SegmentHeader& header) {
  IncomingMessage& in = exchange->in;
  if (!in.known) {
    in.known = true;
    in.payload_bytes = header.payload_bytes;
  }
  if (header.payload_bytes != in.payload_bytes || (header.offset == 0 && in.head_arrived) ||
      (header.segment_bytes != 0 && !in.Arrive(header.offset, header.segment_bytes))) {
    Break(absl::DataLossError(absl::StrCat("segment ", header.counter, " of call ", header.call_id,
                                           " contradicts those before")));
    return false;
  }
  in.Count(header.segment_bytes);
  if (header.offset == 0) in.head_arrived = true;
  return true;
}

void ConnectionCore::Hold(std::int64_t bytes) {
  held_bytes_ += static_cast<std::uint64_t>(bytes);
  counters_->held_bytes.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
}

// True: the token is in use.
bool ConnectionCore::PlaceSegment(const ExchangePtr& exchange, const SegmentHeader& header,
                                  absl::Span<const std::byte> data, void* token) {
  IncomingMessage& in = exchange->in;
  if (header.segment_bytes == 0 || in.refusing) return false;
  if (!in.placed) {
    HeldSegment held{.header = header, .data = {}, .token = token};
    if (token == nullptr) {
      held.data.assign(data.begin(), data.end());
      Hold(static_cast<std::int64_t>(data.size()));
      if (held_bytes_ > settings_.limits.request_bytes_max) {
        Hold(-static_cast<std::int64_t>(data.size()));
        Break(absl::ResourceExhaustedError("the peer pushes more than its window"));
        return false;
      }
    }
    in.held.push_back(std::move(held));
    return token != nullptr;
  }
  if (token != nullptr) {
    std::unique_ptr<SegmentIn> owned;
    if (free_in_.empty()) {
      owned = std::make_unique<SegmentIn>();
      owned->core = this;
    } else {
      owned = std::move(free_in_.back());
      free_in_.pop_back();
    }
    owned->exchange = exchange;
    owned->header = header;
    owned->pieces.clear();
    in.Find(header.offset, header.segment_bytes, &owned->pieces);
    ++in.in_flight;
    counters_->operations.fetch_add(1, std::memory_order_relaxed);
    SegmentIn* const operation = owned.release();
    wire_->Receive(token, operation->pieces, in.memory, operation);
    return true;
  }
  if (in.memory != MemoryKind::kHost) {
    const absl::Status status =
        absl::UnimplementedError("pushed bytes cannot be placed in device memory");
    if (exchange->served) {
      CancelServed(std::static_pointer_cast<ServedCall>(exchange), status);
    } else {
      End(std::static_pointer_cast<StartedCall>(exchange), status);
    }
    return false;
  }
  placing_.clear();
  in.Find(header.offset, header.segment_bytes, &placing_);
  if (opening_ != nullptr) opening_->Begin(SegmentCipher::Part::kData, header.counter, {});
  for (const WirePiece& piece : placing_) {
    if (opening_ != nullptr) {
      opening_->Update(data.first(piece.bytes), piece.data);
    } else {
      std::memcpy(piece.data, data.data(), piece.bytes);
    }
    data.remove_prefix(piece.bytes);
  }
  if (opening_ != nullptr && !opening_->Verify(header.data_tag)) {
    Break(absl::DataLossError(
        absl::StrCat("segment ", header.counter, ": its bytes are not the peer's")));
    return false;
  }
  in.placed_bytes += header.segment_bytes;
  counters_->bytes_received.fetch_add(header.segment_bytes, std::memory_order_relaxed);
  return false;
}

void ConnectionCore::SegmentReceived(SegmentIn* segment, const absl::Status& status) {
  std::unique_ptr<SegmentIn> owned(segment);
  const ExchangePtr exchange = std::move(owned->exchange);
  owned->exchange = nullptr;
  counters_->operations.fetch_sub(1, std::memory_order_relaxed);
  IncomingMessage& in = exchange->in;
  --in.in_flight;
  const SegmentHeader& header = owned->header;
  absl::Status result = status;
  if (result.ok() && opening_ != nullptr) {
    opening_->Begin(SegmentCipher::Part::kData, header.counter, {});
    for (const WirePiece& piece : owned->pieces) {
      opening_->Update({piece.data, piece.bytes}, piece.data);
    }
    if (!opening_->Verify(header.data_tag)) {
      result = absl::DataLossError(
          absl::StrCat("segment ", header.counter, ": its bytes are not the peer's"));
    }
  }
  if (result.ok()) {
    in.placed_bytes += header.segment_bytes;
    counters_->bytes_received.fetch_add(header.segment_bytes, std::memory_order_relaxed);
  } else if (state_ == State::kOpen || state_ == State::kLeaving) {
    Break(result);
  }
  if (free_in_.size() < settings_.limits.segments_in_flight_max) {
    free_in_.push_back(std::move(owned));
  }
  Check(exchange);
}

void ConnectionCore::PlaceHeld(const ExchangePtr& exchange) {
  std::vector<HeldSegment> held = std::move(exchange->in.held);
  exchange->in.held.clear();
  for (HeldSegment& segment : held) {
    if (segment.token == nullptr) Hold(-static_cast<std::int64_t>(segment.data.size()));
    if (state_ != State::kOpen) continue;  // Broken by one of them: the wire's tokens are gone.
    if (!PlaceSegment(exchange, segment.header, segment.data, segment.token) &&
        segment.token != nullptr) {
      wire_->Drop(segment.token);
    }
  }
}

void ConnectionCore::DropHeld(const ExchangePtr& exchange) {
  std::vector<HeldSegment> held = std::move(exchange->in.held);
  exchange->in.held.clear();
  for (const HeldSegment& segment : held) {
    if (segment.token == nullptr) {
      Hold(-static_cast<std::int64_t>(segment.data.size()));
    } else if (state_ == State::kOpen || state_ == State::kLeaving) {
      wire_->Drop(segment.token);
    }
  }
}

// Nothing more of it is cut, and nothing more of it is placed.
void ConnectionCore::StopExchange(const ExchangePtr& exchange) {
  exchange->out.stopped = true;
  exchange->in.refusing = true;
  DropHeld(exchange);
}

}  // namespace kvmill
