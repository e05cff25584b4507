#include "client/transport/message.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvmill {

std::uint64_t TotalBytes(const SourceSpans& spans) {
  std::uint64_t bytes = 0;
  for (const auto& span : spans) bytes += span.size();
  return bytes;
}

std::uint64_t TotalBytes(const DestinationSpans& spans) {
  std::uint64_t bytes = 0;
  for (const auto& span : spans) bytes += span.size();
  return bytes;
}

void OutgoingMessage::Set(SegmentKind kind, std::uint64_t call_id, std::vector<std::byte> head,
                          SourceSpans spans, MemoryKind memory) {
  kind_ = kind;
  call_id_ = call_id;
  head_ = std::move(head);
  spans_ = std::move(spans);
  memory_ = memory;
  payload_bytes_ = TotalBytes(spans_);
}

SegmentHeader OutgoingMessage::Cut(std::size_t segment_bytes_max, std::vector<WirePiece>* pieces) {
  SegmentHeader header;
  header.kind = kind_;
  header.call_id = call_id_;
  header.payload_bytes = payload_bytes_;
  header.offset = offset_;
  header.head_bytes = cut_any_ ? 0 : static_cast<std::uint32_t>(head_.size());
  header.code = code;
  header.flags = flags;
  header.timeout_ms = cut_any_ ? 0 : timeout_ms;
  const std::size_t push_bytes_max = std::min(PushBytesMax(kind_), segment_bytes_max);
  std::size_t bytes = 0;
  while (span_ < spans_.size() && pieces->size() < kPiecesMax) {
    const absl::Span<const std::byte> rest = spans_[span_].subspan(span_offset_);
    // A long run travels alone: it needs no gathering, and lies in one place where the receiver has
    // the same pages. Short ones are pushed together.
    std::size_t room = segment_bytes_max - bytes;
    if (bytes != 0) {
      if (rest.size() > push_bytes_max) break;
      room = bytes >= push_bytes_max ? 0 : push_bytes_max - bytes;
    }
    const std::size_t take = std::min(rest.size(), room);
    if (take == 0 && !rest.empty()) break;
    if (take != 0) pieces->push_back({const_cast<std::byte*>(rest.data()), take});
    bytes += take;
    span_offset_ += take;
    if (span_offset_ == spans_[span_].size()) {
      ++span_;
      span_offset_ = 0;
    }
    if (bytes > push_bytes_max) break;
  }
  header.segment_bytes = static_cast<std::uint32_t>(bytes);
  offset_ += bytes;
  cut_any_ = true;
  return header;
}

absl::Status IncomingMessage::Place(DestinationSpans destination, MemoryKind kind) {
  const std::uint64_t bytes = TotalBytes(destination);
  if (bytes != payload_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the destination has ", bytes, " bytes, the payload ", payload_bytes));
  }
  destination_ = std::move(destination);
  begins_.reserve(destination_.size());
  std::uint64_t begin = 0;
  for (const auto& span : destination_) {
    begins_.push_back(begin);
    begin += span.size();
  }
  memory = kind;
  placed = true;
  return absl::OkStatus();
}

void IncomingMessage::Find(std::uint64_t offset, std::size_t bytes,
                           std::vector<WirePiece>* pieces) const {
  // The last span that begins at or before `offset`.
  auto span = static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) -
                                       begins_.begin());
  if (span > 0) --span;
  while (bytes > 0) {
    const std::uint64_t within = offset - begins_[span];
    const std::size_t take = std::min<std::uint64_t>(bytes, destination_[span].size() - within);
    if (take > 0) pieces->push_back({destination_[span].data() + within, take});
    offset += take;
    bytes -= take;
    ++span;
  }
}

}  // namespace kvmill
