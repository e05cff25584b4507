#include "storage/disk_keys.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "storage/core/checksum.h"
#include "storage/core/status_macros.h"

namespace kvmill {
namespace {

static_assert(std::endian::native == std::endian::little, "values are written as they lie in RAM");

constexpr std::size_t kFingerprintBytes = sizeof(Fingerprint);
constexpr absl::string_view kEpochPrefix = "epoch-";

absl::string_view AsBytes(const void* data, std::size_t size) {
  return absl::string_view(static_cast<const char*>(data), size);
}

// Of key and value one after the other; the value's checksum field must be 0.
std::uint64_t ChecksumOf(absl::string_view key, absl::string_view value) {
  std::string joined = absl::StrCat(key, value);
  return Checksum(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(joined.data()), joined.size()));
}

template <typename Header>
void SetChecksum(absl::string_view key, std::string* value) {
  const std::uint64_t checksum = ChecksumOf(key, *value);
  std::memcpy(value->data() + offsetof(Header, checksum), &checksum, sizeof(checksum));
}

template <typename Header>
absl::Status CheckChecksum(absl::string_view what, absl::string_view key, absl::string_view value) {
  std::string copy(value);
  std::uint64_t want = 0;
  std::memcpy(&want, copy.data() + offsetof(Header, checksum), sizeof(want));
  std::memset(copy.data() + offsetof(Header, checksum), 0, sizeof(want));
  const std::uint64_t got = ChecksumOf(key, copy);
  if (got != want) {
    return absl::DataLossError(absl::StrFormat("%s: xxh3 0x%x, want 0x%x", what, got, want));
  }
  return absl::OkStatus();
}

// What `run_place` says of a block; unknown codes say nothing, as in versions before there were
// any.
std::uint8_t RunPlaceOf(const DiskBlockMeta& meta) {
  const auto place = static_cast<std::uint8_t>(1 + meta.link.place);
  switch (meta.link.kind) {
    case RunLink::Kind::kNone:
      return 0;
    case RunLink::Kind::kFirst:
      return 1;
    case RunLink::Kind::kParent:
      return meta.parent.empty() ? 0 : place;
    case RunLink::Kind::kAnchor:
      return kNamesAnchor | place;
  }
  return 0;
}

// `before` is what lies where the parent's key is. May empty meta->parent.
void DecodeRunPlace(std::uint8_t run_place, absl::string_view before, DiskBlockMeta* meta) {
  const bool names_anchor = (run_place & kNamesAnchor) != 0;
  const int place = (run_place & ~kNamesAnchor) - 1;
  if (place < 0 || place >= static_cast<int>(kRunBlocks)) return;
  RunLink& link = meta->link;
  if (names_anchor) {
    if (before.size() != sizeof(link.hash)) return;
    std::memcpy(&link.hash, before.data(), sizeof(link.hash));
    link.kind = RunLink::Kind::kAnchor;
    link.place = static_cast<std::uint8_t>(place);
    meta->parent = BlockKey();
  } else if (place == 0) {
    link.kind = RunLink::Kind::kFirst;
  } else if (!before.empty()) {
    link.hash = KeyHash(meta->id.fingerprint, meta->parent);
    link.kind = RunLink::Kind::kParent;
    link.place = static_cast<std::uint8_t>(place);
  }
}

}  // namespace

std::string EncodeMetaKey(const DiskBlockId& id) {
  std::string bytes;
  bytes.reserve(kFingerprintBytes + 1 + id.key.size());
  bytes.append(reinterpret_cast<const char*>(id.fingerprint.data()), kFingerprintBytes);
  bytes.push_back(static_cast<char>(id.group));
  bytes.append(reinterpret_cast<const char*>(id.key.data()), id.key.size());
  return bytes;
}

absl::StatusOr<DiskBlockId> DecodeMetaKey(absl::string_view bytes) {
  if (bytes.size() <= kFingerprintBytes + 1 ||
      bytes.size() > kFingerprintBytes + 1 + kBlockKeyBytesMax) {
    return absl::DataLossError(absl::StrFormat("meta key of %d bytes, want %d to %d", bytes.size(),
                                               kFingerprintBytes + 2,
                                               kFingerprintBytes + 1 + kBlockKeyBytesMax));
  }
  DiskBlockId id;
  std::memcpy(id.fingerprint.data(), bytes.data(), kFingerprintBytes);
  id.group = static_cast<std::uint8_t>(bytes[kFingerprintBytes]);
  KVMILL_ASSIGN_OR_RETURN(id.key, BlockKey::FromBytes(bytes.substr(kFingerprintBytes + 1)));
  return id;
}

std::string EncodeMetaValue(absl::string_view meta_key, const DiskBlockMeta& meta,
                            std::uint64_t block_number) {
  std::vector<PageRun> runs;
  for (const std::uint32_t page_bytes : meta.page_bytes) {
    if (!runs.empty() && runs.back().page_bytes == page_bytes) {
      ++runs.back().page_count;
    } else {
      runs.push_back({.page_count = 1, .page_bytes = page_bytes});
    }
  }
  MetaValueHeader header{};
  const absl::string_view before = meta.link.kind == RunLink::Kind::kAnchor
                                       ? AsBytes(&meta.link.hash, sizeof(meta.link.hash))
                                       : meta.parent.view();
  header.version = kMetaValueVersion;
  header.parent_bytes = static_cast<std::uint8_t>(before.size());
  header.run_place = RunPlaceOf(meta);
  header.token_count = meta.token_count;
  header.run_count = static_cast<std::uint16_t>(runs.size());
  header.epoch = meta.epoch;
  header.block_number = block_number;
  std::string value = absl::StrCat(AsBytes(&header, sizeof(header)), before,
                                   AsBytes(runs.data(), runs.size() * sizeof(PageRun)));
  SetChecksum<MetaValueHeader>(meta_key, &value);
  return value;
}

