#include "client/cli/raw_heads.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "storage/core/checksum.h"

namespace kvmill::cli {
namespace {

std::size_t ValuesBytes(const TileFormat& format) {
  return std::size_t{2} * format.group * format.head_dim;  // Of K, and of V again.
}
std::size_t EntryBytes(const TileFormat& format) { return 8 + 2 * ValuesBytes(format); }

std::uint64_t ChecksumOf(absl::string_view bytes) {
  return Checksum(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
}

}  // namespace

std::string SerializeRawHeads(const std::vector<RawHead>& raw_heads, const TileFormat& format,
                              DType dtype, std::uint32_t heads, std::uint32_t block_count) {
  RawHeadsHeader header{};
  header.magic = kRawHeadsMagic;
  header.version = kRawHeadsVersion;
  header.dtype = static_cast<std::uint16_t>(dtype);
  header.block_tokens = format.group;
  header.head_dim = format.head_dim;
  header.head_count = heads;
  header.block_count = block_count;
  header.raw_head_count = raw_heads.size();
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.reserve(sizeof(header) + raw_heads.size() * EntryBytes(format));
  for (const RawHead& raw : raw_heads) {
    bytes.append(reinterpret_cast<const char*>(&raw.block), sizeof(raw.block));
    bytes.append(reinterpret_cast<const char*>(&raw.head), sizeof(raw.head));
    bytes.append(reinterpret_cast<const char*>(raw.k.data()), ValuesBytes(format));
    bytes.append(reinterpret_cast<const char*>(raw.v.data()), ValuesBytes(format));
  }
  const std::uint64_t checksum = ChecksumOf(bytes);
  std::memcpy(bytes.data() + offsetof(RawHeadsHeader, checksum), &checksum, sizeof(checksum));
  return bytes;
}

absl::StatusOr<RawHeads> ParseRawHeads(absl::string_view bytes, const TileFormat& format,
                                       std::uint32_t heads) {
  RawHeadsHeader header;
  if (bytes.size() < sizeof(header)) {
    return absl::InvalidArgumentError(
        absl::StrCat("raw heads file of ", bytes.size(), " bytes, at least ", sizeof(header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kRawHeadsMagic || header.version != kRawHeadsVersion || header.dtype > 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("not a raw heads file of version %d: magic %#x, version %d",
                        kRawHeadsVersion, header.magic, header.version));
  }
  if (header.block_tokens != format.group || header.head_dim != format.head_dim ||
      header.head_count != heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("raw heads of blocks of ", header.block_tokens, " tokens, ", header.head_count,
                     " heads, head_dim ", header.head_dim, "; want ", format.group, ", ", heads,
                     ", ", format.head_dim));
  }
  const std::size_t entries_bytes = bytes.size() - sizeof(header);
  if (entries_bytes % EntryBytes(format) != 0 ||
      entries_bytes / EntryBytes(format) != header.raw_head_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("raw heads file has ", entries_bytes, " bytes of entries, want ",
                     header.raw_head_count, " of ", EntryBytes(format), " bytes"));
  }
  std::string zeroed(bytes);
  std::memset(zeroed.data() + offsetof(RawHeadsHeader, checksum), 0, sizeof(header.checksum));
  if (const std::uint64_t found = ChecksumOf(zeroed); found != header.checksum) {
    return absl::DataLossError(
        absl::StrFormat("raw heads file: xxh3 %#x, want %#x", found, header.checksum));
  }
  RawHeads result;
  result.dtype = static_cast<DType>(header.dtype);
  result.block_count = header.block_count;
  const std::size_t value_count = std::size_t{format.group} * format.head_dim;
  for (std::size_t at = sizeof(header); at < bytes.size(); at += EntryBytes(format)) {
    RawHead raw;
    std::memcpy(&raw.block, bytes.data() + at, 4);
    std::memcpy(&raw.head, bytes.data() + at + 4, 4);
    if (raw.block >= header.block_count || raw.head >= heads) {
      return absl::InvalidArgumentError(absl::StrCat("raw heads file names block ", raw.block,
                                                     " head ", raw.head, " of ", header.block_count,
                                                     " blocks and ", heads, " heads"));
    }
    raw.k.resize(value_count);
    raw.v.resize(value_count);
    std::memcpy(raw.k.data(), bytes.data() + at + 8, ValuesBytes(format));
    std::memcpy(raw.v.data(), bytes.data() + at + 8 + ValuesBytes(format), ValuesBytes(format));
    result.heads.push_back(std::move(raw));
  }
  return result;
}

}  // namespace kvmill::cli
