#include "client/transport/segment.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/transport/transport.h"
#include "storage/core/checksum.h"

namespace kvmill {
namespace {

static_assert(std::endian::native == std::endian::little, "fields are copied as they are");
static_assert(kSegmentHeadBytesMax == kCallHeaderBytesMax);

constexpr std::uint32_t kStatusCodeMax = 16;  // UNAUTHENTICATED.

}  // namespace

absl::StatusOr<SegmentHeader> ParseSegment(absl::Span<const std::byte> message) {
  const auto bad = [](absl::string_view field, std::uint64_t value) {
    return absl::DataLossError(absl::StrCat("segment: ", field, " is ", value));
  };
  SegmentHeader header;
  if (message.size() < sizeof(header)) return bad("size", message.size());
  std::memcpy(&header, message.data(), sizeof(header));
  if (header.magic != SegmentHeader{}.magic) return bad("magic", header.magic);
  if (header.format != 1) return bad("format", header.format);
  const auto kind = static_cast<std::uint32_t>(header.kind);
  if (kind < 1 || kind > 5) return bad("kind", kind);
  const bool is_request = header.kind == SegmentKind::kRequest;
  if (header.flags > (is_request ? kSegmentFlagResponseStays : 0)) {
    return bad("flags", header.flags);
  }
  if (header.head_bytes != message.size() - sizeof(header) ||
      header.head_bytes > kSegmentHeadBytesMax) {
    return bad("head_bytes", header.head_bytes);
  }
  if (header.payload_bytes > kPayloadBytesMax) return bad("payload_bytes", header.payload_bytes);
  if (header.segment_bytes > kSegmentBytesMax) return bad("segment_bytes", header.segment_bytes);
  if (header.offset > header.payload_bytes ||
      header.segment_bytes > header.payload_bytes - header.offset) {
    return bad("offset", header.offset);
  }
  if (header.offset != 0 && header.head_bytes != 0) return bad("head_bytes", header.head_bytes);
  // Only a message without a payload has a segment without bytes.
  if (header.segment_bytes == 0 && header.payload_bytes != 0) return bad("segment_bytes", 0);
  const bool is_message =
      header.kind == SegmentKind::kRequest || header.kind == SegmentKind::kResponse;
  if (!is_message && (header.payload_bytes != 0 || header.head_bytes != 0)) {
    return bad("payload_bytes", header.payload_bytes);
  }
  if (header.code > kStatusCodeMax) return bad("code", header.code);
  if (header.code != 0 && (header.kind != SegmentKind::kResponse || header.payload_bytes != 0)) {
    return bad("code", header.code);
  }
  return header;
}

std::uint64_t SegmentChecksum(absl::Span<const std::byte> message) { return Checksum(message); }

absl::Status CheckSegmentChecksum(absl::Span<const std::byte> message) {
  std::array<std::byte, sizeof(SegmentHeader) + kSegmentHeadBytesMax> copy;
  std::memcpy(copy.data(), message.data(), message.size());
  std::uint64_t stored = 0;
  std::byte* const place = copy.data() + offsetof(SegmentHeader, checksum);
  std::memcpy(&stored, place, sizeof(stored));
  std::memset(place, 0, sizeof(stored));
  const std::uint64_t actual = SegmentChecksum({copy.data(), message.size()});
  if (stored == actual) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("segment: checksum is 0x", absl::Hex(actual), ", want 0x", absl::Hex(stored)));
}

bool CounterWindow::Take(std::uint64_t counter) {
  const auto bit = [](std::uint64_t value) { return std::uint64_t{1} << (value % 64); };
  if (counter >= next_) {
    const std::uint64_t ahead = counter - next_;
    if (ahead >= kWindow) return false;  // Nobody skips that many: not a counter of our peer's.
    for (std::uint64_t i = next_; i < counter; ++i) bits_[i % kWindow / 64] &= ~bit(i);
    bits_[counter % kWindow / 64] |= bit(counter);
    next_ = counter + 1;
    return true;
  }
  if (next_ - counter > kWindow) return false;
  std::uint64_t& word = bits_[counter % kWindow / 64];
  if ((word & bit(counter)) != 0) return false;
  word |= bit(counter);
  return true;
}

bool ByteRanges::Add(std::uint64_t begin, std::uint64_t end) {
  const auto next =
      std::lower_bound(ranges_.begin(), ranges_.end(), begin,
                       [](const Range& range, std::uint64_t value) { return range.begin < value; });
  if (next != ranges_.end() && end > next->begin) return false;
  const auto previous = next == ranges_.begin() ? ranges_.end() : next - 1;
  if (previous != ranges_.end() && previous->end > begin) return false;
  bytes_ += end - begin;
  const bool joins_previous = previous != ranges_.end() && previous->end == begin;
  const bool joins_next = next != ranges_.end() && next->begin == end;
  if (joins_previous && joins_next) {
    previous->end = next->end;
    ranges_.erase(next);
  } else if (joins_previous) {
    previous->end = end;
  } else if (joins_next) {
    next->begin = begin;
  } else {
    ranges_.insert(next, {begin, end});
  }
  return true;
}

}  // namespace kvmill