absl::StatusOr<DecodedMeta> DecodeMeta(absl::string_view meta_key, absl::string_view meta_value) {
  MetaValueHeader header;
  if (meta_value.size() < sizeof(header)) {
    return absl::DataLossError(absl::StrFormat("meta value of %d bytes, want at least %d",
                                               meta_value.size(), sizeof(header)));
  }
  std::memcpy(&header, meta_value.data(), sizeof(header));
  if (header.version != kMetaValueVersion) {
    return absl::DataLossError(
        absl::StrFormat("meta value of version %d, want %d", header.version, kMetaValueVersion));
  }
  const std::size_t want_bytes =
      sizeof(header) + header.parent_bytes + header.run_count * sizeof(PageRun);
  if (header.parent_bytes > kBlockKeyBytesMax || meta_value.size() != want_bytes) {
    return absl::DataLossError(
        absl::StrFormat("meta value of %d bytes, want %d", meta_value.size(), want_bytes));
  }
  KVMILL_RETURN_IF_ERROR(CheckChecksum<MetaValueHeader>("meta value", meta_key, meta_value));

  DecodedMeta decoded;
  KVMILL_ASSIGN_OR_RETURN(decoded.meta.id, DecodeMetaKey(meta_key));
  if (header.parent_bytes > 0) {
    KVMILL_ASSIGN_OR_RETURN(decoded.meta.parent, BlockKey::FromBytes(meta_value.substr(
                                                     sizeof(header), header.parent_bytes)));
  }
  DecodeRunPlace(header.run_place, meta_value.substr(sizeof(header), header.parent_bytes),
                 &decoded.meta);
  decoded.meta.token_count = header.token_count;
  decoded.meta.epoch = header.epoch;
  decoded.block_number = header.block_number;
  const char* runs = meta_value.data() + sizeof(header) + header.parent_bytes;
  for (std::size_t i = 0; i < header.run_count; ++i) {
    PageRun run;
    std::memcpy(&run, runs + i * sizeof(run), sizeof(run));
    if (run.page_bytes == 0 || run.page_count > kDiskPagesMax - decoded.meta.page_bytes.size()) {
      return absl::DataLossError(absl::StrFormat("meta value: run %d of %d pages of %d bytes", i,
                                                 run.page_count, run.page_bytes));
    }
    decoded.meta.page_bytes.insert(decoded.meta.page_bytes.end(), run.page_count, run.page_bytes);
  }
  if (decoded.meta.page_bytes.empty()) return absl::DataLossError("meta value without pages");
  return decoded;
}

PageKey EncodePageKey(std::uint64_t block_number, std::size_t page_index) {
  PageKey key;
  for (std::size_t i = 0; i < 8; ++i) key[i] = static_cast<char>(block_number >> (56 - 8 * i));
  key[8] = static_cast<char>(page_index >> 8);
  key[9] = static_cast<char>(page_index);
  return key;
}

std::string EpochName(std::uint64_t epoch) {
  return absl::StrFormat("%s%016x", kEpochPrefix, epoch);
}

std::optional<std::uint64_t> EpochOfName(absl::string_view name) {
  if (name.size() != kEpochPrefix.size() + 16 ||
      name.substr(0, kEpochPrefix.size()) != kEpochPrefix) {
    return std::nullopt;
  }
  std::uint64_t epoch = 0;
  for (const char c : name.substr(kEpochPrefix.size())) {
    if (c >= '0' && c <= '9') {
      epoch = epoch << 4 | static_cast<std::uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      epoch = epoch << 4 | static_cast<std::uint64_t>(c - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return epoch;
}

std::string EncodeNamespaceValue(absl::string_view name, absl::string_view encoding) {
  NamespaceValueHeader header{};
  header.version = kNamespaceValueVersion;
  header.encoding_bytes = static_cast<std::uint32_t>(encoding.size());
  std::string value = absl::StrCat(AsBytes(&header, sizeof(header)), encoding);
  SetChecksum<NamespaceValueHeader>(name, &value);
  return value;
}

absl::StatusOr<std::string> DecodeNamespaceValue(absl::string_view name, absl::string_view value) {
  NamespaceValueHeader header;
  if (value.size() < sizeof(header)) {
    return absl::DataLossError(absl::StrFormat("namespace value of %d bytes, want at least %d",
                                               value.size(), sizeof(header)));
  }
  std::memcpy(&header, value.data(), sizeof(header));
  if (header.version != kNamespaceValueVersion ||
      value.size() != sizeof(header) + header.encoding_bytes) {
    return absl::DataLossError(absl::StrFormat(
        "namespace value of version %d and %d bytes, want version %d and %d bytes", header.version,
        value.size(), kNamespaceValueVersion, sizeof(header) + header.encoding_bytes));
  }
  KVMILL_RETURN_IF_ERROR(CheckChecksum<NamespaceValueHeader>("namespace value", name, value));
  return std::string(value.substr(sizeof(header)));
}

}  // namespace kvmill
