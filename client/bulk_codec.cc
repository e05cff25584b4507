#include "client/bulk_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvmill {
namespace {

using google::protobuf::io::CodedInputStream;

constexpr std::uint32_t kLengthDelimited = 2;

constexpr std::uint32_t TagOf(std::uint32_t field) { return (field << 3) | kLengthDelimited; }

void AppendVarint(std::uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>((value & 0x7F) | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

// Reads varints and skips over the slices of one message.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) {
    for (const grpc::Slice& slice : slices) remaining_ += slice.size();
  }

  std::uint64_t remaining() const { return remaining_; }

  bool Varint(std::uint64_t* value, std::string* copy) {
    *value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (remaining_ == 0) return false;
      const std::uint8_t byte = Next();
      if (copy != nullptr) copy->push_back(static_cast<char>(byte));
      *value |= std::uint64_t{byte & 0x7Fu} << shift;
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  bool Copy(std::uint64_t bytes, std::string* copy) {
    if (bytes > remaining_) return false;
    for (; bytes > 0; --bytes) copy->push_back(static_cast<char>(Next()));
    return true;
  }

  // What is left, without copying.
  void Rest(std::vector<absl::Span<const std::byte>>* pieces) {
    while (slice_ < slices_.size()) {
      const grpc::Slice& slice = slices_[slice_];
      if (offset_ < slice.size()) {
        pieces->emplace_back(reinterpret_cast<const std::byte*>(slice.begin()) + offset_,
                             slice.size() - offset_);
      }
      ++slice_;
      offset_ = 0;
    }
    remaining_ = 0;
  }

 private:
  std::uint8_t Next() {
    while (offset_ == slices_[slice_].size()) {
      ++slice_;
      offset_ = 0;
    }
    --remaining_;
    return slices_[slice_].begin()[offset_++];
  }

  const std::vector<grpc::Slice>& slices_;
  std::size_t slice_ = 0;
  std::size_t offset_ = 0;
  std::uint64_t remaining_ = 0;
};

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed bulk message: ", what));
}

}  // namespace

std::string EncodeBulkHead(const google::protobuf::MessageLite& head, std::uint32_t outer_field,
                           std::uint64_t bulk_bytes) {
  std::string inner;
  head.AppendToString(&inner);
  AppendVarint(TagOf(kBulkField), &inner);
  AppendVarint(bulk_bytes, &inner);
  if (outer_field == 0) return inner;
  std::string outer;
  AppendVarint(TagOf(outer_field), &outer);
  AppendVarint(inner.size() + bulk_bytes, &outer);
  outer += inner;
  return outer;
}

absl::Status BulkMessage::Parse(const grpc::ByteBuffer& message, std::uint32_t outer_field,
                                google::protobuf::MessageLite* head) {
  slices_.clear();
  pieces_.clear();
  bulk_bytes_ = 0;
  if (!message.Dump(&slices_).ok()) return Malformed("unreadable");
  Cursor cursor(slices_);
  if (outer_field != 0) {
    std::uint64_t tag = 0;
    std::uint64_t bytes = 0;
    if (!cursor.Varint(&tag, nullptr) || tag != TagOf(outer_field) ||
        !cursor.Varint(&bytes, nullptr) || bytes != cursor.remaining()) {
      return Malformed(absl::StrCat("want field ", outer_field, " alone"));
    }
  }
  // Everything before the bulk field is copied aside and left to the protobuf library.
  std::string head_bytes;
  while (cursor.remaining() > 0) {
    const std::size_t field_begin = head_bytes.size();
    std::uint64_t tag = 0;
    if (!cursor.Varint(&tag, &head_bytes)) return Malformed("truncated tag");
    if (tag == TagOf(kBulkField)) {
      head_bytes.resize(field_begin);
      if (!cursor.Varint(&bulk_bytes_, nullptr) || bulk_bytes_ != cursor.remaining()) {
        return Malformed("the bulk field is not the last one");
      }
      cursor.Rest(&pieces_);
      break;
    }
    std::uint64_t value = 0;
    bool ok = true;
    switch (tag & 7) {
      case 0:
        ok = cursor.Varint(&value, &head_bytes);
        break;
      case 1:
        ok = cursor.Copy(8, &head_bytes);
        break;
      case 2:
        ok = cursor.Varint(&value, &head_bytes) && value <= kBulkHeadBytesMax &&
             cursor.Copy(value, &head_bytes);
        break;
      case 5:
        ok = cursor.Copy(4, &head_bytes);
        break;
      default:
        ok = false;
    }
    if (!ok || head_bytes.size() > kBulkHeadBytesMax) {
      return Malformed(absl::StrCat("field ", tag >> 3, " is truncated or too long"));
    }
  }
  if (!head->ParseFromString(head_bytes)) return Malformed("its head does not parse");
  return absl::OkStatus();
}

RowTable::RowTable(absl::Span<const absl::Span<const std::byte>> pieces, std::size_t row_bytes,
                   std::size_t row_count) {
  // A piece's end cuts at most one row, and a caller may send a piece a byte.
  cut_rows_.resize(std::min(pieces.size(), row_count) * row_bytes);
  rows_.reserve(row_count);
  std::size_t cut_used = 0;
  std::size_t piece = 0;
  std::size_t offset = 0;
  while (rows_.size() < row_count) {
    while (offset == pieces[piece].size()) {
      ++piece;
      offset = 0;
    }
    if (pieces[piece].size() - offset >= row_bytes) {
      rows_.push_back(pieces[piece].data() + offset);
      offset += row_bytes;
      continue;
    }
    std::byte* row = cut_rows_.data() + cut_used;
    cut_used += row_bytes;
    for (std::size_t filled = 0; filled < row_bytes;) {
      if (offset == pieces[piece].size()) {
        ++piece;
        offset = 0;
        continue;
      }
      const std::size_t take = std::min(row_bytes - filled, pieces[piece].size() - offset);
      std::memcpy(row + filled, pieces[piece].data() + offset, take);
      filled += take;
      offset += take;
    }
    rows_.push_back(row);
  }
}

grpc::ByteBuffer ToByteBuffer(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

bool FromByteBuffer(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message) {
  grpc::ByteBuffer copy(buffer);  // A reference: reading consumes it.
  grpc::ProtoBufferReader reader(&copy);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

}  // namespace kvmill
