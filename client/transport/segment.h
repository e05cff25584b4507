// The parts that messages are cut into, each one message of the network. docs/formats.md has the
// layout. Internal to client/transport/; pure functions.
#ifndef KVMILL_CLIENT_TRANSPORT_SEGMENT_H_
#define KVMILL_CLIENT_TRANSPORT_SEGMENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmill {

enum class SegmentKind : std::uint8_t {
  kRequest = 1,   // Part of a call's request.
  kResponse = 2,  // Part of its response.
  kCancel = 3,    // The caller gave up: nothing more is wanted, and nothing more comes.
  kEnded = 4,     // The responder stopped: nothing more comes.
  kGoodbye = 5,   // The connection is being closed on purpose.
};

// The response's payload goes to memory that only the network can write: it must not be pushed.
inline constexpr std::uint8_t kSegmentFlagResponseStays = 1;

using SegmentTag = std::array<std::byte, 16>;  // Of AES-GCM.

// As it lies on the wire, little-endian; the head follows.
struct SegmentHeader {
  std::uint32_t magic = 0x47534D4Bu;  // "KMSG"
  std::uint16_t format = 1;
  SegmentKind kind = SegmentKind::kRequest;
  std::uint8_t flags = 0;  // kSegmentFlag…, in requests.
  std::uint64_t call_id = 0;
  std::uint64_t counter = 0;        // Of the sender, 0, 1, 2 …: no two segments have the same.
  std::uint64_t payload_bytes = 0;  // Of the whole message.
  std::uint64_t offset = 0;         // Of this segment in the payload.
  std::uint32_t segment_bytes = 0;
  std::uint32_t head_bytes = 0;  // Only at offset 0: the call's header, or a status's message.
  std::uint32_t code = 0;        // Of a response: absl::StatusCode.
  std::uint32_t timeout_ms = 0;  // Of a request: how long its caller waits from now.
  std::uint64_t checksum = 0;    // XXH3-64 of header (with zero here) and head; 0 when encrypted.
  SegmentTag data_tag{};         // Zero in plaintext.
  SegmentTag head_tag{};         // Over the header up to here and the head. Zero in plaintext.
};
static_assert(sizeof(SegmentHeader) == 96);

inline constexpr std::size_t kSegmentHeadBytesMax = 4096;
inline constexpr std::uint32_t kSegmentBytesMin = 64 << 10;  // What limits may be set to.
inline constexpr std::uint32_t kSegmentBytesMax = 8 << 20;

// Reads and checks the fields of `message`; its head begins at sizeof(SegmentHeader). The checksum
// and the tags are not looked at. DATA_LOSS naming field and value.
absl::StatusOr<SegmentHeader> ParseSegment(absl::Span<const std::byte> message);

// Of a message in plaintext: checks it against the header's checksum. DATA_LOSS naming both.
absl::Status CheckSegmentChecksum(absl::Span<const std::byte> message);
// Computes it; the header's checksum field must be zero.
std::uint64_t SegmentChecksum(absl::Span<const std::byte> message);

// Which counters arrived: each is taken once, and segments overtake each other by less than
// kWindow. A value type.
class CounterWindow {
 public:
  static constexpr std::uint64_t kWindow = 4096;
  // False when it was taken before or is too old to know.
  bool Take(std::uint64_t counter);

 private:
  std::uint64_t next_ = 0;  // One more than the highest taken.
  std::array<std::uint64_t, kWindow / 64> bits_{};
};

// Which bytes of a payload have arrived. A value type.
class ByteRanges {
 public:
  // False when any of [begin, end) was there before.
  bool Add(std::uint64_t begin, std::uint64_t end);
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct Range {
    std::uint64_t begin, end;
  };
  std::vector<Range> ranges_;  // Ascending, neither overlapping nor adjacent: few.
  std::uint64_t bytes_ = 0;
};

}  // namespace kvmill

#endif  // KVMILL_CLIENT_TRANSPORT_SEGMENT_H_
