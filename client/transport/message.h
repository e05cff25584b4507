// Halves of a call: a message on its way out, cut into segments, and one on its way in, put
// together from them. Internal to client/transport/; of the transport's thread.
#ifndef KVMILL_CLIENT_TRANSPORT_MESSAGE_H_
#define KVMILL_CLIENT_TRANSPORT_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/transport/segment.h"
#include "client/transport/transport.h"
#include "client/transport/wire.h"

namespace kvmill {

// Up to here bytes are pushed and copied once on each side; above, the receiver's place is asked
// for first. A round trip costs more than copying this much. Who waits for a response has a place
// for it as soon as it comes; a request may have to wait for one, in memory of the connection.
inline constexpr std::size_t kPushRequestBytesMax = 64 << 10;
inline constexpr std::size_t kPushResponseBytesMax = 256 << 10;
inline std::size_t PushBytesMax(SegmentKind kind) {
  return kind == SegmentKind::kResponse ? kPushResponseBytesMax : kPushRequestBytesMax;
}
// Pieces of one segment that is pushed; more spans make more segments.
inline constexpr std::size_t kPiecesMax = 64;

std::uint64_t TotalBytes(const SourceSpans& spans);
std::uint64_t TotalBytes(const DestinationSpans& spans);

// The sending half. Borrows the bytes of its spans.
class OutgoingMessage {
 public:
  OutgoingMessage() = default;

  void Set(SegmentKind kind, std::uint64_t call_id, std::vector<std::byte> head, SourceSpans spans,
           MemoryKind memory);

  // The next segment: as much as lies together, up to `segment_bytes_max`; or small spans together,
  // up to PushBytesMax. Appends to `pieces`.
  SegmentHeader Cut(std::size_t segment_bytes_max, std::vector<WirePiece>* pieces);
  bool all_cut() const { return cut_any_ && offset_ == payload_bytes_; }

  const std::vector<std::byte>& head() const { return head_; }
  MemoryKind memory() const { return memory_; }
  std::uint64_t payload_bytes() const { return payload_bytes_; }

  std::uint32_t code = 0;
  std::uint32_t timeout_ms = 0;
  std::uint8_t flags = 0;
  bool stays = false;         // No segment with data is pushed.
  std::size_t in_flight = 0;  // Segments that the network has.
  bool queued = false;        // Segments are still to be cut.
  bool stopped = false;       // None will be.

 private:
  SegmentKind kind_ = SegmentKind::kRequest;
  std::uint64_t call_id_ = 0;
  std::vector<std::byte> head_;
  SourceSpans spans_;
  MemoryKind memory_ = MemoryKind::kHost;
  std::uint64_t payload_bytes_ = 0;
  std::uint64_t offset_ = 0;
  std::size_t span_ = 0;         // Where offset_ is: in this span,
  std::size_t span_offset_ = 0;  // at this byte.
  bool cut_any_ = false;
};

// A segment that came before its message had a place.
struct HeldSegment {
  SegmentHeader header;
  std::vector<std::byte> data;  // As it arrived, encrypted or not,
  void* token = nullptr;        // or still at the sender.
};

// The receiving half.
class IncomingMessage {
 public:
  // What the first segment that arrives says of the message; the others must say the same.
  bool known = false;
  bool head_arrived = false;
  std::uint64_t payload_bytes = 0;
  std::size_t in_flight = 0;  // Segments that the network moves.
  std::vector<HeldSegment> held;
  bool refusing = false;  // Nobody wants it any more.
  bool placed = false;    // Has a destination.
  MemoryKind memory = MemoryKind::kHost;

  // INVALID_ARGUMENT when the sizes do not add up.
  absl::Status Place(DestinationSpans destination, MemoryKind kind);
  // The pieces of [offset, offset + bytes), appended.
  void Find(std::uint64_t offset, std::size_t bytes, std::vector<WirePiece>* pieces) const;
  // False when a part was there before.
  bool Arrive(std::uint64_t offset, std::size_t bytes) {
    return ranges_.Add(offset, offset + bytes);
  }
  void Count(std::size_t bytes) { counted_bytes_ += bytes; }
  // Every byte is in its place.
  bool complete() const { return head_arrived && placed_bytes == payload_bytes; }
  // Every byte came, wanted or not: no more segments.
  bool consumed() const { return head_arrived && counted_bytes_ == payload_bytes; }

  std::uint64_t placed_bytes = 0;

 private:
  DestinationSpans destination_;
  std::vector<std::uint64_t> begins_;  // Of each span in the payload.
  ByteRanges ranges_;
  std::uint64_t counted_bytes_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_MESSAGE_H_
