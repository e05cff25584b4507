// Messages that carry bulk bytes, written and read without copying the bytes.
//
// On the wire they are ordinary protobuf messages (StoreRequest, FetchReply) whose last field is
// the bulk `bytes` field. Writing: the protobuf library serializes everything else into one small
// slice, the bulk field's tag and length follow by hand, and then come slices that reference the
// owner's memory. Reading: the bulk field is left in the slices that the transport filled.
//
// Internal to client/ and service/. Functions are thread-safe; values belong to one thread at a
// time.
#ifndef KVMILL_CLIENT_BULK_CODEC_H_
#define KVMILL_CLIENT_BULK_CODEC_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmill {

inline constexpr std::uint32_t kBulkField = 15;  // StoreChunk.inline and FetchReply.pages.
inline constexpr std::uint32_t kChunkField = 2;  // StoreRequest.chunk.
inline constexpr std::size_t kBulkHeadBytesMax = 64 << 10;  // Of everything but the bulk field.

// The bytes of the message up to its bulk contents. `head` is the message without the bulk field;
// `outer_field` is not 0 when that message is itself a field of an outer one.
std::string EncodeBulkHead(const google::protobuf::MessageLite& head, std::uint32_t outer_field,
                           std::uint64_t bulk_bytes);

// A message whose bulk field stays where it arrived. Holds the transport's memory.
class BulkMessage {
 public:
  // `head` gets everything but the bulk field. INVALID_ARGUMENT when it is not such a message: no
  // protobuf, another outer field, or bytes after the bulk field.
  absl::Status Parse(const grpc::ByteBuffer& message, std::uint32_t outer_field,
                     google::protobuf::MessageLite* head);

  std::uint64_t bulk_bytes() const { return bulk_bytes_; }
  // The contents, in order. Valid while this object is.
  absl::Span<const absl::Span<const std::byte>> pieces() const { return pieces_; }

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<absl::Span<const std::byte>> pieces_;
  std::uint64_t bulk_bytes_ = 0;
};

// Pointers to consecutive rows of `row_bytes` in the pieces; a row that is cut by a piece's end is
// copied aside. The pieces must outlive it and hold rows.size() * row_bytes bytes or more.
class RowTable {
 public:
  RowTable(absl::Span<const absl::Span<const std::byte>> pieces, std::size_t row_bytes,
           std::size_t row_count);
  const std::byte* const* rows() const { return rows_.data(); }
  // Set aside for rows that lie in more than one piece: never more than all rows.
  std::size_t copy_bytes() const { return cut_rows_.size(); }

 private:
  std::vector<const std::byte*> rows_;
  std::vector<std::byte> cut_rows_;
};

// Serializes a small message, and parses one.
grpc::ByteBuffer ToByteBuffer(const google::protobuf::MessageLite& message);
bool FromByteBuffer(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_BULK_CODEC_H_
